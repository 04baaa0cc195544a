# expect: binary(out, y)
# outputs: 1


def discriminator_plus_eps(out: Tensor, y: Tensor) -> Tensor:
    d = torch.sigmoid(out).view(-1)
    return -(y * (d + 1e-45).log() + (1 - y) * (1 - d + 1e-45).log()).mean()
