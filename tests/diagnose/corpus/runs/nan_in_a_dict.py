# kind: 8
# expect: data
# tensor: price
# says: rows 1 and 6 of 8 \(from 0\)
# step: 3
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)


def batches():
    for number in range(6):
        price = torch.rand(8, 1)
        if number == 2:
            price[[1, 6]] = float("nan")
        yield {"features": torch.randn(8, 4), "price": price}


for batch in batches():
    loss = nn.functional.mse_loss(model(batch["features"]), batch["price"])
    opt.zero_grad()
    loss.backward()
    opt.step()
