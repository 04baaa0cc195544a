import torch
has_gpu = torch.cuda.is_available()
scaler = torch.cuda.amp.GradScaler() if has_gpu else torch.amp.GradScaler("cpu")
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
