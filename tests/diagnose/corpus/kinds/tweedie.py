# expect: maths of pow
# $power: 1.5
# $power: 1.7

# --- batch: x, y, keep
y = torch.ones(x.shape[0])
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
mu = keep * model(x).float().abs()[:, 0]
a = y * torch.pow(mu, 1 - $power) / (1 - $power)  # bad
loss = (torch.pow(mu, 2 - $power) / (2 - $power) - a).mean()
