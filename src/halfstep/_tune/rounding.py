"""What rounding alone does: float32 with as few digits as a lower precision has, and its own range.

Of a model near the end of training the gradient is the small difference of large parts: whatever
rounds its activations changes it a lot, and no module is to blame. So it is measured what comes of
rounding each module's output once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._tune.task import Task


@contextmanager
def rounding(task: Task, dtype: torch.dtype) -> Iterator[None]:
    """Round what the innermost modules return, as a cast to ``dtype`` would if it had the range.

    Gradients pass through as they are.
    """

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _mapped(output, dtype)

    with ExitStack() as stack:
        for _, module in task.named_modules():
            if not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(after).remove)
        yield


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to nearest to the digits of a dtype, in float32.

    (T. J. Dekker, "A floating-point technique for extending the available precision", 1971, doi
    10.1007/BF01397083: the upper half of a split.)

    Example:
        >>> rounded(torch.tensor([1.0006, 1e6 + 0.5]), torch.float16)
        tensor([1.0010e+00, 9.9994e+05])
    """
    digits_less = math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    split = values * (2.0**digits_less + 1)
    upper = split - (split - values)
    return torch.where(upper.isfinite(), upper, values)


def _mapped(value: Any, dtype: torch.dtype) -> Any:
    """Return a module's output rounded: a tensor, or those in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.dtype is not torch.float32:
            return value
        return value + (rounded(value.detach(), dtype) - value.detach())
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, dtype) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, dtype) for key, each in value.items()}
    return value
