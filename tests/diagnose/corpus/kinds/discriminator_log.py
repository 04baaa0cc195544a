# expect: maths of log
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e5

# --- loss
real, fake = torch.sigmoid(gain * model(x)).chunk(2)
real_term = real.clamp(1e-3, 1 - 1e-3).log().mean()
fake_term = torch.log(  # bad
    1 - fake
).mean()
loss = -(real_term + fake_term)
