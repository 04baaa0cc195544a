# kind: 8
# expect: data
# tensor: \bscale\b
# says: make it float32: .* finite values to it, up to \d+,\d+, .* 65,504: \S+:15 in <module>
# step: 4
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
scale = torch.ones(6, dtype=torch.float16)
for step in range(1, 9):
    x = torch.randn(16, 6) * 300 ** (step / 4)
    scale.copy_(0.1 * scale + x.square().mean(0))
    loss = model(x / scale.sqrt()).square().mean() + (scale * 0).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
