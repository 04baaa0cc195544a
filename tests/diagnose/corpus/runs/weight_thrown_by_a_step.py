# kind: growth within a step, of a weight that the first step made large
# expect: growth addmm
# says: weight of SGD grew from 1 before step 1 to \d+\.\d+ before step 2
# cure: lower the learning rate of SGD, or clip the gradients before its step:\n.*clip_grad_norm_
# never: weights that start smaller|orthogonal_
# step: 2
import torch
from torch import nn

torch.manual_seed(0)
value, mark = torch.rand(32, 60), torch.zeros(32, 60)
mark.scatter_(1, torch.stack([torch.randperm(60)[:2] for _ in range(32)]), 1.0)
x, y = torch.stack([value, mark], 2), (value * mark).sum(1, keepdim=True)
rnn, head = nn.RNN(2, 64, nonlinearity="relu", batch_first=True), nn.Linear(64, 1)
nn.init.eye_(rnn.weight_hh_l0)
optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.05)
for _ in range(3):
    loss = nn.functional.mse_loss(head(rnn(x)[0][:, -1]), y)  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
