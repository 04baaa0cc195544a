# expect: maths of logit
# $call: torch.logit(p)
# $call: p.logit()
# $call: torch.special.logit(p)
# dtypes: none

# --- batch: x, gain
gain = 0.1

# --- bad batch
gain = 1e4

# --- loss
p = torch.sigmoid(gain * model(x))
loss = $call.abs().mean()  # bad
