"""torch.library: kernels from Python in place of PyTorch's own."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from halfstep._pytorch.dispatch import Kernel


def register_kernel(op: torch._ops.OpOverload, key: torch._C.DispatchKey, kernel: Kernel) -> None:
    """Make ``kernel(keys, *args, **kwargs)`` what the dispatcher calls for ``op`` at ``key``."""
    _implement(_library(op.namespace), op, key, kernel)


class TemporaryKernels:
    """Kernels that the dispatcher calls until they are removed, and then those of before again."""

    def __init__(self) -> None:
        self._libraries: dict[str, torch.library.Library] = {}
        self._registered: set[tuple[torch._ops.OpOverload, torch._C.DispatchKey]] = set()

    def register(
        self, op: torch._ops.OpOverload, key: torch._C.DispatchKey, kernel: Kernel
    ) -> None:
        """Do what :func:`register_kernel` does, for a while; once for an op at a key."""
        if (op, key) in self._registered:
            return
        self._registered.add((op, key))
        if op.namespace not in self._libraries:
            library = torch.library.Library(op.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            self._libraries[op.namespace] = library
        _implement(self._libraries[op.namespace], op, key, kernel)

    def remove(self) -> None:
        """Take them all back."""
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]


@cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]


def _implement(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    key: torch._C.DispatchKey,
    kernel: Kernel,
) -> None:
    with warnings.catch_warnings():
        # PyTorch says once per process that a kernel was overridden; here that is the purpose.
        warnings.simplefilter("ignore")
        library.impl(  # type: ignore[no-untyped-call]
            op, kernel, key.name, with_keyset=True, allow_override=True
        )
    # Before 2.13 PyTorch refuses to register a kernel of its own where there is one of Python, and
    # its first vmap registers some. Once forgotten, ours is replaced, as it is from 2.13 on.
    torch.library._impls.difference_update(library._op_impls)
