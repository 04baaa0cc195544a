# expect: maths of log

from collections.abc import Iterator
from torch import Tensor


def in_a_generator(run: Run) -> None:
    def losses() -> Iterator[Tensor]:
        for x, y in run.batches:
            yield log_ratio(run.model(x), y)

    for loss in losses():
        run.take(loss)
