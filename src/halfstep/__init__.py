"""Automatic mixed precision for PyTorch that is safe, visible and editable.

The calls of ``torch.amp``, implemented anew: change the import, keep the code.

>>> from halfstep import GradScaler, autocast
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep._version import __version__ as __version__

if TYPE_CHECKING:
    from halfstep._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import all public names, and with them PyTorch, when the first of them is asked for.

    So the command line runs before PyTorch is imported, which takes seconds.
    """
    if name == "__all__" or not name.startswith("_"):
        public = import_module("halfstep._public")
        if hasattr(public, "__all__"):  # else it is being imported
            names = {each: getattr(public, each) for each in public.__all__}
            globals().update(names, __all__=["__version__", *names])
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__getattr__("__all__"))
