# expect: maths of div
# dtypes: none
# inputs: 4

# --- setup
def rescale(module, inputs, outputs):
    return tuple(g / g.abs().amax() for g in inputs)  # bad


model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
model[2].register_full_backward_hook(rescale)

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
loss = (model(x) * keep).square().mean()
