"""Casts of the arguments of ops: for each action of a rule, a kernel that casts and calls the op.

A kernel calls its op with the Autocast key excluded: what the op is made of is not cast again.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast import hold, weight_cache
from halfstep._autocast.gathered import GatheredMet, Lent, is_gathered, is_weight
from halfstep._autocast.hold import Held
from halfstep._autocast.rule import Rule
from halfstep._autocast.written import rules_of
from halfstep._common.nested import tensors_in
from halfstep._pytorch import dispatch, distributed
from halfstep._pytorch.dispatch import Kernel, Keys, overload, schema_of


@cache  # once our kernel is registered, it would be the answer
def pytorch_kernel(name: str, device: str) -> Kernel:
    """Return what PyTorch does at the Autocast key of ``device``: cast, or nothing."""
    op, key = overload(name), dispatch.autocast_key(device)
    if dispatch.has_kernel(op, key):
        kernel: Kernel = torch.library.get_kernel(op, key).call_boxed
        return kernel
    return _leave(name, device)


@cache
def _leave(name: str, device: str) -> Kernel:
    """Go on to the next key. Autocast stays on: a composite's inner ops have their own rules."""
    op, autocast = overload(name), _autocast_keys(device)
    below = dispatch.keys_below(dispatch.autocast_key(device))
    redispatch = dispatch.redispatch_of(op)
    tensors = [i for i, arg in enumerate(schema_of(op).arguments) if str(arg.type) == "Tensor"]

    def leave(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keys & below, *args, **kwargs)

    def leave_with_numbers(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        # x * 2 calls mul(Tensor, Tensor), and the 2 comes here as it is. Only a call takes it.
        if any(isinstance(args[i], (int, float, complex)) for i in tensors if i < len(args)):
            with dispatch.exclude_keys(autocast):
                return op(*args, **kwargs)
        return redispatch(keys & below, *args, **kwargs)

    return leave_with_numbers if dispatch.takes_numbers(op) else leave


# Kernels are kept: all policies share them.


def carry_out(rule: Rule, name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Return the kernel that carries out ``rule`` for the overload ``name``."""
    match rule.action:
        case "lower":
            return _cast_to(name, device, dtype, use_cache=_is_product(name))
        case "fp32":
            return _cast_to(name, device, torch.float32)
        case "fp32-dtype":
            return _ask_for_fp32(name, device)
        case "promote":
            return _promote(name, device)
        case "destination":
            return _cast_to_destination(name, device)
        case "refuse":
            return _refuse(rule)
        case "leave":
            return _leave(name, device)


@cache
def lower_with_pytorch(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Return a kernel that leaves to PyTorch's, which is faster, all but the cache of weights."""
    pytorch = pytorch_kernel(name, device)
    in_float64 = _promote(name, device)

    def lower(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        is_cache_on = torch.is_autocast_cache_enabled()
        try:
            casts: Any = args
            if not are_for_pytorch(args, dtype):
                casts = [cast_weights(arg, device, dtype) for arg in args]
            torch.set_autocast_cache_enabled(False)  # PyTorch's, for the rest
            return pytorch(keys, *casts, **kwargs)
        except Float64Met:
            return in_float64(keys, *args, **kwargs)
        except GatheredMet:
            pass  # called outside of this block, whose error would be the context of the op's own
        finally:
            torch.set_autocast_cache_enabled(is_cache_on)
        return _with_gathered(lower, keys, args, kwargs, dtype)

    return lower


def _autocast_keys(device: str) -> Keys:
    return dispatch.key_set(dispatch.autocast_key(device))


def _is_product(name: str) -> bool:
    """Return whether an op is one of those that lower precision is for, or a custom one.

    The results of these share no memory with their inputs: nobody can write to a kept cast.
    """
    if "::" in name:
        return all(result.alias_info is None for result in schema_of(overload(name)).returns)
    return any(rule.action == "lower" and rule.names(name) for rule in rules_of("standard"))


@cache
def _cast_to(name: str, device: str, dtype: torch.dtype, *, use_cache: bool = False) -> Kernel:
    op, autocast = dispatch.callable_of(overload(name)), _autocast_keys(device)
    in_float64 = _promote(name, device)

    def cast_to(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            try:
                if use_cache:
                    args = tuple(cast_weights(arg, device, dtype) for arg in args)
                casts = [
                    arg if type(arg) in _NO_TENSORS else cast(arg, device, dtype) for arg in args
                ]
                if kwargs:
                    kwargs = {key: cast(arg, device, dtype) for key, arg in kwargs.items()}
            except Float64Met:
                return in_float64(keys, *args, **kwargs)
            except GatheredMet:
                pass
            else:
                return op(*casts, **kwargs)
        return _with_gathered(cast_to, keys, args, kwargs, dtype)

    return cast_to


def _with_gathered(kernel: Kernel, keys: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Call a kernel with gathered weights cast already, and no cast saved for the backward pass."""
    lent = Lent(dtype)
    casts = lent.cast(args)
    with lent.until_backward():
        return kernel(keys, *casts, **kwargs)


@cache
def _promote(name: str, device: str) -> Kernel:
    op, autocast = dispatch.callable_of(overload(name)), _autocast_keys(device)

    def promote(_: Keys, *args: Any, **kwargs: Any) -> Any:
        # None means that there is nothing to cast.
        dtype = widest((*args, *kwargs.values()), device) or torch.float32
        with dispatch.exclude_keys(autocast):
            return op(
                *(cast(arg, device, dtype) for arg in args),
                **{key: cast(arg, device, dtype) for key, arg in kwargs.items()},
            )

    return promote


@cache
def _cast_to_destination(name: str, device: str) -> Kernel:
    op, autocast = dispatch.callable_of(overload(name)), _autocast_keys(device)

    def cast_to_destination(_: Keys, destination: Any, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            if not destination.is_floating_point():
                return op(destination, *args, **kwargs)
            dtype = destination.dtype
            return op(
                destination,
                *(cast_any(arg, device, dtype) for arg in args),
                **{key: cast_any(arg, device, dtype) for key, arg in kwargs.items()},
            )

    return cast_to_destination


@cache
def _ask_for_fp32(name: str, device: str) -> Kernel:
    op, autocast = overload(name), _autocast_keys(device)
    with_dtype = dispatch.overload_with_dtype(name)
    names = [argument.name for argument in schema_of(with_dtype).arguments][1:]
    # The dispatcher leaves out arguments that have their default; with_dtype may have none.
    defaults = {a.name: a.default_value for a in schema_of(op).arguments if a.has_default_value()}

    def ask_for_fp32(_: Keys, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            if not is_eligible(args[0], device):
                return op(*args, **kwargs)
            named = defaults | dict(zip(names, args[1:], strict=False)) | kwargs
            named["dtype"] = named.get("dtype") or torch.float32
            return with_dtype(args[0], **named)

    return ask_for_fp32


def _refuse(rule: Rule) -> Kernel:
    def refuse(_: Keys, *__: Any, **___: Any) -> Any:
        raise RuntimeError(rule.message)

    return refuse


# --- casting arguments ----------------------------------------------------------------------------


_TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}
"""The fastest ways to cast from Python: two thirds of the time of ``tensor.to(dtype)``."""


_NO_TENSORS = frozenset({type(None), bool, int, float, str})
"""Looking here is faster than ``isinstance``, and than calling :func:`cast`."""


class Float64Met(Exception):  # noqa: N818  # nothing is wrong: see cast
    """An argument is in float64."""


def is_eligible(tensor: Tensor, device: str) -> bool:
    """Return whether autocast for ``device`` may cast a tensor: floating point, but not float64."""
    return (
        tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and tensor.device.type == device
    )


def cast(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a tensor, or the tensors in a list or tuple, if they are eligible; leave all else.

    Differentiable. Sync: none.

    Raises:
        Float64Met: there is a float64 tensor on the device, not one without dimensions. The op is
            to run in float64 then, and this is the only pass over its arguments.
    """
    if isinstance(value, Tensor):
        has = value.dtype
        if has is dtype or not has.is_floating_point or value.device.type != device:
            return value
        if has is not torch.float64:
            return _TO[dtype](value)
        if value.dim() > 0:
            raise Float64Met
        return value
    # A list of an op has tensors and None, or numbers.
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
        return type(value)(cast(item, device, dtype) for item in value)
    return value


def cast_weights(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast what the cache of weights keeps, and nothing else.

    Differentiable. Sync: none.

    Raises:
        Float64Met: as :func:`cast`.
        GatheredMet: there is a gathered weight; :class:`halfstep._autocast.gathered.Lent` casts it.
    """
    kind = type(value)
    if kind in _NO_TENSORS:
        return value
    if isinstance(value, Tensor):
        has = value.dtype
        if has is torch.float64 and value.device.type == device and value.dim() > 0:
            raise Float64Met
        if has is dtype or not has.is_floating_point or not is_weight(value):
            return value
        # No look at the device, which takes as long as all else: an op has its weights on its own.
        if is_gathered(value):
            raise GatheredMet
        if kind is not nn.Parameter and kind is not Held:
            return value  # a DTensor: PyTorch does not count all writes to one
        kept = hold.cast(value, dtype)
        return value if kept is None else kept
    # A product of one factor, einsum("ij->ji", weight) say, is a view of it.
    if isinstance(value, (list, tuple)) and len(value) > 1:
        return [cast_weights(item, device, dtype) for item in value]
    return value


def are_for_pytorch(args: Iterable[Any], dtype: torch.dtype) -> bool:
    """Return whether :func:`cast_weights` leaves all arguments of an op as they are.

    False where it takes more than a look at each to tell. Sync: none.
    """
    has_weights = False
    for arg in args:
        kind = type(arg)
        if kind is nn.Parameter:
            if arg.dtype is torch.float64 or not weight_cache.is_small(arg):
                return False
            has_weights = True
        elif kind is Tensor:
            if arg.dtype is torch.float64:
                return False
        elif kind not in _NO_TENSORS:
            return False
    # Where there are ranks, it may have been gathered.
    return not (has_weights and torch.is_grad_enabled() and distributed.has_process_group())


def cast_any(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor on the device, float64 too; anything else comes back as it is.

    Differentiable. Sync: none.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device:
        return value.to(dtype)
    return value


def widest(values: Iterable[Any], device: str) -> torch.dtype | None:
    """Return the dtype that holds every eligible or float64 tensor in ``values``.

    Two different half precisions meet in float32. Tensors without dimensions count where there is
    no other, as in PyTorch. None if there is no such tensor.
    """
    dtypes: dict[bool, torch.dtype] = {}  # of those without dimensions and of those with some
    for tensor in tensors_in(values):
        if tensor.is_floating_point() and tensor.device.type == device:
            key, dtype = tensor.dim() > 0, tensor.dtype
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
    return dtypes.get(True, dtypes.get(False))
