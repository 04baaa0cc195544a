# kind: 1
# expect: data
# says: exp_avg.* of 0\.weight
# says: checkpoint
# says: the first one with a state that was loaded or set
# step: 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)


def train(steps):
    for _ in range(steps):
        x = torch.randn(32, 6)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()  # bad


for p in model.parameters():
    opt.state[p]["step"] = torch.tensor(500.0)
    opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"] = torch.zeros_like(p), torch.ones_like(p)
state = opt.state_dict()
state["state"][0]["exp_avg"][2, 3] = float("nan")
opt.load_state_dict(state)
train(10)
