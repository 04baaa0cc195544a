# expect: maths of exp expm1 cosh pow exp2
# $call: torch.exp(h)
# $call: h.exp()
# $call: torch.expm1(h)
# $call: torch.cosh(h)
# $call: 2 ** (2 * h)
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
h = gain * model(x).abs()
loss = $call.mean()  # bad
