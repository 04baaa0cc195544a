# expect: squares(out, y)
# outputs: 1


def sigmoid_hand(out: Tensor, y: Tensor) -> Tensor:
    p = 1 / (1 + torch.exp(-out.squeeze(1)))
    return ((p - y) ** 2).mean()
