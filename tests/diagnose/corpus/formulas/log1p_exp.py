# expect: binary(out, y)
# outputs: 1


def log1p_exp(out: Tensor, y: Tensor) -> Tensor:
    s = 2 * y - 1
    return torch.log1p(torch.exp(-s * out.squeeze(1))).mean()
