# kind: 6
# expect: data
# tensor: \bx\b
# cure: ^first check Stream\.__iter__ \(\S+:13\), which loads it, and what that reads\nif it wrote
# never: last wrote to it
# step: 3
import torch
from torch import nn


class Stream(torch.utils.data.IterableDataset):
    # The rows are made one after another, and none of them again.
    def __iter__(self):
        for i in range(20):
            yield torch.full((3,), 1.0) * (float("inf") if i == 9 else i % 3)


torch.manual_seed(0)
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for x in torch.utils.data.DataLoader(Stream(), batch_size=4):
    loss = (model(x) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
