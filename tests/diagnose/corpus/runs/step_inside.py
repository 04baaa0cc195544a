# kind: 1
# form: step
# expect: optimizer
# says: gradients were finite
# says: eps is 0
# cure: group\["eps"\] = 1e-08$
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(40, 4))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=0)


def step():
    ids = torch.arange(80).view(16, 5) % 20
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(ids), ids[:, 0] % 4)
    loss.backward()
    opt.step()  # bad
    return loss
