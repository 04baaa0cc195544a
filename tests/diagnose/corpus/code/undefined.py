"""Realistic code that has no finite value in any dtype."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.diagnose.injections import bad
from torch import Tensor


@bad("maths", "log")
def log_of_zero(x: Tensor) -> Tensor:
    rest = F.relu(x - x.amax())
    return x - rest.log()  # fault: log_of_zero


@bad("maths", "log")
def log_of_negative(x: Tensor) -> Tensor:
    return torch.log(-1 - x.abs())  # fault: log_of_negative


@bad("maths", "div")
def zero_by_zero(x: Tensor) -> Tensor:
    weights = F.relu(x - x.amax())
    return x + weights / weights.sum()  # fault: zero_by_zero


@bad("maths", "div")
def by_count(x: Tensor) -> Tensor:
    count = (x > 6e4).sum()
    return x.abs() / count  # fault: by_count


@bad("maths", "div_")
def by_count_in_place(x: Tensor) -> Tensor:
    count, x = (x > 6e4).sum(), x.abs()
    x /= count  # fault: by_count_in_place
    return x


@bad("maths", "sqrt")
def root_of_negative(x: Tensor) -> Tensor:
    return torch.sqrt(x - x.amax() - 1)  # fault: root_of_negative


@bad("maths", "rsqrt")
def no_variance(x: Tensor) -> Tensor:
    variance = (x - x).square().mean()
    return x + variance.rsqrt()  # fault: no_variance


@bad("maths", "exp")
def exp_of_large(x: Tensor) -> Tensor:
    return torch.exp(x.tanh() + 200)  # fault: exp_of_large


@bad("maths", "acos")
def outside_domain(x: Tensor) -> Tensor:
    return torch.acos(x.abs() + 2)  # fault: outside_domain


@bad("maths", "pow")
def odd_power(x: Tensor) -> Tensor:
    return (-1 - x.abs()) ** 0.3  # fault: odd_power


@bad("maths", "mean")
def empty_mean(x: Tensor) -> Tensor:
    chosen = x[x > 6e4]
    return x + chosen.mean()  # fault: empty_mean


@bad("maths", "sub")
def inf_minus_inf(x: Tensor) -> Tensor:
    scores = x.masked_fill(x < 6e4, -math.inf)
    return x + (scores - scores.amax(-1, keepdim=True))  # fault: inf_minus_inf


@bad("maths", "mul")
def zero_times_inf(x: Tensor) -> Tensor:
    keep = x > 6e4
    return x + keep * -math.inf  # fault: zero_times_inf


@bad("maths", "_softmax")
def nothing_left(x: Tensor) -> Tensor:
    scores = x.masked_fill(x < 6e4, -math.inf)
    return x + scores.softmax(-1)  # fault: nothing_left
