# expect: (F.logsigmoid(out.squeeze(1)) + 0.6931).square().mean()
# outputs: 1


def squared_log(out: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(out.squeeze(1))
    return ((torch.log(s) - torch.log(torch.full_like(s, 0.5))) ** 2).mean()
