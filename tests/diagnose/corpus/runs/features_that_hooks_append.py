# kind: 5
# expect: maths div
# cure: sqrt\(\) \+ 1e-06
# says: tried for . steps of Adam on this batch .*the loss falls
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
features = []


def keep(module, given, out):
    features.append(out / out.square().sum(1, keepdim=True).sqrt())  # bad


vision = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
for number in (1, 3):
    vision.requires_grad_(False)[number].register_forward_hook(keep)
vision[0].bias.zero_()
net = nn.Conv2d(1, 1, 3, padding=1)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
bad_step = 4
for step in range(1, 7):
    clean = torch.rand(4, 1, 8, 8)
    clean[2] *= step != bad_step
    out = net(clean + 0.1 * torch.randn(4, 1, 8, 8))
    features.clear()
    vision(torch.cat([out, clean]))
    loss = F.l1_loss(out, clean) + sum(0.1 * F.l1_loss(*f.chunk(2)) for f in features)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
