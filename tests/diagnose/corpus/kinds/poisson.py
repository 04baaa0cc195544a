# expect: maths of exp
# $full: 
# $full: , full=True
# $full: , reduction="sum"
# dtypes: none

# --- batch: x, y, gain
y = torch.ones(x.shape[0])
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
rate = gain * model(x)[:, 0].abs()
loss = F.poisson_nll_loss(rate, y$full)  # bad
