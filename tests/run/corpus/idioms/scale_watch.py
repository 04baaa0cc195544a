import math

import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", growth_interval=2)
sched = torch.optim.lr_scheduler.StepLR(opt, 2)
for i in range(8):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if i in (3, 4):
        model[0].weight.grad[0, 0] = math.inf
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if not before > scaler.get_scale():
        sched.step()
    print(scaler.get_scale(), sched.get_last_lr())
show(model, scaler)
