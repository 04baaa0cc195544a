# expect: maths of exp
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 1)
count_loss = nn.PoissonNLLLoss()

# --- batch: x, y, gain
y = torch.ones(x.shape[0])
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
loss = count_loss(gain * model(x)[:, 0].abs(), y)  # bad
