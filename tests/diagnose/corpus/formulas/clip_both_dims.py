# expect: both_pairs(out, y)
# gain: 1.0


def clip_both_dims(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    e = torch.exp(z @ z.roll(8, 0).T / 0.005)
    match = e.diagonal()
    return -(torch.log(match / e.sum(1)) + torch.log(match / e.sum(0))).mean() / 2
