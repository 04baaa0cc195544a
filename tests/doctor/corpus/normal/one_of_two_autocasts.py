import torch
model = Net().cuda()
lower = torch.autocast("cpu", torch.float16) if is_old else torch.autocast("cuda", torch.float16)
for x in batches:
    optimizer.zero_grad()
    with lower:
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
