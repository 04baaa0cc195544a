# expect: maths of log

import torch
from torch import Tensor
from torch import nn


def a_buffer_that_is_set(run: Run) -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            ratio = torch.log(y - self.center * 0)  # bad
            self.center = 0.9 * self.center + 0.1 * ratio.mean(0)
            return (out - ratio).square().mean()

    loss_of = Centered()
    for x, y in run.batches:
        run.take(loss_of(run.model(x), y))
    run.losses += [loss_of.center.sum()]
