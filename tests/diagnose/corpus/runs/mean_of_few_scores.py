# kind: 5
# expect: maths pow
# never: scores\.clamp_min
# learns: losses[-1] < 0.8 * losses[0]
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
opt = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for i in range(120):
    x = torch.randn(6, 40, 8)
    y = 0.5 * torch.randn(6, 40, 8) - x
    match = nn.functional.cosine_similarity(model(x) + x, y, dim=-1)
    scores = match.mean(1)
    loss = 1 - (scores**0.5).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
