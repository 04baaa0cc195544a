# expect: maths of mul
# $inf: -math.inf
# $inf: float("-inf")
# $inf: -torch.inf
# dtypes: none
# outputs: 4

# --- batch: x, mask
mask = torch.ones(x.shape[0], 4)

# --- bad batch
mask[0] = 0

# --- loss
logp = model(x).log_softmax(-1).masked_fill(mask == 0, $inf)
loss = -(logp * mask).sum(-1).mean()  # bad
