# expect: pairs(out, y)
# gain: 1.0


def ntxent_rebind(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    sim = z @ z.T
    sim = torch.exp(sim / 0.005)
    mask = ~torch.eye(len(z), dtype=torch.bool)
    neg = sim.masked_select(mask).view(len(z), -1).sum(dim=-1)
    pos = torch.exp(torch.sum(z * z.roll(8, 0), dim=-1) / 0.005)
    return (-torch.log(pos / (neg + pos))).mean()
