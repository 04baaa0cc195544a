# expect: maths of acosh
# $call: torch.acosh(d)
# $call: d.acosh()
# $call: torch.arccosh(d)
# dtypes: none

# --- batch: x, other
other = torch.randn_like(x)

# --- bad batch
other = x.clone()

# --- loss
a, b = model(x), model(other)
d = 1 + 2 * (a - b).square().sum(-1)
loss = $call.mean()  # bad
