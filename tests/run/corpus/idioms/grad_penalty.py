import torch

from prelude import X, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    opt.zero_grad()
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x).float().mean()
    g = torch.autograd.grad(scaler.scale(out), x, create_graph=True)[0]
    g = g / scaler.get_scale()
    with torch.autocast("cpu", torch.bfloat16):
        loss = (g.norm() - 1) ** 2 + out
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
show(model, scaler)
