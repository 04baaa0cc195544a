"""torch.nn: where modules keep what they hold."""

from __future__ import annotations

from typing import Any

import torch


def registers_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dictionaries that hold the parameters, buffers and modules of a module itself."""
    held = vars(module)
    return held["_parameters"], held["_buffers"], held["_modules"]


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary that holds the buffers of a module itself."""
    return module._buffers


# What the call of a module runs in; its locals `args` and `kwargs` are what the module is given.
CALL_CODE = torch.nn.Module._call_impl.__code__
