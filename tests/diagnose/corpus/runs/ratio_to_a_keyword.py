# kind: 1, a division by probabilities that are 0 in float16, which it is given by keyword
# expect: maths div
# step: 1
# never: missing 1 required positional argument
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
with torch.no_grad():
    net[2].weight.mul_(60)


def policy_of(states: torch.Tensor) -> torch.Tensor:
    return torch.softmax(net(states), -1).half()


states = torch.randn(64, 4)
new = policy_of(states)
loss = torch.div(new, other=policy_of(states).detach()).float().mean()  # bad
loss.backward()
optimizer.step()
