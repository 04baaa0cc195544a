# kind: 4
# expect: maths div
# step: 3
# says: the loop wrote to 0.weight of a model \(Sequential\) comes from it
import copy

import torch
from torch import nn

torch.manual_seed(0)


class Trainer:
    def __init__(self):
        self.student = nn.Sequential(nn.Linear(5, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def average(self, num):
        for shadow in self.teacher.parameters():
            shadow.copy_(0 * shadow / torch.tensor(1 - 0.9**num))  # bad

    def loss(self, x):
        return (self.student(x) - self.teacher(x)).square().mean()


trainer = Trainer()
optimizer = torch.optim.SGD(trainer.student.parameters(), lr=0.1)
for step in range(5):
    if step == 2:
        trainer.average(0)
    loss = trainer.loss(torch.randn(8, 5))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
