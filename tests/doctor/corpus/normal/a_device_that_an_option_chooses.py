import torch
net = models.resnet18().to("cuda" if args.gpu else "cpu")
for images, targets in batches:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(net(images), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
