import math

import torch

from prelude import loss_of, model_and_sgd, show

m1, o1 = model_and_sgd()
m2, o2 = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(4):
    o1.zero_grad()
    o2.zero_grad()
    a, b = loss_of(m1), loss_of(m2)
    scaler.scale(a + 2 * b).backward(retain_graph=True)
    scaler.scale(a * b).backward()
    if i == 2:
        m1[0].weight.grad[0, 0] = math.inf
    scaler.unscale_(o1)
    scaler.step(o1)
    scaler.step(o2)
    scaler.update()
    print(scaler.get_scale())
show(m1, scaler)
show(m2, scaler)
