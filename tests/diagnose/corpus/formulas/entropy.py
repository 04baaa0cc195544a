# expect: F.cross_entropy(out, y) + 0.1 * (out.softmax(1) * out.log_softmax(1)).sum(1).mean()


def entropy(out: Tensor, y: Tensor) -> Tensor:
    p = out.softmax(1)
    return F.cross_entropy(out, y) - 0.1 * -(p * p.log()).sum(1).mean()
