"""torch.nn and torch.utils.data: contents and calls of modules, and loaders of batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data.dataloader


def registers_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts of a module's own parameters, buffers and submodules."""
    held = vars(module)
    return held["_parameters"], held["_buffers"], held["_modules"]


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dict of a module's own buffers."""
    return module._buffers


# The code object in which a module is called; its locals `args` and `kwargs` are the inputs.
CALL_CODE = torch.nn.Module._call_impl.__code__

# The class whose ``__next__`` returns the batches of every DataLoader.
LOADER_ITERATOR: Any = torch.utils.data.dataloader._BaseDataLoaderIter
