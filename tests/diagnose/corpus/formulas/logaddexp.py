# expect: torch.logaddexp(out[:, 0], out[:, 1]).mean()


def logaddexp(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0].exp() + out[:, 1].exp()).log().mean()
