"""The dispatcher: keys, ops, existing kernels, and registration of new ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.utils._device

Key = torch._C.DispatchKey
Keys = torch._C.DispatchKeySet

# (keys, *args, **kwargs): the function that the dispatcher calls for an op at a key.
Kernel = Callable[..., Any]

# (with exclude_keys(keyset): ...) runs a block as if the keys did not exist.
exclude_keys = torch._C._ExcludeDispatchKeyGuard

# (key): the keys that the dispatcher visits after one.
keys_below: Callable[[Key], Keys] = torch._C._dispatch_keyset_full_after

# (op): its schema: its name, its arguments, and which of them it writes to.
schema_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")

# (op): the boxed function behind ``op.redispatch``.
redispatch_of: Callable[[torch._ops.OpOverload], Kernel] = attrgetter("_handle.redispatch_boxed")

# (op): the function that calls it without its Python wrapper.
callable_of: Callable[[torch._ops.OpOverload], Kernel] = attrgetter("_op")


@cache
def autocast_key(device_type: str) -> torch._C.DispatchKey:
    """Return the dispatch key of autocast for ``device_type``, e.g. ``AutocastCPU``."""
    return torch._C.DispatchKey.__members__[
        "Autocast" + torch._C._dispatch_key_for_device(device_type)
    ]


@cache
def autocast_keys(device_type: str) -> torch._C.DispatchKeySet:
    """Return the set that contains only :func:`autocast_key`."""
    return torch._C.DispatchKeySet(autocast_key(device_type))


def is_below_autograd(device_type: str) -> bool:
    """Return whether this thread runs a kernel of a device, where autograd does not see its ops."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(_autograd_key(device_type)))


@cache  # to make the dictionary of the keys takes 20 microseconds
def _autograd_key(device_type: str) -> torch._C.DispatchKey:
    return torch._C.DispatchKey.__members__["Autograd" + autocast_key(device_type).name[8:]]


@cache  # pybind11 searches all keys for the name, which takes 30 microseconds
def _name_of(key: torch._C.DispatchKey) -> str:
    return key.name


def overload(name: str) -> torch._ops.OpOverload:
    """Return an overload: ``torch.ops.aten.softmax.int`` for ``"softmax.int"``.

    The name of a custom op includes its namespace, ``"mylib::attention.default"``.
    """
    namespace, _, op = name.rpartition("::")
    op, _, of_op = op.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace or "aten"), op), of_op)
    assert isinstance(found, torch._ops.OpOverload)
    return found


@cache
def aten_overloads() -> dict[str, list[str]]:
    """Return all ATen ops with their overloads: ``{"exp": ["default", "out"], ...}``."""
    overloads: dict[str, list[str]] = {}
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == "aten":
            op, _, overload = name.partition(".")
            overloads.setdefault(op, []).append(overload or "default")
    return overloads


def overloads_of_namespace(namespace: str) -> list[str]:
    """Return the overloads now defined in a namespace: ``["mylib::attention.default", ...]``."""
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::"))
    return [name if "." in name else f"{name}.default" for name in names]


@cache
def overloads_with_autocast_kernel(device_type: str) -> frozenset[str]:
    """Return the overloads (``"exp.default"``) that PyTorch's own autocast casts on a device.

    It must be called before halfstep registers kernels for that device; the result is cached.
    """
    key = autocast_key(device_type).name
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    of_aten = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    return frozenset(name if "." in name else f"{name}.default" for name in of_aten)


def arguments_of(name: str) -> list[torch.Argument]:
    """Return the arguments of an overload, given by name."""
    return schema_of(overload(name)).arguments


_WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}


def overload_with_dtype(name: str) -> torch._ops.OpOverload:
    """Return an overload, or, if it has no dtype argument, its sibling that has one."""
    return overload(_WITH_DTYPE.get(name, name))


def takes_dtype(name: str) -> bool:
    """Return whether :func:`overload_with_dtype` has a dtype argument."""
    return any(arg.name == "dtype" for arg in schema_of(overload_with_dtype(name)).arguments)


def overload_of(op: Any) -> str:
    """Return the name of an overload: ``"default"``, ``"out"``."""
    return str(op._overloadname)


