# expect: maths of div
# $norm: g.norm()
# $norm: g.abs().max()
# $norm: g.abs().mean()
# dtypes: none
# inputs: 4

# --- setup
def unit(g):
    return g / $norm  # bad


model = nn.Linear(4, 4)

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x)
h.register_hook(unit)
loss = (h * keep).square().mean()
