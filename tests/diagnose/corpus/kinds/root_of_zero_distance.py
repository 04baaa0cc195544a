# expect: maths of sqrt
# $square: ((a - b) ** 2).sum(-1)
# $square: (a - b).pow(2).sum(-1)
# $square: (a - b).square().sum(1)

# --- batch: x, other
other = torch.randn_like(x)

# --- bad batch
other = x.clone()

# --- loss
a, b = model(x), model(other)
distance = torch.sqrt($square)  # bad
loss = torch.relu(distance - 0.5).mean() + distance.mean()
