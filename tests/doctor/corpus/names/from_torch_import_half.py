import halfstep as hs
from torch import half
with hs.autocast('cpu', half):  # expect: fp16-without-scaler
    loss = f(x)
loss.backward()
optimizer.step()
