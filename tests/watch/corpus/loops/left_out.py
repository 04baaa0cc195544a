# expect: maths of log

import math


def left_out(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if not math.isfinite(loss.item()):
            continue
        run.take(loss)
