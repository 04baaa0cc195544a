# expect: maths of log

import torch


def raises(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        assert not torch.isinf(loss), "diverged"
        run.take(loss)
