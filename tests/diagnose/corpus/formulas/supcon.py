# expect: classes(out, y)


def supcon(out: Tensor, y: Tensor) -> Tensor:
    exp_logits = torch.exp(out)
    log_prob = out - torch.log(exp_logits.sum(1, keepdim=True))
    return -log_prob.gather(1, y[:, None]).mean()
