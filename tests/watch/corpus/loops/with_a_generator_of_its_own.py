# expect: maths of log

import torch
from tests.device import seeded


def with_a_generator_of_its_own(run: Run) -> None:
    generator = seeded(3)
    for x, y in run.batches:
        out = run.model(x + torch.randn(x.shape, generator=generator))
        run.take_scaled(log_ratio(out, y))
