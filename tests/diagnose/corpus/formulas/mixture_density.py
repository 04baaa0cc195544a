# expect: -torch.logsumexp(-0.5 * ((y[:, None].float() - out) / 0.5) ** 2, 1).mean()
# gain: 100.0


def mixture_density(out: Tensor, y: Tensor) -> Tensor:
    mu, pi = out, torch.softmax(torch.ones(5), 0)
    prob = pi * torch.exp(-0.5 * ((y[:, None].float() - mu) / 0.5) ** 2)
    return -torch.log(prob.sum(1)).mean()
