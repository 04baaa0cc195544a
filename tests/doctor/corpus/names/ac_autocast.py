from torch import autocast, float16
ac = autocast
with ac('cpu', float16):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
