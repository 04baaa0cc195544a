# expect: classes(out, y)


def jensen_shannon(out: Tensor, y: Tensor) -> Tensor:
    p, q = F.softmax(out, 1), F.softmax(out.roll(1, 0).detach(), 1)
    m = (p + q) / 2
    return (
        F.cross_entropy(out, y)
        + 0.1 * ((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)).mean() / 2
    )
