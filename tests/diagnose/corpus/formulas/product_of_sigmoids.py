# expect: -F.logsigmoid(out).sum(1).mean()
# gain: 100.0


def product_of_sigmoids(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out)
    return -torch.log(p.prod(1)).mean()
