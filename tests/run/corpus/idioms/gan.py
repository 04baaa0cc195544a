import math

import torch

from prelude import loss_of, model_and_sgd, show

g, og = model_and_sgd()
d, od = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(5):
    od.zero_grad()
    scaler.scale(loss_of(d) + loss_of(g).detach()).backward()
    scaler.step(od)
    scaler.update()
    og.zero_grad()
    scaler.scale(loss_of(g) * loss_of(d)).backward()
    if i == 2:
        g[0].weight.grad[0, 0] = math.inf
    scaler.step(og)
    scaler.update()
    print(scaler.get_scale())
show(g, scaler)
show(d, scaler)
