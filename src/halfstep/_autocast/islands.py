"""Computation in one dtype with parameters and buffers of another.

A mode sees the calls of PyTorch functions from Python, whoever makes them, and casts the arguments.
No parameter is replaced, so hooks, checkpoints, sharding, other threads and optimizers see the same
model, and each gradient has the dtype of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep._common.nested import map_leaves, map_tensors
from halfstep._pytorch import compiler, modes
from halfstep._pytorch.modules import registers_of

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def dtypes_in(module: nn.Module) -> frozenset[torch.dtype]:
    """Return the dtypes of the floating-point parameters and buffers of a module."""
    if torch.compiler.is_compiling():
        return _DTYPES & {each.dtype for each in (*module.parameters(), *module.buffers())}
    found, seen = set[torch.dtype](), set[nn.Module]()
    waiting: list[nn.Module | None] = [module]
    while waiting:  # takes half the time of module.parameters()
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        if isinstance(each, torch.jit.ScriptModule):  # its registers are in C++
            found.update(tensor.dtype for tensor in (*each.parameters(), *each.buffers()))
            continue
        parameters, buffers, modules = registers_of(each)
        tensors = (*parameters.values(), *buffers.values())
        found.update(tensor.dtype for tensor in tensors if tensor is not None)
        waiting.extend(modules.values())
    return _DTYPES & found


class InDtype(modes.FunctionMode):
    """Casts tensors of some dtypes to another one where they are used; what is written keeps its.

    A parameter is cast once, unless something is written in place; its gradients are added up in
    the dtype of the cast.
    """

    def __init__(self, dtype: torch.dtype, others: frozenset[torch.dtype]) -> None:
        super().__init__()
        self.dtype, self.others = dtype, others
        self._lower = {each for each in others if torch.promote_types(each, dtype) is dtype}
        self._casts: dict[tuple[int, bool], Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        match _kind(func):
            case "cast":
                return self._call(func, args, kwargs)
            case "dtype":  # x.to(self.weight.dtype)
                dtype = func(*args)
                return self.dtype if dtype in self.others else dtype
            case "in place":
                self._casts.clear()
                to = partial(_cast_to, args[0].dtype) if isinstance(args[0], Tensor) else self.cast
                rest, kwargs = map_tensors(to, (args[1:], kwargs))
                return func(args[0], *rest, **kwargs)
        return func(*args, **kwargs)

    def cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in self.others:
            return tensor
        if torch.compiler.is_compiling() or not isinstance(tensor, nn.Parameter):
            return tensor.to(self.dtype)
        key = id(tensor), torch.is_grad_enabled()
        if key not in self._casts:
            self._casts[key] = tensor.to(self.dtype)
        return self._casts[key]

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.cast(value)
        # x.to(self.weight.dtype) would round x.
        is_lower = isinstance(value, torch.dtype) and value in self._lower
        return self.dtype if is_lower else value

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = {"out": kwargs.pop("out")} if "out" in kwargs else {}
        given, named = map_leaves(self._convert, (args, kwargs))
        result = func(*given, **named, **out)
        writes = _writes(func)
        if writes and _argument(writes[0], args, kwargs):
            with torch.no_grad():
                for place in writes[1:]:
                    written, cast = _argument(place, args, kwargs), _argument(place, given, named)
                    if written is not None and written.dtype in self.others:
                        written.copy_(cast)
        return result


def _cast_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if {tensor.dtype, dtype} <= _DTYPES else tensor


# --- what a function does -------------------------------------------------------------------------

_NO_VALUES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr"),
    *("element_size", "untyped_storage", "get_device", "is_contiguous", "is_floating_point"),
    *("is_complex", "register_hook", "__get__", "__set__", "__delete__", "__len__", "__hash__"),
}
"""Methods, and accesses to attributes, that need no values."""


@compiler.run_while_tracing
def _kind(func: Any) -> Literal["cast", "dtype", "in place", "no values"]:
    name = getattr(func, "__name__", "")
    if name in _NO_VALUES:
        return "dtype" if func == _DTYPE else "no values"
    dunder = name.startswith("__")
    if name == "__setitem__" or (name.startswith("__i") if dunder else name.endswith("_")):
        return "in place"
    return "cast"


_DTYPE: Any = Tensor.dtype.__get__  # type: ignore[attr-defined]

# The position and the name of an argument.
_Place = tuple[int, str]


@compiler.run_while_tracing
def _writes(func: Any) -> tuple[_Place, ...]:
    """Return the arguments that a function writes to if the first of them is true."""
    return _WRITES.get(func, ())


_TRAINING, _OWN = (5, "training"), (5, "use_input_stats")
_STATISTICS = ((1, "running_mean"), (2, "running_var"))
_STATISTICS_OF_TORCH = ((3, "running_mean"), (4, "running_var"))
_WRITES: dict[Any, tuple[_Place, ...]] = {
    F.batch_norm: (_TRAINING, *_STATISTICS),
    F.instance_norm: (_OWN, *_STATISTICS),
    torch.batch_norm: (_TRAINING, *_STATISTICS_OF_TORCH),
    torch.instance_norm: (_OWN, *_STATISTICS_OF_TORCH),
    F.embedding: ((3, "max_norm"), (1, "weight")),
    F.embedding_bag: ((3, "max_norm"), (1, "weight")),
}


def _argument(place: _Place, args: Any, kwargs: Any) -> Any:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


# --- recomputation --------------------------------------------------------------------------------


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that a later call runs in the mode of an island, if this one does.

    For torch.utils.checkpoint inside of an island.
    """
    mode = next((each for each in modes.function_modes() if isinstance(each, InDtype)), None)
    if mode is None:
        return function
    dtype, others = mode.dtype, mode.others

    def in_the_same_dtype(*args: Any, **kwargs: Any) -> Any:
        with InDtype(dtype, others):
            return function(*args, **kwargs)

    return compiler.do_not_compile_alone(in_the_same_dtype, nor_below=False)
