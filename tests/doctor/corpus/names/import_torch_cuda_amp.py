import torch.cuda.amp
with torch.cuda.amp.autocast(True):  # expect: deprecated-amp fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
