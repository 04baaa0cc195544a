# kind: 6
# expect: data
# tensor: ^x in <module>
# step: 6
# says: it has made queue inf or NaN, also if its loss is left out; .* reset the buffers
# never: reset_running_stats
# never: evaluations
import torch
from torch import nn

torch.manual_seed(0)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.register_buffer("queue", torch.randn(16, 4))

    def forward(self, x):
        keys = self.encoder(x)
        loss = (keys @ self.queue.nan_to_num().T).logsumexp(1).mean()
        self.queue = torch.cat([keys.detach(), self.queue])[:16]
        return loss


model = Contrast()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(1, 12):
    x = torch.randn(8, 6)
    if i == 6:
        x[0, 2] = float("nan")
    loss = model(x)
    opt.zero_grad()
    if loss.isfinite():
        loss.backward()
        opt.step()
