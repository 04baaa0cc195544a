# expect: range of mul
# $cast: .half()
# $cast: .to(torch.float16)
# $cast: .type(torch.float16)
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 3e2

# --- loss
h = (gain * (1 + model(x).abs()))$cast
loss = (h * h).float().mean() / 1e6  # bad
