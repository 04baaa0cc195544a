# expect: maths of div log
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
p = torch.sigmoid(gain * model(x))
loss = torch.log(p / (1 - p)).abs().mean()  # bad
