def f():
    from torch.cuda.amp import autocast
with autocast():  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
