# expect: pairs(out, y)
# gain: 1.0


def ntxent_masked_fill(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    sim = torch.exp(torch.mm(z, z.t()) / 0.005)
    a, b = z.chunk(2)
    positive = torch.exp((a * b).sum(-1) / 0.005)
    negative = sim.masked_fill(torch.eye(len(z), dtype=torch.bool), 0).sum(-1)
    return -torch.log(torch.cat([positive, positive], 0) / negative).mean()
