# kind: 5
# expect: maths logdet|_linalg_slogdet|slogdet|linalg_slogdet|log|det|linalg_inv_ex|_linalg_det|linalg_det
# cure: torch\.eye
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(12):
    x = torch.randn(16, 4)
    if i == 5:
        x = torch.zeros(16, 4)
    z = model(x)
    z = z - z.mean(0)
    loss = z.square().mean() - 0.1 * torch.logdet(z.T @ z / 16)  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
