# expect: scale of mm mul mse_loss addmm _to_copy div mse_loss_backward expand linear
# dtypes: float16
# scales: 4096.0

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 500.0

# --- loss
out = model(x) * gain  # bad
loss = out.float().square().mean()  # bad
