import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

def first():
    for p in model.parameters():
        p.e = p.grad * 0.01
        p.data.add_(p.e)
    opt.zero_grad()

def second():
    for p in model.parameters():
        p.data.sub_(p.e)
    opt.step()
    opt.zero_grad()

for _ in range(4):
    scaler.scale(loss_of(model)).backward()
    state = scaler._per_optimizer_states[id(opt)]
    scaler.unscale_(opt)
    if not sum(v.item() for v in state["found_inf_per_device"].values()):
        first()
    state["stage"] = 2
    scaler.update()
    scaler.scale(loss_of(model)).backward()
    state = scaler._per_optimizer_states[id(opt)]
    scaler.unscale_(opt)
    if not sum(v.item() for v in state["found_inf_per_device"].values()):
        second()
    state["stage"] = 2
    scaler.update()
    print(scaler.get_scale())
show(model, scaler)
