"""How large an error may be: from the precision and the number of roundings.

A value that is rounded to nearest is off by ``u = eps / 2`` of itself at most, and the errors of
``n`` ops in a row, which point anywhere, add up as a random walk does: ``e = u * sqrt(n)``.
(N. Higham, T. Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, doi
10.1137/18M1226312, section 2.) An output may be off by 8 e: an op rounds its weights and its inputs
too, and a layer makes errors larger than they came in. Gradients have more: where an entry is near
the corner of a ReLU or near a tie of a max pool, which happens to a share of about e of them, the
rounding error decides and changes that entry of the gradient wholly. In the norm that is sqrt(e).
And a gradient may be off by 4 times what :mod:`halfstep._tune.rounding` finds unavoidable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SPREAD = 8.0
TIMES = 4.0
MOST = 0.5
"""Neither is larger by itself: beyond it there is little left of the value."""


@dataclass(frozen=True)
class Tolerance:
    """What the relative errors of a module may be.

    Attributes:
        output: Of what it returns.
        gradient: Of the gradients of its outputs and parameters.
    """

    output: float
    gradient: float


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
        depth: Ops in a row from the beginning to its output.
        total_depth: Those to the loss. A gradient has gone through all of them, and back.
        given: An error that holds for all instead.
        unavoidable: The error of its gradients if all is rounded a little.

    Example:
        >>> tolerance_for(torch.float16, 25, 100).output
        0.01953125
    """
    if given is not None:
        return Tolerance(given, given)
    unit = torch.finfo(dtype).eps / 2
    output = unit * math.sqrt(max(depth, 1))
    gradient = unit * math.sqrt(max(2 * total_depth - depth, 1))
    of_gradient = min(SPREAD * gradient + 2 * math.sqrt(gradient), MOST)
    return Tolerance(min(SPREAD * output, MOST), max(of_gradient, TIMES * unavoidable))
