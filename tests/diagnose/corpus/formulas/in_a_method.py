# expect: classes(out, y)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = 0.5

    def forward(self, z: Tensor, target: Tensor) -> Tensor:
        e = torch.exp(z / self.t)
        p = e / torch.sum(e, dim=1, keepdim=True)
        return -torch.mean(torch.log(torch.gather(p, 1, target.unsqueeze(1))))


def in_a_method(out: Tensor, y: Tensor) -> Tensor:
    return Criterion()(out, y)
