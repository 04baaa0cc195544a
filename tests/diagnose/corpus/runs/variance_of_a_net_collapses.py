# kind: 2
# expect: maths exp
# says: not tried: bound the loss from below: it fell to -\d.* A likelihood
# never: critic
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
x = torch.randn(16, 4)
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for i in range(1, 46):
    mean, log_var = net(x).unbind(1)
    loss = 0.5 * (log_var + (0 * mean) ** 2 * torch.exp(-log_var)).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
