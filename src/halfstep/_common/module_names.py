"""Names of the modules of a model, and the modules that a name or a glob selects."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfstep._common.text import did_you_mean

# The components that torch.compile, FSDP and checkpoint wrappers add to module names.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def without_wrappers(name: str) -> str:
    """Return the name of a module without the components that wrappers add."""
    return _WRAPPERS.sub("", name).lstrip(".")


def around(module: str) -> list[str]:
    """Return the names of the modules that contain one, and its own: a, a.b, a.b.c for a.b.c."""
    names = module.split(".")
    return [".".join(names[: end + 1]) for end in range(len(names))] if module else []


def replicated(model: nn.Module) -> nn.Module:
    """Return the module inside a data parallel wrapper; any other module unchanged."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        inner: nn.Module = model.module
        return inner
    return model


def matching(model: nn.Module, pattern: str, asker: str) -> dict[str, nn.Module]:
    """Return the modules of ``model`` whose names match a glob; its ``*`` also matches dots.

    Raises:
        ValueError: None matches; the message lists similar names. Or all that match are containers,
            as nn.ModuleList, whose modules the program calls one by one.
    """
    modules = replicated(model).named_modules(remove_duplicate=False)
    names = {without_wrappers(name): module for name, module in modules if name}
    found = {name: module for name, module in names.items() if fnmatchcase(name, pattern)}
    if not found:
        own = f"its modules are {', '.join(list(names)[:8])}" if names else "it has none"
        near = did_you_mean(pattern, names) or f"; {own}"
        raise ValueError(
            f"{asker}: no module of this {type(model).__name__} is named like {pattern!r}{near}"
        )
    can_run = {name: module for name, module in found.items() if _has_forward(module)}
    if not can_run:
        name, container = next(iter(found.items()))
        raise ValueError(
            f"{asker}: {name} is a {type(container).__name__}, which has no forward and does "
            f"nothing itself; the modules in it are {pattern + '.*'!r}"
        )
    return can_run


def _has_forward(module: nn.Module) -> bool:
    of_class = getattr(type(module), "forward", None)  # a script has none
    return "forward" in vars(module) or of_class is not nn.Module.forward
