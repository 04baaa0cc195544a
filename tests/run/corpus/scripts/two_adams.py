"""Two networks that two optimizers of one class step in turn."""

import torch

nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
adams = [torch.optim.Adam(net.parameters()) for net in nets]
for _ in range(3):
    for net, adam in zip(nets, adams, strict=True):
        adam.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        adam.step()
