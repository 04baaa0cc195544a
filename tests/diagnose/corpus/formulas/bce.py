# expect: binary(out, y)
# outputs: 1


def bce(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out.squeeze(1))
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
