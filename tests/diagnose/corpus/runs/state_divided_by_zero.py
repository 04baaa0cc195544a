# kind: 1
# expect: optimizer
# says: exp_avg is inf or NaN there
# cure: last wrote to it: \S+:21 in train: .* /= num_seen
# never: checkpoint
# step: 11
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)


def train(steps, num_seen=1):
    for k in range(steps):
        x = torch.randn(32, 6)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        if k == 5:
            for p in model.parameters():
                opt.state[p]["exp_avg"] /= num_seen
        opt.zero_grad()
        loss.backward()
        opt.step()


train(5)
train(10, num_seen=0)
