"""torch.nn and torch.utils.data: what modules hold, what calls them, and what loads batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data.dataloader


def registers_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dictionaries that hold the parameters, buffers and modules of a module itself."""
    held = vars(module)
    return held["_parameters"], held["_buffers"], held["_modules"]


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary that holds the buffers of a module itself."""
    return module._buffers


# What the call of a module runs in; its locals `args` and `kwargs` are what the module is given.
CALL_CODE = torch.nn.Module._call_impl.__code__

# The class whose ``__next__`` returns the batches of every DataLoader.
LOADER_ITERATOR: Any = torch.utils.data.dataloader._BaseDataLoaderIter
