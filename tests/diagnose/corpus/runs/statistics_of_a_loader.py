# kind: 1
# expect: data
# says: was inf or NaN when this line wrote it: .*statistics_of_a_loader
# never: loads|load an earlier checkpoint
import torch
from torch import nn


class Centred(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - self.mean)


torch.manual_seed(0)
batches = torch.randn(6, 8, 4)
batches[3, 2] = torch.nan
loader = iter(torch.utils.data.DataLoader(batches.flatten(0, 1), 8))
model = Centred()
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(6):
    model.mean.copy_(next(loader).mean(0))
    loss = model(torch.randn(8, 4)).square().mean()  # bad
    opt.zero_grad()
    loss.backward()
    opt.step()
