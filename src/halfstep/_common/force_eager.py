"""Running compiled code as it is written, so that its ops can be seen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from halfstep._pytorch import compiler


@contextmanager
def eager(*, has_global_hooks: bool) -> Iterator[None]:
    """Run compiled code eager in the block.

    Args:
        has_global_hooks: Whether compiled modules run under hooks for all modules, of which they
            warn.
    """
    with ExitStack() as stack:
        if has_global_hooks:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks")
        if compiler.is_loaded():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
