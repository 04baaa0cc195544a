import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
opt.zero_grad()
scaler.scale(loss_of(model)).backward()
scaler.step(opt)
scaler.update(new_scale=torch.tensor(64.0))
print(scaler.get_scale())
opt.zero_grad()
scaler.scale(loss_of(model)).backward()
scaler.step(opt)
scaler.update(32.0)
print(scaler.get_scale())
print(scaler.scale([torch.ones(2), (torch.ones(()),)]))
print(scaler._scale, scaler._growth_tracker, scaler._init_scale, scaler._growth_interval)
show(model, scaler)
