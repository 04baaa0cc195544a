# kind: 1
# expect: optimizer
# says: exp_avg_sq is inf or NaN there
# cure: last wrote to it: \S+:2[12] in <module>: .*half\(\)\.float\(\)
# never: checkpoint
# step: 5
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, 15):
    x = 1000 * torch.randn(32, 6)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        for state in opt.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].half().float()
            state["exp_avg"] = state["exp_avg"].half().float()
