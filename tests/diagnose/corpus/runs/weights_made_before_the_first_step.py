# kind: 6
# expect: maths div|reciprocal
# step: 1
# says: \bprior\b.* comes from it, and was made before the loop or in its first step: .* in __init__: self\.register_buffer
# never: look where
import torch
from torch import nn


class Weighted(nn.Module):
    def __init__(self, counts):
        super().__init__()
        shares = counts.sum() / counts  # bad
        self.register_buffer("prior", shares / shares.mean())

    def forward(self, out, y):
        picked = nn.functional.log_softmax(out, 1)[torch.arange(len(y)), y]
        return -(picked * self.prior[y]).sum() / self.prior.sum()


torch.manual_seed(0)
model, criterion = nn.Linear(6, 4), Weighted(torch.tensor([30.0, 10.0, 0.0, 20.0]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(1, 5):
    loss = criterion(model(torch.randn(8, 6)), torch.randint(0, 2, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
