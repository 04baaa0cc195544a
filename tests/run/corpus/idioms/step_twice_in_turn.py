import torch

from prelude import loss_of, model_and_sgd, show

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    opt.zero_grad()
    loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.step(opt)
    try:
        scaler.step(opt)
    except RuntimeError:
        print("RuntimeError")
    scaler.update()
    try:
        scaler.update()
    except (AssertionError, RuntimeError):
        print("update twice")
show(model, scaler)
