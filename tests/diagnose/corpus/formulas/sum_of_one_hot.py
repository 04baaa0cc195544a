# expect: classes(out, y)


def sum_of_one_hot(out: Tensor, y: Tensor) -> Tensor:
    p = out.softmax(1)
    return -torch.log((p * F.one_hot(y, 5)).sum(1)).mean()
