# expect: maths of log

from typing import Any
import torch
from torch import Tensor


def with_a_custom_function(run: Run) -> None:
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.log()  # bad

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] / ctx.saved_tensors[0]

    for x, y in run.batches:
        run.take((run.model(x) - Log.apply(y)).square().mean())
