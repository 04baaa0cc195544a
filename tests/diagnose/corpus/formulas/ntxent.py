# expect: pairs(out, y)
# gain: 1.0


def ntxent(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    sim = torch.exp(z @ z.T / 0.005)
    eye = torch.eye(len(z))
    neg = (sim * (1 - eye)).sum(1)
    pos = torch.exp((z * z.roll(8, 0)).sum(1) / 0.005)
    return -torch.log(pos / neg).mean()
