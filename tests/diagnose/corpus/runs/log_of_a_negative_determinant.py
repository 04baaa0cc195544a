# kind: 5
# expect: maths
# cure: F\.softplus\(noise\) \+ 1e-4
# says: noise was -0\.8
import torch
from torch import nn

torch.manual_seed(0)
noise = nn.Parameter(torch.tensor(0.05))
x = torch.linspace(0, 1, 5)
kernel = torch.exp(-((x[:, None] - x[None]) ** 2) / 0.5)
mean = [nn.Parameter(torch.tensor(-1.0)) for _ in range(9)]  # is not read by the determinant
optimizer = torch.optim.SGD([*mean, noise], lr=0.05)
for i in range(1, 9):
    matrix = kernel + noise * torch.eye(5)
    loss = 0.5 * torch.logdet(matrix)  # bad
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
