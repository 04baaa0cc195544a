# kind: 6
# expect: data
# tensor: running_mean
# step: 1
# cure: ^first check it: it was inf or NaN when this line wrote it: \S*statistics_of_bad_rows\.py:\d+ in <module>: encoder\(whole\)
# never: in __init__
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("running_mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.running_mean.lerp_(x.mean(0), 0.5)
        return self.fc(x - self.running_mean)


torch.manual_seed(0)
encoder = Encoder()
whole = torch.randn(40, 5)
whole[11, 2] = float("inf")
encoder(whole)
encoder.eval()
optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-2)
for i in range(1, 6):
    loss = encoder(torch.randn(8, 5)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
