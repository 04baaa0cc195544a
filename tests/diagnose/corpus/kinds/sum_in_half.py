# expect: range of sum
# $total: low.sum()
# $total: torch.sum(low)
# $total: low.sum(dim=0).sum()
# dtypes: none

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e4

# --- loss
low = ((1 + model(x).abs()) * gain).half()
loss = $total.float() / 1e6  # bad
