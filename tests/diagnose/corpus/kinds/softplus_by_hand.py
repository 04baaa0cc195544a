# expect: maths of exp
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e5

# --- loss
h = gain * model(x).abs()
loss = torch.log1p(torch.exp(h)).mean()  # bad
