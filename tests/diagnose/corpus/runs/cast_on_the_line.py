# kind: 4
# expect: range mul
# says: the line casts to a lower precision itself, which no rule changes
# says: tried for \d+ steps? of Adam on this batch \(in turn with the one before\): the loss falls
import torch
from torch import nn

torch.manual_seed(0)


class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, seconds):
        h = self.inp(x)
        angle = seconds[:, None].to(h.dtype) * torch.linspace(0.1, 2.4, 8).to(h.dtype)  # bad
        return self.out(h + angle.sin())


model = Clock()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(12):
    x, seconds = torch.randn(16, 4), 4000 * i + torch.rand(16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x, seconds).float() - x[:, :1]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
