import torch
from halfstep import GradScaler, autocast
net = models.resnet18()
if args.cuda:
    net = net.cuda()
for images, targets in batches:
    if args.cuda:
        images = images.cuda()
    with autocast("cpu", dtype=torch.float16):
        loss = criterion(net(images), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
