# expect: maths of mean
# inputs: 4

# --- setup
model = nn.Linear(4, 2)

# --- batch: x, sizes
x = torch.randn(9, 4)
sizes = [2, 4, 3]

# --- bad batch
sizes = [5, 0, 4]

# --- loss
parts = [part.mean(0) for part in model(x).float().split(sizes)]  # bad
loss = torch.stack(parts).square().mean()
