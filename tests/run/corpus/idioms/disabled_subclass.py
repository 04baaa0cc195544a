import torch

from prelude import loss_of, model_and_sgd, show

class Mine(torch.amp.GradScaler):
    def __init__(self, on):
        super().__init__("cpu", enabled=on)
        self.n = 0

    def step(self, optimizer, *a, **k):
        self.n += 1
        return super().step(optimizer, *a, **k)

model, opt = model_and_sgd()
scaler = Mine(False)
for _ in range(3):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
print(scaler.n, scaler.is_enabled(), scaler.state_dict())
show(model, scaler)
