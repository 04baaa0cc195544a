# expect: F.cross_entropy((out @ out.T).fill_diagonal_(-1e9), (torch.arange(16) - 8) % 16)
# gain: 12.0


def ntxent_minus_diagonal(z: Tensor, y: Tensor) -> Tensor:
    sim = torch.exp(z @ z.T)
    positive = torch.cat([sim.diagonal(8), sim.diagonal(-8)])
    return -torch.log(positive / (sim.sum(1) - sim.diagonal())).mean()
