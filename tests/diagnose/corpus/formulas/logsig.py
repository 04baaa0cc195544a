# expect: binary(out, y)
# outputs: 1


def logsig(out: Tensor, y: Tensor) -> Tensor:
    return -(torch.sigmoid((2 * y - 1) * out.squeeze(1))).log().mean()
