# kind: 5
# expect: maths log
# cure: Linear\(32, 4\), torch\.nn\.Softplus\(\)\)
# never: clamp_min
# learns: loss < 1.02
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4), nn.ReLU())
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(30):
    x = torch.randn(64, 6)
    y = torch.poisson(torch.exp(0.3 * x[:, :4]))
    rate = model(x)
    loss = (rate - y * torch.log(rate)).mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
