# kind: 8
# expect: data
# tensor: weights
# says: row 5 of 16 \(from 0\)
# step: 4
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-2)


class Trainer:
    def __init__(self):
        self.step = 0

    def training_step(self, inputs, weights):
        loss = (weights * (model(inputs).squeeze(1) - 1).square()).mean()
        return loss

    def fit(self):
        for self.step in range(8):
            inputs, weights = torch.randn(16, 6), torch.rand(16)
            if self.step == 3:
                weights[5] = float("nan")
            loss = self.training_step(inputs, weights)
            opt.zero_grad()
            loss.backward()
            opt.step()


Trainer().fit()
