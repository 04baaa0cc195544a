# expect: F.softplus(out).mean()
# outputs: 1


def discriminator(out: Tensor, y: Tensor) -> Tensor:
    D_fake = torch.sigmoid(out).view(-1)
    return -torch.mean(torch.log(1.0 - D_fake))
