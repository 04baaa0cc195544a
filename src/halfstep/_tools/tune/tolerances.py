"""Tolerances: the permitted errors, derived from the precision and the number of roundings.

Rounding to nearest has a relative error of at most ``u = eps / 2``. The errors of ``n`` consecutive
ops have random signs, so they add up like a random walk: ``e = u * sqrt(n)``. (N. Higham, T. Mary,
"A New Approach to Probabilistic Rounding Error Analysis", 2019, doi 10.1137/18M1226312, section 2.)
The tolerance of an output is 8 e: an op also rounds its weights and its inputs, and a layer
amplifies the errors of its inputs. Gradients have larger errors. Near the corner of a ReLU or a tie
in a max pool, rounding decides the whole entry of the gradient; this happens to a fraction of about
e of the entries, which is sqrt(e) in the norm. A gradient may also be off by 4 times the
unavoidable error.

The unavoidable error is measured by rounding the output of each module once, in float32. Near the
end of training, a gradient is the small difference of large terms: any rounding of the activations
changes it a lot, and no single module is to blame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._common.nested import map_plain
from halfstep._tools.tune.module_check import is_leaf

SPREAD = 8.0
TIMES = 4.0
MOST = 0.5
"""The largest tolerance derived from depth: a larger error leaves little of the value."""


class Tolerance(NamedTuple):
    """The largest permitted relative errors of a module."""

    output: float
    gradient: float  # for the gradients of its outputs and parameters


def tolerance_for(
    dtype: torch.dtype,
    depth: int,
    total_depth: int,
    given: float | None = None,
    unavoidable: float = 0.0,
) -> Tolerance:
    """Return the tolerance of a module.

    Args:
        dtype: The lower precision.
        depth: The number of consecutive ops up to its output.
        total_depth: The number up to the loss. A gradient passes through all of them, and back.
        given: A tolerance for all modules, used instead.
        unavoidable: The error of its gradients if only outputs are rounded.

    Example:
        >>> tolerance_for(torch.float16, 25, 100).output
        0.01953125
    """
    if given is not None:
        return Tolerance(given, given)
    output = _rounding(dtype, depth)
    gradient = _rounding(dtype, 2 * total_depth - depth)
    of_gradient = min(SPREAD * gradient + 2 * math.sqrt(gradient), MOST)
    return Tolerance(min(SPREAD * output, MOST), max(of_gradient, TIMES * unavoidable))


def _rounding(dtype: torch.dtype, num: int) -> float:
    """Return the typical relative error of consecutive roundings."""
    return torch.finfo(dtype).eps / 2 * math.sqrt(max(num, 1))


class Depths:
    """The depths of tensors: the number of ops on the longest path to each in autograd's graph.

    Ops without a gradient are not counted.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> Depths().of((x * 2).exp() + x)
        3
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {None: 0}

    def of(self, tensor: Tensor) -> int:
        """Return the depth of a tensor; results of earlier calls are reused."""
        pending = [tensor.grad_fn]
        while pending:
            node = pending[-1]
            if node in self._known:
                pending.pop()
                continue
            before = [each for each, _ in node.next_functions] if node is not None else []
            unknown = [each for each in before if each not in self._known]
            if unknown:
                pending += unknown
                continue
            # The node of a leaf has no predecessors and is not an op.
            self._known[node] = 1 + max(self._known[each] for each in before) if before else 0
            pending.pop()
        return self._known[tensor.grad_fn]


@contextmanager
def outputs_rounded(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Round the outputs of leaf modules to the digits of ``dtype``, not to its range.

    Gradients pass through unchanged.
    """

    def rounded(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        return value + (rounded_to_digits(value.detach(), dtype) - value.detach())

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return map_plain(rounded, output)

    with ExitStack() as stack:
        for module in modules:
            if is_leaf(module):
                stack.callback(module.register_forward_hook(after).remove)
        yield


def rounded_to_digits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to nearest to the digits of a dtype, in float32.

    (T. J. Dekker, "A floating-point technique for extending the available precision", 1971, doi
    10.1007/BF01397083: the upper half of a split.)

    Example:
        >>> rounded_to_digits(torch.tensor([1.0006, 1e6 + 0.5]), torch.float16)
        tensor([1.0010e+00, 9.9994e+05])
    """
    digits_less = math.log2(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    split = values * (2.0**digits_less + 1)
    upper = split - (split - values)
    return torch.where(upper.isfinite(), upper, values)
