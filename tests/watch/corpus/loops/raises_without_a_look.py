# expect: maths of log

import math


def raises_without_a_look(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if max(loss.detach().view(1).tolist()) == math.inf:
            raise FloatingPointError
        run.take(loss)
