# expect: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 5).float()) * 5


def multilabel(out: Tensor, y: Tensor) -> Tensor:
    p = 1 / (1 + (-out).exp())
    t = F.one_hot(y, 5)
    return -(t * p.log() + (1 - t) * (1 - p).log()).sum(1).mean()
