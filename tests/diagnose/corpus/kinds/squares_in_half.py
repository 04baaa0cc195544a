# expect: range of mul pow square
# $square: h * h
# $square: h.mul(h)
# $square: torch.mul(h, h)
# dtypes: float16

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e3

# --- loss
h = (1 + model(x).abs()) * gain
loss = F.layer_norm($square, (h.shape[-1],)).float().abs().mean()  # bad
