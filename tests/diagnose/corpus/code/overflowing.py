"""Realistic code that leaves the range of float16 in the forward pass."""

from __future__ import annotations

import torch
from tests.diagnose.injections import bad
from torch import Tensor


@bad("range", "mul")
def gain(x: Tensor) -> Tensor:
    return x * 1e6  # fault: gain


@bad("range", "mul")
def square(x: Tensor) -> Tensor:
    x = x.tanh() * 400 + 700
    return x * x  # fault: square


@bad("range", "mul")
def grow(x: Tensor) -> Tensor:
    for _ in range(12):
        x = x * 8  # fault: grow
    return x


@bad("range", "add")
def shift(x: Tensor) -> Tensor:
    x = x.tanh() * 100 + 5e4
    return x + x.abs()  # fault: shift


@bad("range", "sub")
def far_apart(x: Tensor) -> Tensor:
    one, other = x.tanh() + 5e4, x.tanh() - 5e4
    return one - other  # fault: far_apart


@bad("range", "div")
def temperature(x: Tensor) -> Tensor:
    return x / 1e-6  # fault: temperature


@bad("range", "mm")
def gram(x: Tensor) -> Tensor:
    rows = x.flatten(1).tanh() * 2e3 + 1e3
    return x + (rows @ rows.t()).mean()  # fault: gram


@bad("range", "bmm")
def correlation(x: Tensor) -> Tensor:
    rows = x.flatten(1).tanh() * 2e3 + 1e3
    return x + torch.einsum("ni,mi->nm", rows, rows).mean()  # fault: correlation


@bad("range", "addcmul")
def fused(x: Tensor) -> Tensor:
    return torch.addcmul(x, x.tanh() + 300, x.tanh() + 400)  # fault: fused


@bad("range", "copy_", "_to_copy")
def copy_into(x: Tensor) -> Tensor:
    kept = torch.empty_like(x)
    kept.copy_(x.float() * 1e6)  # fault: copy_into
    return kept


@bad("range", "copy_", "_to_copy")
def write_columns(x: Tensor) -> Tensor:
    kept = x.clone()
    kept[:, :2] = x[:, :2].float() * 1e6  # fault: write_columns
    return kept


@bad("range", "index_put_", "_to_copy")
def write_rows(x: Tensor) -> Tensor:
    kept, rows = x.clone(), torch.tensor([0, 2])
    kept[rows] = x[rows].float() * 1e6  # fault: write_rows
    return kept


@bad("range", "_to_copy", by_hand=True)
def half_by_hand(x: Tensor) -> Tensor:
    big = x.float() * 1e6
    return big.half()  # fault: half_by_hand


@bad("range", "mul_")
def times_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x.mul_(1e6)  # fault: times_in_place
    return x


@bad("range", "add_")
def plus_in_place(x: Tensor) -> Tensor:
    x = x.tanh() * 100 + 5e4
    x += 5e4  # fault: plus_in_place
    return x


@bad("range", "exp_")
def exp_in_place(x: Tensor) -> Tensor:
    return (x.tanh() + 13).exp_()  # fault: exp_in_place


@bad("range", "log")
def log_of_flushed(x: Tensor) -> Tensor:
    p = torch.sigmoid(x.tanh() - 30)
    return x - p.log()  # fault: log_of_flushed


@bad("range", "div")
def eps_flushed(x: Tensor) -> Tensor:
    centred = x - x
    variance = (centred * centred).mean(-1, keepdim=True) + 1e-9
    return x + centred / variance.sqrt()  # fault: eps_flushed


class Boost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1e6  # fault: boost

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@bad("range", "mul")
def boost(x: Tensor) -> Tensor:
    return Boost.apply(x)
