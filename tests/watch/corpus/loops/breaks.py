# expect: maths of log

import math


def breaks(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if loss != loss or float(loss.detach()) == math.inf:
            break
        run.take(loss)
