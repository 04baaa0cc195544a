# expect: maths of sqrt

from torch import nn


def stepped_by_hand(run: Run) -> None:
    for x, y in run.batches:
        backward_of_roots(run, x, y)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        for p in run.model.parameters():
            p.data.add_(p.grad, alpha=-0.01)
