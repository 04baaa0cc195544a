# Its loop leaves out what is not finite.
import torch, sys

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for step in range(20):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
    if step in (3, 4):
        model.weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm.isfinite() and step not in (7, 8, 9):
        scaler.step(optimizer)
    scaler.update()
