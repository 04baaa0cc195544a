# expect: maths of log
# inputs: 4

# --- setup
model = nn.Linear(4, 9)

# --- batch: x, y
y = torch.randn(x.shape[0], 1)

# --- bad batch
y = y + 1e4

# --- loss
weight, mean, raw = model(x).float().chunk(3, -1)
sigma = F.softplus(raw) + 0.1
density = torch.exp(-0.5 * ((y - mean) / sigma) ** 2) / sigma
mixture = (weight.softmax(-1) * density).sum(-1)
loss = -torch.log(mixture).mean()  # bad
