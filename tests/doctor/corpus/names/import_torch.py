import torch
with torch.autocast('cuda', torch.float16):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
