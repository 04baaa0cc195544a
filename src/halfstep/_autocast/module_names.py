"""Which modules of a model a pattern names."""

import re
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfstep._autocast.names import did_you_mean

# What torch.compile, FSDP and checkpoint wrappers put into the names of modules.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def without_wrappers(name: str) -> str:
    """Return the name that a module has before it, or one around it, is wrapped."""
    return _WRAPPERS.sub("", name).lstrip(".")


def replicated(model: nn.Module) -> nn.Module:
    """Return what data parallelism runs copies of; another module as it is."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        inner: nn.Module = model.module
        return inner
    return model


def matching(model: nn.Module, pattern: str, asker: str) -> dict[str, nn.Module]:
    """Return the modules whose names in ``model`` are like ``pattern``, a glob.

    Args:
        model: The model; inside ``DistributedDataParallel``, what that wraps.
        pattern: The glob; a ``*`` stands for dots too.
        asker: What the error message begins with.

    Raises:
        ValueError: There is none; the message names those like it.
    """
    modules = replicated(model).named_modules(remove_duplicate=False)
    names = {without_wrappers(name): module for name, module in modules if name}
    found = {name: module for name, module in names.items() if fnmatchcase(name, pattern)}
    if not found:
        near = did_you_mean(pattern, names) or f"; its modules are {', '.join(list(names)[:8])}"
        raise ValueError(
            f"{asker}: no module of this {type(model).__name__} is named like {pattern!r}{near}"
        )
    return found
