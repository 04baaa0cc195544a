# kind: 2
# expect: growth
# cure: ^standardise \S*rewards\S*, as by .* reaches 9\d\d\n
# never: standardise .*states
import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for i in range(1, 11):
    states, following = torch.randn(64, 4), torch.randn(64, 4)
    rewards = 1000 * torch.rand(64)
    with torch.no_grad():
        target = rewards + 0.9 * critic(following).squeeze(1)
    loss = nn.functional.mse_loss(critic(states).squeeze(1), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
