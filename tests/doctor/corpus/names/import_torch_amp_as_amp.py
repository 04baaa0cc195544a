import torch
import torch.amp as amp
with amp.autocast('cuda', torch.float16):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
