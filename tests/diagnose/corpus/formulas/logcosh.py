# expect: (out.squeeze(1) - y).abs().mean()
# outputs: 1


def logcosh(out: Tensor, y: Tensor) -> Tensor:
    return torch.log(torch.cosh(out.squeeze(1) - y)).mean()
