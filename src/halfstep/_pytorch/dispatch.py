"""The dispatcher: its keys, its ops, and the kernels that it has for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Kernel = Callable[..., Any]

# Where the dispatcher looks first inside a transform of torch.func, once for each transform around
# the op; and where it looks when vmap is that transform, also for the ops inside a composite.
FUNCTORCH_KEYS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchBatched,
)

# (with exclude_keys(keyset): ...) runs a block as if the keys were not there.
exclude_keys = torch._C._ExcludeDispatchKeyGuard


def autocast_key(device_type: str) -> torch._C.DispatchKey:
    """Return the dispatch key at which autocast for ``device_type`` runs, e.g. ``AutocastCPU``."""
    return torch._C.DispatchKey.__members__[
        "Autocast" + torch._C._dispatch_key_for_device(device_type)
    ]


def key_set(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Return the set that holds ``key`` alone."""
    return torch._C.DispatchKeySet(key)


def keys_below(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Return the keys that the dispatcher looks at after ``key``."""
    return torch._C._dispatch_keyset_full_after(key)


@cache
def aten_overloads() -> dict[str, list[str]]:
    """Return every ATen op and its overloads: ``{"exp": ["default", "out"], ...}``."""
    overloads: dict[str, list[str]] = {}
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == "aten":
            op, _, overload = name.partition(".")
            overloads.setdefault(op, []).append(overload or "default")
    return overloads


def overloads_of_namespace(namespace: str) -> list[str]:
    """Return what is defined there at this moment: ``["mylib::attention.default", ...]``."""
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::"))
    return [name if "." in name else f"{name}.default" for name in names]


@cache
def overloads_with_autocast_kernel(device_type: str) -> frozenset[str]:
    """Return the overloads (``"exp.default"``) that PyTorch's own autocast casts on a device.

    Must be called before halfstep registers kernels for that device; the answer is kept.
    """
    key = autocast_key(device_type).name
    return frozenset(
        f"{op}.{overload}"
        for op, overloads in aten_overloads().items()
        for overload in overloads
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{op}" + ("" if overload == "default" else f".{overload}"), key
        )
    )


def schema_of(op: Any) -> torch.FunctionSchema:
    """Return the schema of an op: its name, its arguments, whether it writes to one of them."""
    schema: torch.FunctionSchema = op._schema
    return schema


def overload_of(op: Any) -> str:
    """Return the name of the overload that an op is: ``"default"``, ``"out"``."""
    name: str = op._overloadname
    return name


def takes_numbers(op: torch._ops.OpOverload) -> bool:
    """Say whether a number may stand where ``op`` takes a tensor, as in ``x * 2``."""
    return bool(torch._C._should_allow_numbers_as_tensors(schema_of(op).name.rpartition("::")[2]))


def writes_to_arguments(function: Any) -> bool:
    """Return whether the schema of an op (``torch.ops...``) says that it writes to an argument."""
    match function:
        case torch._ops.OpOverload():
            overloads = [function]
        case torch._ops.OpOverloadPacket():
            overloads = [getattr(function, name) for name in function.overloads()]  # type: ignore[no-untyped-call]
        case _:
            return False
    arguments = (argument for op in overloads for argument in schema_of(op).arguments)
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in arguments
    )


def has_kernel(op: torch._ops.OpOverload, key: torch._C.DispatchKey) -> bool:
    """Say whether a kernel is registered for ``op`` at ``key``."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name)
    except RuntimeError:  # an op of Python alone, such as aten::sym_size
        return False


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Say whether ``op`` is made of other ops, which autograd and vmap see instead of it."""
    return has_kernel(op, torch._C.DispatchKey.CompositeImplicitAutograd)


@cache
def is_made_of_others(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Say whether ``op`` runs on a device as other ops, and by no kernel of that device."""
    key = torch._C.DispatchKey.__members__[torch._C._dispatch_key_for_device(device_type)]
    return is_composite(op) and not has_kernel(op, key)


def decompose(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op as the ops that it is made of.

    ``op.decompose`` prefers what ``torch._decomp`` has for some ops, which rounds otherwise.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def callable_of(op: torch._ops.OpOverload) -> Kernel:
    """Return what calls ``op``, without the Python around it."""
    call: Kernel = op._op
    return call
