# expect: F.cross_entropy(out / 0.001, y)
# gain: 1.0


def temperature(out: Tensor, y: Tensor) -> Tensor:
    p = (out / 1e-3).exp()
    p = p / p.sum(dim=1, keepdim=True)
    return -(p.log() * F.one_hot(y, 5)).sum(1).mean()
