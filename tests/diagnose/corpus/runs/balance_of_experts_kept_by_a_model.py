# kind: 5
# expect: maths log
# step: 1
# cure: clamp_min\(1e-06\).log
# says: tried for . steps of Adam on this batch: the loss falls
# learns: losses[-1] < 0.8 * losses[0]
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(16, 8), nn.Linear(16, 1)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.balance = None

    def forward(self, x):
        p = F.softmax(3 * self.gate(x), -1)
        share = F.one_hot(p.argmax(-1), 8).float().mean(0)
        self.balance = (share * (share / p.mean(0)).log()).sum()  # bad
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head((out * p.unsqueeze(-1)).sum(1)).squeeze(-1)


model, losses = Experts(), []
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(60):
    x = torch.randn(64, 16)
    loss = F.mse_loss(model(x), x[:, 0]) + 0.1 * model.balance
    losses.append(float(loss))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
