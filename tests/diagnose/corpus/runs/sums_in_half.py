# kind: 8
# expect: data
# tensor: \btotal\b
# says: make it float32: .* finite values to it, up to 500, .* 65,504: \S+:17 in <module>
# step: 14
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 3)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
total, counts = torch.zeros(3, dtype=torch.float16), torch.zeros(3)
for step in range(20):
    x, y = torch.randn(30, 6), torch.arange(30) % 3
    loss = nn.functional.cross_entropy(model(x) * (total / (total.max() + 1)), y)
    counts.index_add_(0, y, torch.ones(30))
    total.index_add_(0, y, torch.full((30,), 500.0, dtype=torch.float16))
    opt.zero_grad()
    loss.backward()
    opt.step()
