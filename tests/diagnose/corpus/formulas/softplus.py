# expect: binary(out, y)
# outputs: 1


def softplus(out: Tensor, y: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(-(2 * y - 1) * out.squeeze(1))).mean()
