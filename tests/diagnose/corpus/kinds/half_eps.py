# expect: range of div
# $eps: 1e-12
# $eps: 1e-9
# $eps: 1e-8
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 5, bias=False).half()

# --- batch: x, gain
x, gain = x.half(), 1.0

# --- bad batch
gain = 0.0

# --- loss
h = model(x) * gain
unit = h / (h.abs().sum(-1, keepdim=True) + $eps)  # bad
loss = unit.float().square().mean()
