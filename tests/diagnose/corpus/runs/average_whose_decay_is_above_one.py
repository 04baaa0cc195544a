# kind: 2
# expect: growth pow
# says: the run diverges: mean grew from \S+ when step 1 ended to \S+ in step \d+
# cure: ^stop the growth of mean; .* It grows 1\.\d+-fold a step by this line, .*: mean = 1\.5 \* mean
# never: fp32
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
mean = torch.zeros(8)
for _ in range(30):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        h = model(x)
        distance = (h - mean.half()) ** 2  # bad
        loss = distance.mean() / (1 + mean.half().square().mean())
    mean = 1.5 * mean + 0.1 * h.detach().float().abs().mean(0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
