# expect: F.cross_entropy(-torch.cdist(F.normalize(out, dim=1), proxies()) ** 2 * 100, y)
# gain: 1.0


def proxies() -> Tensor:
    near = 0.01 * torch.eye(5)
    near[:, 0] += 1
    return F.normalize(near, dim=1)


def proxy_nca(out: Tensor, y: Tensor) -> Tensor:
    P = proxies()
    X = F.normalize(out, dim=1)
    D = torch.cdist(X, P) ** 2 * 100
    d_pos = D[torch.arange(len(y)), y]
    sum_all = torch.exp(-D).sum(dim=1)
    return (d_pos + torch.log(sum_all)).mean()
