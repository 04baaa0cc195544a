# kind: 1
# expect: optimizer
# says: the step could not be taken again: IndexError: pop from empty list
# step: 6
import torch
from torch import nn

torch.manual_seed(0)


class Divided(torch.optim.SGD):
    @torch.no_grad()
    def step(self, divisors):
        divisor = divisors.pop()
        for p in self.param_groups[0]["params"]:
            p.sub_(0.01 * p.grad / divisor)


model = nn.Linear(6, 1)
opt = Divided(model.parameters(), 0.01)
for i in range(10):
    loss = model(torch.randn(16, 6)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step([torch.tensor(float(i != 5))])
