# expect: -F.logsigmoid(out[:, 0] - out[:, 1]).mean()


def bradley_terry(out: Tensor, y: Tensor) -> Tensor:
    a, b = out[:, 0], out[:, 1]
    p = torch.exp(a) / (torch.exp(a) + torch.exp(b))
    return -torch.log(p).mean()
