from torch.cuda.amp import autocast as ac
with ac():  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
