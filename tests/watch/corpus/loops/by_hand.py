# expect: maths of log

import torch


def by_hand(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        ratio = torch.log(y)  # bad
        run.take((out - ratio).square().mean())
