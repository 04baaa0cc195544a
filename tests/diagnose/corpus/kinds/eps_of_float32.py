# expect: range of div reciprocal log rsqrt
# $eps: 1e-12
# $eps: 1e-10
# $eps: 1e-8
# dtypes: float16

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x) * keep
unit = h / (h.abs().amax(-1, keepdim=True) + $eps)  # bad
loss = unit.float().square().mean()
