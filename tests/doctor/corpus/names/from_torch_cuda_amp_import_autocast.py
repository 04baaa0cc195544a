def f():
    from torch.cuda.amp import autocast  # expect: deprecated-amp
with autocast():  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
