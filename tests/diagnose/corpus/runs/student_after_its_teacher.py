# kind: 4
# expect: maths sub
# step: 4
# says: tried for 20 steps of AdamW on this batch: the loss falls
# never: does not require grad
import torch
from torch import nn

torch.manual_seed(0)
mask = torch.zeros(6)
mask[4:] = -torch.inf
teacher, student = nn.Linear(5, 6), nn.Linear(5, 6)
optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
for _ in range(3):
    loss = nn.functional.cross_entropy(teacher(torch.randn(16, 5)) + mask, torch.arange(16) % 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
teacher.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
for _ in range(3):
    x = torch.randn(16, 5)
    p, q = torch.log_softmax(student(x) + mask, -1), torch.log_softmax(teacher(x) + mask, -1)
    loss = (p.exp() * (p - q)).sum(-1).mean()  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
