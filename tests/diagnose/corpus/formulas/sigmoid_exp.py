# expect: squares(out, y)
# outputs: 1


def sigmoid_exp(out: Tensor, y: Tensor) -> Tensor:
    e = out.squeeze(1).exp()
    return ((e / (1 + e) - y) ** 2).mean()
