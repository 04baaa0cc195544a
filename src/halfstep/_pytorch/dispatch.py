"""The dispatcher: its keys, its ops, the kernels that it has for them, and those it is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Key = torch._C.DispatchKey
Keys = torch._C.DispatchKeySet

# (keys, *args, **kwargs): what the dispatcher calls for an op at a key.
Kernel = Callable[..., Any]

# Where the dispatcher looks first inside a transform of torch.func, once for each transform around
# the op; and where it looks when vmap is that transform, also for the ops inside a composite.
FUNCTORCH_KEYS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchBatched,
)

# (with exclude_keys(keyset): ...) runs a block as if the keys were not there.
exclude_keys = torch._C._ExcludeDispatchKeyGuard


@cache
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


def overload(name: str) -> torch._ops.OpOverload:
    """Return an overload: ``torch.ops.aten.softmax.int`` for ``"softmax.int"``.

    That of a custom op has its namespace in its name, ``"mylib::attention.default"``.
    """
    namespace, _, op = name.rpartition("::")
    op, _, of_op = op.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace or "aten"), op), of_op)
    assert isinstance(found, torch._ops.OpOverload)
    return found


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
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    of_aten = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    return frozenset(name if "." in name else f"{name}.default" for name in of_aten)


def schema_of(op: Any) -> torch.FunctionSchema:
    """Return the schema of an op: its name, its arguments, whether it writes to one of them."""
    schema: torch.FunctionSchema = op._schema
    return schema


def arguments_of(name: str) -> list[torch.Argument]:
    """Return the arguments of an overload, given its name."""
    return schema_of(overload(name)).arguments


_WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}


def overload_with_dtype(name: str) -> torch._ops.OpOverload:
    """Return an overload, or, for one without a dtype argument, the one of its op that has it."""
    return overload(_WITH_DTYPE.get(name, name))


def takes_dtype(name: str) -> bool:
    """Return whether :func:`overload_with_dtype` finds one that can be asked for a dtype."""
    return any(arg.name == "dtype" for arg in schema_of(overload_with_dtype(name)).arguments)


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


def is_higher_order(op: Any) -> bool:
    """Return whether an op takes functions, as ``torch.cond`` and flex attention do."""
    return isinstance(op, torch._ops.HigherOrderOperator)


def kernel_in_mode(op: Any) -> Kernel | None:
    """Return what a higher-order op does where a mode sees the ops of its functions.

    None for one whose functions no mode may see in eager mode.
    """
    match op.name():
        case "cond":
            return lambda is_true, yes, no, operands: (yes if is_true else no)(*operands)
        case "flex_attention" | "flex_attention_backward":
            kernel: Kernel = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
            return kernel
    return None


def decompose(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op as the ops that it is made of.

    ``op.decompose`` prefers what ``torch._decomp`` has for some ops, which rounds otherwise.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def redispatch_of(op: torch._ops.OpOverload) -> Kernel:
    """Return what ``op.redispatch`` calls."""
    call: Kernel = op._handle.redispatch_boxed
    return call


def callable_of(op: torch._ops.OpOverload) -> Kernel:
    """Return what calls ``op``, without the Python around it."""
    call: Kernel = op._op
    return call


# --- kernels from Python in place of PyTorch's own ------------------------------------------------


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
