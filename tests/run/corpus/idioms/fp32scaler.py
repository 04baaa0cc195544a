import torch

from prelude import loss_of, model_and_sgd, show

class FP32Scaler(torch.amp.GradScaler):
    def scale(self, loss):
        return loss

    def step(self, optimizer):
        norm = torch.norm(
            torch.stack([p.grad.norm() for g in optimizer.param_groups for p in g["params"]])
        )
        if norm.isfinite():
            optimizer.step()

    def update(self):
        pass

model, opt = model_and_sgd()
scaler = FP32Scaler("cpu")
for _ in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    scaler.update()
show(model, scaler)
