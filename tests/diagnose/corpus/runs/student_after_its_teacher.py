# kind: 4
# expect: maths sub
# step: 4
# says: tried for \d+ steps of AdamW on this batch: the loss falls
import torch
from torch import nn

torch.manual_seed(0)
mask = torch.zeros(6)
mask[4:] = -torch.inf
teacher, student = nn.Linear(5, 6), nn.Linear(5, 6)
for net in (teacher, student):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(16, 5)
        p, q = torch.log_softmax(net(x) + mask, -1), torch.log_softmax(teacher(x) + mask, -1)
        if net is teacher:
            loss = nn.functional.nll_loss(q, torch.arange(16) % 4)
        else:
            loss = (p.exp() * (p - q)).sum(-1).mean()  # bad
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.requires_grad_(net is student)
