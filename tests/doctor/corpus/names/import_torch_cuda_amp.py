import torch.cuda.amp
with torch.cuda.amp.autocast(True):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
