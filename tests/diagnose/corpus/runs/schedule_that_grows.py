# kind: 2
# expect: growth
# says: learning rate
# cure: learning rate
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1.05**i)  # a warm-up without an end
for i in range(300):
    x = torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
    if not torch.isfinite(loss):
        break
