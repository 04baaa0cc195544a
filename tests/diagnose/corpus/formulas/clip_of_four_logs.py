# expect: both_pairs(out, y)
# gain: 1.0


def clip_of_four_logs(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    e = (z @ z.roll(8, 0).T / 0.005).exp()
    rows = e.sum(axis=1, keepdims=True).log().squeeze(1) - e.diag().log()
    columns = torch.log(e.sum(axis=0)) - torch.log(torch.diag(e))
    return 0.5 * (rows + columns).mean()