def takes_numbers(op: torch._ops.OpOverload) -> bool:
    """Return whether ``op`` accepts a number in place of a tensor, as in ``x * 2``."""
    return bool(torch._C._should_allow_numbers_as_tensors(schema_of(op).name.rpartition("::")[2]))


def written_by(op: torch._ops.OpOverload) -> frozenset[int]:
    """Return the positions of the arguments that an op writes to."""
    aliases = [argument.alias_info for argument in schema_of(op).arguments]
    written = (i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)
    return frozenset(written)


def has_kernel(op: torch._ops.OpOverload, key: torch._C.DispatchKey) -> bool:
    """Return whether a kernel is registered for ``op`` at ``key``."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, _name_of(key))
    except RuntimeError:  # an op that exists only in Python, such as aten::sym_size
        return False


@cache
def has_kernel_on(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Return whether ``op`` has a kernel of its own for a type of device."""
    key = torch._C._dispatch_key_for_device(device_type)
    return has_kernel(op, torch._C.DispatchKey.__members__[key])


@cache
def is_made_of_others(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Return whether ``op`` runs on a device as other ops, without a kernel for that device."""
    is_composite = has_kernel(op, torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite and not has_kernel_on(op, device_type)


@cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has kernels for a lower precision on this CPU."""
    match dtype:
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def is_higher_order(op: Any) -> bool:
    """Return whether an op takes functions, like ``torch.cond`` and flex attention."""
    return isinstance(op, torch._ops.HigherOrderOperator)


def kernel_in_mode(op: Any) -> Kernel | None:
    """Return an implementation of a higher-order op that exposes inner ops to modes.

    None for an op whose inner ops cannot be exposed in eager mode.
    """
    match op.name():
        case "cond":
            return lambda is_true, yes, no, operands: (yes if is_true else no)(*operands)
        case "flex_attention" | "flex_attention_backward":
            kernel: Kernel = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
            return kernel
    return None


def decompose(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op as its component ops.

    ``op.decompose`` prefers the decompositions in ``torch._decomp``, which round differently.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# --- Python kernels in place of PyTorch's own -----------------------------------------------------


class PythonKernels:
    """Kernels that replace PyTorch's until they are removed."""

    _has_warned = False  # whether PyTorch has; in this process

    def __init__(self) -> None:
        self._libraries: dict[str, torch.library.Library] = {}
        self._registered: set[tuple[torch._ops.OpOverload, torch._C.DispatchKey]] = set()

    def register(
        self, op: torch._ops.OpOverload, key: torch._C.DispatchKey, kernel: Kernel
    ) -> None:
        """Make the dispatcher call ``kernel(keys, *args, **kwargs)`` for ``op`` at ``key``.

        Ignore a repeated op and key.
        """
        if (op, key) in self._registered:
            return
        self._registered.add((op, key))
        if op.namespace not in self._libraries:
            self._libraries[op.namespace] = torch.library.Library(op.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        library = self._libraries[op.namespace]
        with ExitStack() as stack:
            # PyTorch warns once per process that a kernel was overridden, which is intended here.
            # Python then shows again what it has shown once, so this is not done in each sampled
            # step.
            if not PythonKernels._has_warned and has_kernel(op, key):
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                PythonKernels._has_warned = True
            library.impl(  # type: ignore[no-untyped-call]
                op, kernel, _name_of(key), with_keyset=True, allow_override=True
            )
        # Before 2.13 PyTorch fails to register its own kernel where a Python one exists, and its
        # first vmap registers some. Removed from PyTorch's list, ours is overwritten, as in 2.13
        # and later.
        torch.library._impls.difference_update(library._op_impls)

    def remove(self) -> None:
        """Remove all kernels."""
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]


# Files of Python code that passes calls of ops on: in modes, under a default device, in kernels.
DISPATCHER_FILES = (torch._ops.__file__, torch.overrides.__file__, torch.utils._device.__file__)


def is_torchs(function: Callable[..., Any]) -> bool:
    """Return whether a function in C++ is one of ``torch``, ``F``, ``torch.linalg`` or such."""
    is_in_part = (function.__module__ or "").startswith(("torch._C._", "torch._ops.quantized"))
    return is_in_part or getattr(torch, function.__name__, None) is function
