import torch as t
with t.amp.autocast('cuda', dtype=t.float16):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
