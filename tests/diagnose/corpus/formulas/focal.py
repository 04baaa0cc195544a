# expect: classes(out, y)


def focal(out: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(out, dim=1)
    pt = p.gather(1, y.unsqueeze(1)).squeeze(1)
    return ((1 - pt) ** 2 * -torch.log(pt)).mean()
