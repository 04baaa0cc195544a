# expect: classes(out, y)


def logsumexp_by_hand(out: Tensor, y: Tensor) -> Tensor:
    return (out.exp().sum(1).log() - out[torch.arange(len(y)), y]).mean()
