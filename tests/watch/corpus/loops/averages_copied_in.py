# expect: maths of div

import torch


def averages_copied_in(run: Run) -> None:
    averages = [weight.detach().clone() for weight in run.model.parameters()]
    for x, y in run.batches:
        for weight, average in zip(run.model.parameters(), averages, strict=True):
            average.lerp_(weight.detach(), 0.5)
            weight.data = average / y.gt(0).all()  # bad
        run.take(run.model(x).square().mean())
