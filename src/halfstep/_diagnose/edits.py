"""Edits of the user's code that keep a function away from where it is not defined.

Each is text to paste, and the same edit carried out in a replay: a call of the function at that
line gets other arguments, above autograd, as if the line had been edited.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep._diagnose.diagnosis import BadOp, Line
from halfstep._diagnose.lines import user_line

Change = Callable[[list[Any]], None]
"""Changes the arguments of a call in place of the list."""


class Edit(NamedTuple):
    """An edit.

    Attributes:
        text: What to write at the line; ``...`` stands for what is there.
        functions: The names of the functions of PyTorch that it changes the arguments of.
        change: Changes them.
    """

    text: str
    functions: tuple[str, ...]
    change: Change


_DIVISIONS = ("div", "div_", "true_divide", "__truediv__", "__itruediv__", "divide")
_RECIPROCALS = ("reciprocal", "reciprocal_", "__rtruediv__", "__rdiv__")


def _clamped(low: float | None, high: float | None) -> Change:
    def change(args: list[Any]) -> None:
        args[0] = args[0].clamp(low, high)

    return change


def _raised(position: int, eps: float) -> Change:
    def change(args: list[Any]) -> None:
        if len(args) > position and isinstance(args[position], Tensor):
            args[position] = args[position] + eps

    return change


def _clamp_to_dtype(args: list[Any]) -> None:
    args[0] = args[0].clamp_min(torch.finfo(args[0].dtype).min)


def edit_for(bad: BadOp) -> Edit | None:
    """Return the edit that keeps an op finite, None if none is known."""
    name = (bad.forward_op or bad.op).removesuffix("_").lstrip("_")
    dtype = next((operand.dtype for operand in bad.inputs), "float32")
    eps = 1e-3 if dtype == "float16" else 1e-6
    edge, both = 1 - eps, (name, f"{name}_")
    match name:
        case "log" | "log2" | "log10":
            return Edit(f"torch.{name}((...).clamp_min({eps:g}))", both, _clamped(eps, None))
        case "log1p":
            return Edit(f"torch.log1p((...).clamp_min({-edge:g}))", both, _clamped(-edge, None))
        case "div":
            return Edit(f"(...) / (... + {eps:g})", _DIVISIONS, _raised(1, eps))
        case "reciprocal":
            return Edit(f"1 / (... + {eps:g})", _RECIPROCALS, _raised(0, eps))
        case "sqrt" | "rsqrt":
            return Edit(f"torch.{name}(... + {eps:g})", both, _raised(0, eps))
        case "pow":
            return Edit(f"(... + {eps:g}) ** (...)", ("pow", "__pow__", "pow_"), _raised(0, eps))
        case "exp" | "expm1" | "exp2" | "cosh" | "sinh":
            # Some way below the end, since what follows sums it up.
            high = math.floor(0.9 * math.log(torch.finfo(getattr(torch, dtype)).max))
            return Edit(f"torch.{name}((...).clamp_max({high}))", both, _clamped(None, high))
        case "acos" | "asin" | "atanh":
            text = f"torch.{name}((...).clamp({-edge:g}, {edge:g}))"
            return Edit(text, both, _clamped(-edge, edge))
        case "softmax" | "log_softmax" | "safe_softmax":
            text = "(...).masked_fill(..., torch.finfo(torch.float16).min)  # in place of -inf"
            return Edit(text, ("softmax", "log_softmax"), _clamp_to_dtype)
        case _:
            return None


class Editing(TorchFunctionMode):
    """Carries out an edit at a line while it is active.

    Args:
        edit: The edit.
        line: Where.
    """

    def __init__(self, edit: Edit, line: Line) -> None:
        super().__init__()
        self._edit, self._line = edit, line

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, with other arguments if it is the one to edit."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self._edit.functions:
            line = user_line()
            if line is not None and (line.file, line.number) == (
                self._line.file,
                self._line.number,
            ):
                changed = list(args)
                self._edit.change(changed)
                args = tuple(changed)
        return func(*args, **kwargs)
