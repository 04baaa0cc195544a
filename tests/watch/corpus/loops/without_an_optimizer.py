# expect: maths of log

import torch


def without_an_optimizer(run: Run) -> None:
    weight = torch.ones(6, 3, requires_grad=True)
    for x, y in run.batches:
        loss = log_ratio(x @ weight, y)
        run.note(loss)
        loss.backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None
