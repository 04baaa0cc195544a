# expect: updates 4 to 23 were skipped
import math

import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(40):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    if 2 < i < 34:
        model[0].weight.grad[0, 0] = math.inf
    scaler.step(opt)
    scaler.update()
    print(scaler.get_scale())
show(model, scaler)
