# expect: classes(out, y)


def plus_eps(out: Tensor, y: Tensor) -> Tensor:
    e = torch.exp(out)
    p = e / (e.sum(1, keepdim=True) + 1e-8)
    return F.nll_loss(torch.log(p + 1e-45), y)
