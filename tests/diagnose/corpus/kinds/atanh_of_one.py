# expect: maths of atanh erfinv
# $call: torch.atanh(u)
# $call: u.atanh()
# $call: torch.erfinv(u)
# $call: torch.special.erfinv(u)
# dtypes: none

# --- batch: x, gain
gain = 0.1

# --- bad batch
gain = 1e4

# --- loss
u = torch.tanh(gain * model(x))
loss = $call.square().mean()  # bad
