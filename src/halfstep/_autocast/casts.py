"""Kernels for the actions of rules: each casts the arguments of an op and calls it.

A kernel calls its op with the Autocast key excluded, so that component ops are not cast again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast import native, sums, weight_cache
from halfstep._autocast.rule import HALVES, Rule, is_in_place
from halfstep._autocast.written import rules_of
from halfstep._common.nested import map_tensors, tensors_in
from halfstep._pytorch import dispatch, modes
from halfstep._pytorch.dispatch import (
    Kernel,
    Keys,
    arguments_of,
    autocast_keys,
    callable_of,
    overload,
    schema_of,
)


@cache  # once halfstep's kernel is registered, the lookup would return that
def pytorch_kernel(name: str, device: str) -> Kernel:
    """Return PyTorch's kernel at the Autocast key of ``device``, or one that casts nothing."""
    op, key = overload(name), dispatch.autocast_key(device)
    if dispatch.has_kernel(op, key):
        kernel: Kernel = torch.library.get_kernel(op, key).call_boxed
        return kernel
    return _leave(name, device)


@cache
def _leave(name: str, device: str) -> Kernel:
    """Continue at the next key. Autocast stays on: a composite's inner ops have their own rules."""
    op, autocast = overload(name), autocast_keys(device)
    below = dispatch.keys_below(dispatch.autocast_key(device))
    redispatch = dispatch.redispatch_of(op)
    tensors = [i for i, arg in enumerate(arguments_of(name)) if str(arg.type) == "Tensor"]

    def leave(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keys & below, *args, **kwargs)

    def leave_with_numbers(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        # x * 2 calls mul(Tensor, Tensor) with the number itself, which only a normal call accepts.
        if any(isinstance(args[i], (int, float, complex)) for i in tensors if i < len(args)):
            with dispatch.exclude_keys(autocast):
                return op(*args, **kwargs)
        return redispatch(keys & below, *args, **kwargs)

    return leave_with_numbers if dispatch.takes_numbers(op) else leave


# Kernels are cached and shared by all policies.


def carry_out(rule: Rule, name: str, device: str, dtype: torch.dtype) -> Kernel:
    match rule.action:
        case "lower":
            sparse = dtype if rule in rules_of("torch") else torch.float32
            as_pytorch = _cast_to(name, device, dtype, sparse, use_cache=_is_product(name))
            if _may_be_outer(rule, name):
                as_pytorch = _lower_what_contracts(name, device, dtype)
            return lower_unlike_pytorch(rule, name, device, dtype) or as_pytorch
        case "fp32" if name.partition(".")[0] in _RECURRENT_LAYERS:
            return _recurrent_layer_in_float32(name, device)
        case "fp32":
            return _cast_to(name, device, torch.float32)
        case "fp32-out":
            return _multiply_to_fp32(name, device, dtype)
        case "fp32-dtype":
            return _ask_for_fp32(name, device)
        case "fp32-sums":
            return _add_in_fp32(name, device)
        case "promote":
            return _promote(name, device)
        case "destination":
            return _cast_to_destination(name, device)
        case "refuse":
            return _refuse(rule)
        case "leave":
            return _leave(name, device)


_CELLS = frozenset({"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
_RECURRENT_LAYERS = frozenset({"_cudnn_rnn", "miopen_rnn"})


def lower_unlike_pytorch(rule: Rule, name: str, device: str, dtype: torch.dtype) -> Kernel | None:
    """Return the kernel of a rule that lowers, None if it does what PyTorch does on CUDA.

    It differs where PyTorch's kernel would round partial sums; for an einsum, which may be no
    product at all; for matrices of experts in groups, whose rows have to begin at 16 bytes; for a
    cell of a recurrent network, whose products are lowered while its state stays as wide as it is;
    for the recurrent layer that a CPU has no kernel for; and for that of
    cuDNN, whose weights PyTorch's kernel casts together.
    """
    op = name.partition(".")[0]
    if op in _RECURRENT_LAYERS:
        return pytorch_kernel(name, device)
    if rule in rules_of("torch"):  # the rules of the preset "torch" are PyTorch's to the bit
        return None
    if op == "einsum":
        return _lower_what_contracts(name, device, dtype)
    if op == "_grouped_mm":
        return _lower_aligned(name, device, dtype)
    if op in _CELLS:
        return _leave(name, device)
    if op == "mkldnn_rnn_layer":
        has_kernel = dispatch.has_onednn(dtype)
        in_float32 = _cast_to(name, device, torch.float32)
        return _lower_layer(name, device, dtype) if has_kernel else in_float32
    is_rounded = sums.are_products_rounded(name, device, dtype)
    return _lower_with_fp32_sums(name, device, dtype) if is_rounded else None


def _recurrent_layer_in_float32(name: str, device: str) -> Kernel:
    """Run a recurrent layer in float32; where weights lie in their buffer depends on the dtype."""
    in_float32 = _cast_to(name, device, torch.float32)
    names = [argument.name for argument in arguments_of(name)]
    if "weight_buf" not in names:
        return in_float32
    place = names.index("weight_buf")

    def recurrent_layer(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        buffer = args[place]
        if buffer is not None and buffer.dtype is not torch.float32:
            args = (*args[:place], None, *args[place + 1 :])
        return in_float32(keys, *args, **kwargs)

    return recurrent_layer


def _lower_layer(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Lower a recurrent layer without rounding the gradients of large weights, in float32."""
    lower = _cast_to(name, device, dtype, use_cache=True)

    def layer(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if type(arg) is nn.Parameter:  # the first use of a cast is PyTorch's, which rounds
                weight_cache.cast_in_context(arg, dtype)
        return lower(keys, *args, **kwargs)

    return layer


def _lower_what_contracts(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Lower what multiplies and adds; one operand or an outer product keeps its dtype."""
    lower = _cast_to(name, device, dtype, use_cache=True)
    is_einsum = name == "einsum.default"
    leave = _leave(name, device) if is_einsum else _promote(name, device)
    adds: Callable[[Any], bool] = contracts if is_einsum else _is_inner

    def product(keys: Keys, first: Any, /, *args: Any, **kwargs: Any) -> Any:
        return (lower if adds(first) else leave)(keys, first, *args, **kwargs)

    return product


def _may_be_outer(rule: Rule, name: str) -> bool:
    is_product = name in ("matmul.default", "mm.default", "bmm.default")
    return is_product and rule not in rules_of("torch")


def _is_inner(factor: Tensor) -> bool:
    """Return whether a product with this first factor adds; rotary angles have one term each."""
    return factor.shape[-1:] != (1,)


def _lower_aligned(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Lower a product that takes only rows, or columns, that begin at multiples of 16 bytes.

    See check_valid_strides_and_return_transposed in aten/src/ATen/native/GroupedMMUtils.h, 2.13.
    """
    lower = _cast_to(name, device, dtype, use_cache=True)
    in_float32 = _cast_to(name, device, torch.float32)

    def product(keys: Keys, a: Tensor, b: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        widths = (max(a.stride()[-2:]), max(b.stride()[-2:]), b.shape[-1])  # the last: of gradients
        is_aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
        return (lower if is_aligned else in_float32)(keys, a, b, *args, **kwargs)

    return product


@lru_cache(maxsize=1000)
def contracts(equation: str) -> bool:
    """Return whether an einsum adds up products of several operands.

    >>> contracts("bij,bjk->bik"), contracts("i,j->ij"), contracts("ij->j")
    (True, False, False)
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    shared = {index for index in inputs if sum(index in term for term in terms) > 1}
    return not shared - {",", "."} <= set(output)


pytorchs: set[Kernel] = set()
"""The kernels that :func:`lower_with_pytorch` has made."""


@cache
def lower_with_pytorch(rule: Rule, name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Return a kernel that uses PyTorch's for everything but cached weights and other detours.

    It tells :mod:`halfstep._autocast.native` whenever PyTorch's alone would not do.
    """
    pytorch, may_be_outer = pytorch_kernel(name, device), _may_be_outer(rule, name)
    sparse = dtype if rule in rules_of("torch") else torch.float32

    def lower(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        # On in a plain torch.autocast: it began before ours, or is under use_policy.
        is_cache_on = torch.is_autocast_cache_enabled()
        try:
            if may_be_outer and not _is_inner(args[0]):
                raise ToPromote
            casts = [cast_weights(arg, device, dtype) for arg in args]
            if any(map(operator.is_not, casts, args)):
                native.thread.was_used = True
            if is_cache_on:
                native.thread.was_used = True
                torch.set_autocast_cache_enabled(False)  # PyTorch's, for the other arguments
            return pytorch(keys, *casts, **kwargs)
        except Detour as raised:
            met = type(raised)
        finally:
            if is_cache_on:
                torch.set_autocast_cache_enabled(True)
        native.products[device].pinned.add(name)
        return _detour(met, name, device, sparse)(keys, *args, **kwargs)

    pytorchs.add(lower)
    return lower


def _is_product(name: str) -> bool:
    """Return whether an op benefits from lower precision, or is a custom one.

    Their results share no memory with their inputs, so a kept cast cannot be written to.
    """
    if "::" in name:
        return all(result.alias_info is None for result in schema_of(overload(name)).returns)
    return any(rule.action == "lower" and rule.names(name) for rule in rules_of("standard"))


@cache
def _cast_to(
    name: str,
    device: str,
    dtype: torch.dtype,
    sparse: torch.dtype = torch.float32,
    *,
    use_cache: bool = False,
) -> Kernel:
    """Cast to a dtype; a lower one that is not ``sparse``, no product with a sparse argument."""
    op, autocast = callable_of(overload(name)), autocast_keys(device)
    written = dispatch.written_by(overload(name))  # statistics, which must not be copies
    is_dense = dtype in HALVES and dtype is not sparse
    below = dispatch.keys_below(dispatch.autocast_key(device))
    redispatch = dispatch.redispatch_of(overload(name))
    takes_numbers = dispatch.takes_numbers(overload(name))

    def cast_to(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            if not kwargs and not takes_numbers:
                for arg in args:
                    kind = type(arg)
                    if kind is Tensor or kind is nn.Parameter:
                        if arg.dtype is not dtype or arg.layout is not torch.strided:
                            break
                    elif kind not in _NO_TENSORS and not (
                        kind is list and arg and type(arg[0]) is int
                    ):
                        break
                else:
                    return redispatch(keys & below, *args)
            try:
                if use_cache:
                    args = tuple(cast_weights(arg, device, dtype) for arg in args)
                if is_dense and any(getattr(arg, "layout", None) in _SPARSE for arg in args):
                    raise SparseMet
                casts = [
                    arg if type(arg) in _NO_TENSORS or i in written else cast(arg, device, dtype)
                    for i, arg in enumerate(args)
                ]
                if kwargs:
                    kwargs = {key: cast(arg, device, dtype) for key, arg in kwargs.items()}
                return op(*casts, **kwargs)
            except Detour as raised:
                met = type(raised)
        return _detour(met, name, device, sparse)(keys, *args, **kwargs)

    return cast_to


def _detour(met: type[Detour], name: str, device: str, sparse: torch.dtype) -> Kernel:
    """Return what runs an op whose kernel met an argument that it does not cast.

    Use it after the ``except``, to keep that exception out of the context of the op's errors.
    """
    return _promote(name, device) if met is ToPromote else _cast_to(name, device, sparse, sparse)


@cache
def _promote(name: str, device: str) -> Kernel:
    op, autocast = callable_of(overload(name)), autocast_keys(device)

    def promote(_: Keys, /, *args: Any, **kwargs: Any) -> Any:
        # None means that there is nothing to cast.
        dtype = widest((*args, *kwargs.values()), device) or torch.float32
        with dispatch.exclude_keys(autocast):
            return op(
                *(cast(arg, device, dtype) for arg in args),
                **{key: cast(arg, device, dtype) for key, arg in kwargs.items()},
            )

    return promote


@cache
def _lower_with_fp32_sums(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Round the inputs and the result to lower precision; compute in float32 between.

    In a transform of torch.func autocast is on again one transform further down, where the
    component ops would be lowered after all: PyTorch's kernel runs.
    """
    pytorch = pytorch_kernel(name, device)
    op, autocast = callable_of(overload(name)), autocast_keys(device)
    has_onednn = dispatch.has_onednn(dtype)
    in_lower = _cast_to(name, device, dtype, use_cache=_is_product(name))

    def lower(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        if modes.has_transforms():
            return pytorch(keys, *args, **kwargs)
        if has_onednn and not sums.is_left_to_pytorch(name, args, kwargs):
            return in_lower(keys, *args, **kwargs)
        with dispatch.exclude_keys(autocast):
            try:
                low = [cast(cast_weights(arg, device, dtype), device, dtype) for arg in args]
                wide = [cast(arg, device, torch.float32) for arg in low]
                return _rounded(op(*wide, **kwargs), dtype)
            except Detour as raised:
                met = type(raised)
        return _detour(met, name, device, torch.float32)(keys, *args, **kwargs)

    return lower


@cache
def _multiply_to_fp32(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Round the factors of a product to lower precision, but neither its result nor its sum."""
    if dtype not in HALVES:
        return _cast_to(name, device, torch.float32)
    autocast, factors = autocast_keys(device), sums.factors_of(name)

    def multiply(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            try:
                casts = [
                    cast(cast_weights(arg, device, dtype), device, dtype)
                    if i in factors
                    else cast(arg, device, torch.float32)
                    for i, arg in enumerate(args)
                ]
                return sums.with_fp32_result(name, casts, kwargs)
            except Detour as raised:
                met = type(raised)
        return _detour(met, name, device, torch.float32)(keys, *args, **kwargs)

    return multiply


@cache
def _add_in_fp32(name: str, device: str) -> Kernel:
    op, autocast = callable_of(overload(name)), autocast_keys(device)
    promote, in_float32 = _promote(name, device), _cast_to(name, device, torch.float32)
    adds = sums.adds(name, device)
    with_backward: Any = sums.with_backward_in_float32(name)
    select = sums.selected(name, device)
    is_rounded = sums.is_rounded(name, device)

    def add_in_forward(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        dtype = widest((*args, *kwargs.values()), device)
        if dtype not in HALVES or not adds(args, kwargs):
            return promote(keys, *args, **kwargs)
        return _rounded(in_float32(keys, *args, **kwargs), dtype)

    def add_in_backward(keys: Keys, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        call: Any = op
        needs = is_rounded and x.dtype in HALVES and x.requires_grad and torch.is_grad_enabled()
        # F.embedding calls index_select below autograd.
        if needs and adds((x, *args), kwargs) and not dispatch.is_below_autograd(device):
            with dispatch.exclude_keys(autocast):
                found = None if kwargs else select(x, *args)
            if found is not None:
                return found
            if modes.has_transforms():
                return add_in_forward(keys, x, *args, **kwargs)
            if sums.is_plain((x, *args)):
                call = with_backward
        with dispatch.exclude_keys(autocast):
            return call(x, *args, **kwargs)

    if with_backward is not None:
        return add_in_backward
    return add_in_forward if is_rounded else promote


def _rounded(result: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.dtype is torch.float32 else t, result)


@cache
def _cast_to_destination(name: str, device: str) -> Kernel:
    op, autocast = callable_of(overload(name)), autocast_keys(device)
    adding = sums.out_of_place(name) if sums.is_rounded(name, device) else None
    adds = sums.adds(name, device)

    def cast_to_destination(_: Keys, destination: Any, /, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            if not destination.is_floating_point():
                return op(destination, *args, **kwargs)
            is_summed = destination.dtype in HALVES and adding is not None
            is_summed = is_summed and adds((destination, *args), kwargs)
            dtype = torch.float32 if is_summed else destination.dtype
            args = tuple(cast_any(arg, device, dtype) for arg in args)
            kwargs = {key: cast_any(arg, device, dtype) for key, arg in kwargs.items()}
            if adding is None or not is_summed:
                return op(destination, *args, **kwargs)
            return destination.copy_(adding(destination.float(), *args, **kwargs))

    return cast_to_destination


@cache
def _ask_for_fp32(name: str, device: str) -> Kernel:
    op, autocast = overload(name), autocast_keys(device)
    with_dtype = dispatch.overload_with_dtype(name)
    names = [argument.name for argument in schema_of(with_dtype).arguments][1:]
    # The dispatcher omits arguments that have default values; with_dtype may have no defaults.
    defaults = {a.name: a.default_value for a in arguments_of(name) if a.has_default_value()}

    def ask_for_fp32(_: Keys, /, *args: Any, **kwargs: Any) -> Any:
        with dispatch.exclude_keys(autocast):
            if not is_eligible(args[0], device):
                return op(*args, **kwargs)
            named = defaults | dict(zip(names, args[1:], strict=False)) | kwargs
            named["dtype"] = named.get("dtype") or torch.float32
            return with_dtype(args[0], **named)

    return ask_for_fp32


def _refuse(rule: Rule) -> Kernel:
    def refuse(_: Keys, /, *__: Any, **___: Any) -> Any:
        raise RuntimeError(rule.message)

    return refuse


WITH_NUMBERS = (
    "clamp.default", "clamp_.default", "clamp_max.default", "clamp_max_.default",
    "clamp_min.default", "clamp_min_.default", "clip.default", "clip_.default",
    "constant_pad_nd.default", "fill.Scalar", "fill_.Scalar", "full_like.default",
    "hardshrink.default", "hardtanh.default", "hardtanh_.default", "index_fill.int_Scalar",
    "index_fill_.int_Scalar", "masked_fill.Scalar", "masked_fill_.Scalar", "masked_fill.Tensor",
    "masked_fill_.Tensor", "new_full.default", "scatter.value", "scatter_.value",
    "softshrink.default", "threshold.default", "threshold_.default",
)  # fmt: skip
"""The overloads that raise an error for a number that the dtype of their result cannot hold."""


def with_fitting_numbers(name: str, kernel: Kernel) -> Kernel:
    """Compute in float32 where 16 bits cannot hold a number of a call.

    In place, and for a ``dtype`` that the caller names, the number becomes the largest that fits.
    """
    is_fixed = is_in_place(name.partition(".")[0])

    def fitting(keys: Keys, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") or x.dtype
        numbers = [each for each in (*args, *kwargs.values()) if _is_number(each)]
        end = torch.finfo(dtype).max if dtype in HALVES else float("inf")
        if any(end < abs(each) < float("inf") for each in numbers):
            if not is_fixed and dtype is x.dtype:
                return kernel(keys, x.float(), *args, **kwargs)
            args = tuple(_held(each, end) for each in args)
            kwargs = {key: _held(each, end) for key, each in kwargs.items()}
        return kernel(keys, x, *args, **kwargs)

    return fitting


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.is_cpu and value.dim() == 0
    return isinstance(value, (int, float)) or (is_scalar and value.is_floating_point())


def _held(value: Any, end: float) -> Any:
    if not _is_number(value) or not end < abs(value) < float("inf"):
        return value
    return value.clamp(-end, end) if isinstance(value, Tensor) else min(max(value, -end), end)


def explain_number(error: RuntimeError) -> None:
    """Note the cure on the error of an op whose number 16 bits cannot hold."""
    is_known = hasattr(error, "__notes__")  # an inner context has explained it
    if is_known or not re.search(r"c10::(Half|BFloat16) without overflow", str(error)):
        return
    line = "".join(frame.line or "" for frame in extract_tb(error.__traceback__, limit=-1))
    ops = {"pad", *(name.partition(".")[0] for name in WITH_NUMBERS)}
    called = [op for op in re.findall(r"\b(\w+)\(", line) if op.removesuffix("_") in ops]
    fits = "torch.finfo(x.dtype).min (or .max) fits"
    rule = f'policy="standard; {next(iter(called), "masked_fill")}:fp32" computes it in float32'
    error.add_note(f"halfstep: {fits if ''.join(called[:1]).endswith('_') else f'{rule}; {fits}'}")


# --- casting arguments ----------------------------------------------------------------------------

_TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}
"""The fastest casts from Python: two thirds of the time of ``tensor.to(dtype)``."""

_NO_TENSORS = frozenset({type(None), bool, int, float, str})
"""Types without tensors; this lookup is faster than ``isinstance`` or calling :func:`cast`."""


class Detour(Exception):  # noqa: N818  # not an error: see _detours
    """Raised for an argument that a kernel does not cast."""


class ToPromote(Detour):
    """Raised for a float64 argument, see :func:`cast`, and a product that contracts nothing."""


class SparseMet(Detour):
    """Raised for a sparse argument: few products have a kernel for it in lower precision."""


_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def is_eligible(tensor: Tensor, device: str) -> bool:
    """Return whether autocast for ``device`` may cast a tensor: floating point, but not float64."""
    return (
        tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and tensor.device.type == device
    )


def cast(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a tensor, or those in a list or tuple, if eligible; return other values unchanged.

    Differentiable. Sync: none.

    Raises:
        ToPromote: there is a float64 tensor with dimensions on the device. The op must then run in
            float64. (Raising avoids a second pass over the arguments.)
    """
    if isinstance(value, Tensor):
        has = value.dtype
        if has is dtype or not has.is_floating_point or value.device.type != device:
            return value
        if has is not torch.float64:
            if value.requires_grad and value.layout in _SPARSE:
                return _SparseCast.apply(value, dtype)  # type: ignore[no-untyped-call]
            return _TO[dtype](value)
        if value.dim() > 0:
            raise ToPromote
        return value
    # A list argument of an op contains tensors and None, or numbers.
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
        return type(value)(cast(item, device, dtype) for item in value)
    return value


class _SparseCast(torch.autograd.Function):
    """The cast of a sparse tensor, whose gradient may be dense: PyTorch's cast refuses that."""

    has_products = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return _TO[dtype](x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def cast_weights(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast the weights that the cache keeps; return other values unchanged.

    Differentiable. Sync: none.

    Raises:
        ToPromote: as :func:`cast`.
        SparseMet: there is a sparse tensor. The op must then run in float32, or be PyTorch's.
    """
    kind = type(value)
    if kind in _NO_TENSORS:
        return value
    if isinstance(value, Tensor):
        has = value.dtype
        if has is torch.float64 and value.device.type == device and value.dim() > 0:
            raise ToPromote
        if value.layout in _SPARSE:
            raise SparseMet
        # Not a DTensor: PyTorch does not count all writes to one.
        if has is dtype or not has.is_floating_point or kind is not nn.Parameter:
            return value
        # The device is not checked, which would double the time: an op has its weights on its
        # device.
        kept = weight_cache.cast_in_context(value, dtype)
        return value if kept is None else kept
    # A product of one factor, such as einsum("ij->ji", weight), is a view of it.
    if isinstance(value, (list, tuple)) and len(value) > 1 and not isinstance(value[0], int):
        casts = [cast_weights(item, device, dtype) for item in value]
        return casts if any(map(operator.is_not, casts, value)) else value
    return value


def cast_any(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a tensor on the device if floating point, float64 too; else return it. Sync: none."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device:
        return value.to(dtype)
    return value


def widest(values: Iterable[Any], device: str) -> torch.dtype | None:
    """Return the dtype to promote all eligible and float64 tensors to, None if there are none.

    Two different half precisions promote to float32. 0-dim tensors count only if there are no
    others, as in PyTorch.
    """
    dtypes: dict[bool, torch.dtype] = {}  # keyed by whether the tensors have dimensions
    for tensor in tensors_in(values):
        if tensor.is_floating_point() and tensor.device.type == device:
            key, dtype = tensor.dim() > 0, tensor.dtype
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
    return dtypes.get(True, dtypes.get(False))
