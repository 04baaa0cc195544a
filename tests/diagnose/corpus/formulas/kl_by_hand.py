# expect: F.kl_div(out.log_softmax(1), F.one_hot(y, 5).float() * 0.9 + 0.02, reduction='batchmean')


def kl_by_hand(out: Tensor, y: Tensor) -> Tensor:
    q = F.softmax(out, 1)
    p = F.one_hot(y, 5).float() * 0.9 + 0.02
    return (p * (p / q).log()).sum(1).mean()
