# expect: maths of log

import torch


def in_place(run: Run) -> None:
    for x, y in run.batches:
        target = torch.zeros_like(y)
        target[:] = y
        target.log_()  # bad
        run.take((run.model(x) - target).square().mean())
