# kind: 1
# expect: data
# tensor: 0\.running_mean
# says: this line loads is the cause: .*:30 in <module>: model.load_state_dict\(torch.load\(file\)\)
# says: it has 1 inf in float16, which ends at 65,504
# says: :28: torch.save
# never: load a checkpoint|load an earlier
# step: 21
import io

import torch
from torch import nn


def train(model, num, lr):
    opt = torch.optim.SGD(model.parameters(), lr)
    for _ in range(num):
        x = torch.randn(32, 3) + torch.tensor([0.0, 0.0, 1e5])
        loss = (model(x) - x[:, :1]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


torch.manual_seed(0)
model, file = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), io.BytesIO()
train(model, 20, 0.01)
torch.save({name: value.half() for name, value in model.state_dict().items()}, file)
file.seek(0)
model.load_state_dict(torch.load(file))
train(model.eval(), 10, 0.001)
