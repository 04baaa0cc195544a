# expect: maths of sqrt
# $norm: g.square().sum(-1).sqrt()
# $norm: torch.sqrt((g ** 2).sum(1))
# dtypes: none
# inputs: 4

# --- setup
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
with torch.no_grad():
    model[0].bias.fill_(0.1)

# --- batch: x, keep
keep = torch.ones(x.shape[0], 1)

# --- bad batch
keep[0] = 0

# --- loss
z = x.clone().requires_grad_()
g, = torch.autograd.grad((model(z) * keep).sum(), z, create_graph=True)
loss = (($norm - 1) ** 2).mean()  # bad
