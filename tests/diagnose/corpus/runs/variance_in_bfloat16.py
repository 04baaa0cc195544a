# kind: 4
# expect: range sqrt
# says: `sqrt` .* is not finite, because its inputs were rounded before; in float32 it is finite
# never: overflowed
# cure: fp32
# step: 1
import torch
from torch import nn

torch.manual_seed(1)


class Norm(nn.Module):
    def forward(self, x):
        variance = (x * x).mean(0) - x.mean(0) * x.mean(0)
        return (x - x.mean(0)) / torch.sqrt(variance + 1e-5)  # bad


model = nn.Sequential(nn.Linear(4, 8), Norm(), nn.Linear(8, 1))
nn.init.constant_(model[0].bias, 20.0)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, 21):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(32, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
