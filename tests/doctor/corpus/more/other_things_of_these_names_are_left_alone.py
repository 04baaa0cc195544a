from mxnet.amp import autocast, float16
with autocast('cpu', float16):
    loss = f(x)
    loss.backward()
optimizer.step()
