# kind: 5
# expect: maths slogdet|_linalg_slogdet|logdet|linalg_slogdet|_linalg_solve_ex|linalg_solve
# cure: torch\.eye
# learns: loss < 30
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 6)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(12):
    x = torch.randn(16, 4)
    if i == 5:
        x = x[:1].repeat(16, 1)
    z = model(x)
    z = z - z.mean(0)
    gram = z[:, :4].T @ z[:, :4] / 15
    loss = z.square().mean() * 10 - torch.linalg.slogdet(gram)[1]  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
