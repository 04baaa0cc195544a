# expect: maths of log

import math
import sys


def exits(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            sys.exit(1)
        run.take(loss)
