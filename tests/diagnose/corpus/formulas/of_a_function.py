# expect: classes(out, y)


def classify(z: Tensor) -> Tensor:
    return torch.softmax(z, dim=1)


def of_a_function(out: Tensor, y: Tensor) -> Tensor:
    probs = classify(out)
    return -torch.log(probs.gather(1, y[:, None])).mean()
