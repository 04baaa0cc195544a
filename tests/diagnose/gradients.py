"""Code that goes wrong in the backward pass alone.

The line marked is that of the op whose gradient it is, and that of a ``backward`` in Python.
"""

from __future__ import annotations

import torch
from tests.diagnose.injections import bad
from tests.diagnose.models import Code
from torch import Tensor


@bad("range", "mul", gradient_of="mul")
def slope(x: Tensor) -> Tensor:
    return ((((x.tanh() * 3e4).sin() * 3e4).sin() * 3e4).sin() * 3e4).sin()  # fault: slope


@bad("maths", "div", gradient_of="sqrt")
def distance_to_itself(x: Tensor) -> Tensor:
    rows = x.flatten(1)
    squares = (rows[:, None] - rows[None]).square().sum(-1)
    return x + squares.sqrt().mean()  # fault: distance_to_itself


@bad("maths", "pow", gradient_of="pow")
def power_of_zero(x: Tensor) -> Tensor:
    rows = x.flatten(1)
    apart = (rows[:, None] - rows[None]).abs().sum(-1)
    return x + (apart**0.4).mean()  # fault: power_of_zero


@bad("maths", "rsqrt", gradient_of="acos")
def angle_of_zero(x: Tensor) -> Tensor:
    cosine = x - x + 1
    return x + cosine.acos()  # fault: angle_of_zero


@bad("maths", "div", gradient_of="log")
def where_is_too_late(x: Tensor) -> Tensor:
    below = x.amax() - x
    return torch.where(below > 0, below.log(), 0.0)  # fault: where_is_too_late


class Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e4 * 1e4 * 1e4  # fault: amplify


@bad("range", "mul", phase="backward")
def amplify(x: Tensor) -> Tensor:
    return Amplify.apply(x)  # fault: amplify


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x - x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (centred,) = ctx.saved_tensors
        return gradient / centred.abs().sum()  # fault: normalise


@bad("maths", "div", phase="backward")
def normalise(x: Tensor) -> Tensor:
    return Normalise.apply(x)  # fault: normalise


def steep(factor: float) -> Code:
    """Return code whose gradient is ``factor`` times that of the code with 1."""

    def code(x: Tensor) -> Tensor:
        return (x.tanh() * factor).sin()  # fault: steep

    return code
