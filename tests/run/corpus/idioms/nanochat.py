import math

import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for i in range(6):
    scaler.scale(loss_of(model)).backward()
    if i == 2:
        model[0].weight.grad[0, 0] = math.nan
    scaler.unscale_(opt)
    for v in scaler._found_inf_per_device(opt).values():
        v.mul_(1)
    scaler.step(opt)
    scaler.update()
    model.zero_grad(set_to_none=True)
    print(scaler.get_scale())
show(model, scaler)
