# expect: maths of sqrt pow
# $call: h.pow(2).mean().sqrt()
# $call: torch.sqrt(F.mse_loss(h, h * 0))
# $call: h.square().mean() ** 0.5
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
loss = $call  # bad
