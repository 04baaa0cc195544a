# kind: 2, one row overflows a cast, after a loss fell from about 0 to -37
# expect: range linear
# step: 14
# cure: linear@0:fp32
# never: the loss (fell|grew) from
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(
    *(nn.Linear(8, 256), nn.LayerNorm(256), nn.SiLU()),
    *(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1)),
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(1, 15):
    real = torch.randn(64, 8) * 0.5 + 1
    noise = torch.randn(64, 8) * 0.6 + 0.9
    if step == 14:
        real[0] *= 3e5
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        of_real = net(real).mean()  # bad
        loss = of_real - net(noise).mean()
    loss.backward()
    optimizer.step()
