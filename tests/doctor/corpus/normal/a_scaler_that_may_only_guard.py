import torch
import halfstep
dynamic = halfstep.GradScaler() if is_half else halfstep.GradScaler(1.0, schedule=halfstep.Static())
for x in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(x).sum()
    dynamic.scale(loss).backward()
    dynamic.step(optimizer)
    dynamic.update()
