# expect: F.cross_entropy(out, torch.zeros_like(y))


def ratio_of_sums(out: Tensor, y: Tensor) -> Tensor:
    pos = torch.exp(out[:, 0])
    neg = torch.exp(out[:, 1:]).sum(1)
    return -torch.log(pos / (pos + neg)).mean()
