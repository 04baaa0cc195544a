# kind: 3
# expect: maths rsqrt
# says: it made 2\.scale inf or NaN; the loss of this step is finite
# says: the weights from after the step
# never: without a name
# step: 1
# learns: loss < 3
import torch
from torch import nn


class Whitened(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, x):
        y = x * self.scale
        # The buffer is another tensor then.
        self.scale = self.scale * 0.9 + 0.1 * torch.rsqrt(x.detach().var(0))  # bad
        return y


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Whitened(16), nn.Linear(16, 1))
with torch.no_grad():
    model[0].bias[3] = -50.0
opt = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(21):
    x = torch.randn(64, 6)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
