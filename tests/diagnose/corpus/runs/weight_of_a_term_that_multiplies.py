# kind: 2
# expect: growth
# cure: ^stop the growth of weight; .* weight = weight \* \(data_size / edge_size\)
# says: the state was finite before step 8
# never: load an earlier checkpoint
# step: 16
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
weight, edge = torch.tensor(1.0), torch.tensor([[0.0], [1.0]])


def size_of(loss):
    return torch.autograd.grad(loss, net[0].weight, retain_graph=True)[0].abs().mean()


for _ in range(22):
    x = torch.rand(64, 1)
    data_loss = (net(x) - 30 * torch.sin(6 * x)).square().mean()
    edge_loss = net(edge).square().mean()
    data_size, edge_size = size_of(data_loss), size_of(edge_loss)
    weight = weight * (data_size / edge_size)
    loss = data_loss + weight * edge_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
