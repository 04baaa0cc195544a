# kind: 5
# expect: range sqrt
# cure: sqrt\(\(1 - cosine \* cosine\)\.clamp_min\(1e-06\)\)
# learns: losses[-1] < 0.6 * losses[0]
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 3)
centers = nn.Parameter(torch.randn(5, 3))
opt = torch.optim.SGD([*model.parameters(), centers], lr=0.1)
means = 3 * torch.randn(5, 8)
losses = []
for i in range(7):
    y = torch.randint(0, 5, (64,))
    x = means[y] + 0.2 * torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cosine = F.linear(F.normalize(model(x)), F.normalize(centers))
        sine = torch.sqrt(1 - cosine * cosine)  # bad
        logits = 8 * (0.9 * cosine - 0.2 * sine)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
