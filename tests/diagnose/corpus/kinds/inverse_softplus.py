# expect: maths of expm1 log
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 0.0

# --- loss
h = gain * model(x).abs()
loss = torch.log(torch.expm1(h)).clamp_min(-5).mean()  # bad
