import torch
from halfstep import GradScaler, autocast
model.to('cuda')
with torch.autocast('cpu', torch.float16):  # expect: device-differs
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
model.to('cpu')
torch.save(model.state_dict(), 'model.pt')
