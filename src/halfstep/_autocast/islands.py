"""Computation in one dtype with parameters of another.

A mode sees all calls of PyTorch functions from Python and casts the parameters among the
arguments, and the buffers of parametrizations, such as those of a spectral norm. No parameter is
replaced, so hooks, checkpoints, sharding, other threads and optimizers see the same model, and each
gradient has the dtype of its parameter. Other tensors are the program's own: it may write to them,
or through them, and needs their dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep._common.nested import map_leaves, map_tensors
from halfstep._pytorch import compiler, modes
from halfstep._pytorch.autograd import version_of
from halfstep._pytorch.modules import is_parametrization, plain_parameters_of, registers_of

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Found(NamedTuple):
    dtypes: frozenset[torch.dtype]  # of its floating-point parameters and buffers
    # Tensors that are cast like parameters: those in place of parameters, in
    # torch.func.functional_call and as attributes; the buffers of parametrizations.
    stand_ins: tuple[Tensor, ...]


def find_tensors(module: nn.Module) -> Found:
    """Return the dtypes of a module, and the tensors that are cast like parameters."""
    if torch.compiler.is_compiling():
        dtypes = {each.dtype for each in (*module.parameters(), *module.buffers())}
        return Found(_FLOATS & dtypes, ())
    found, seen, stand_ins = set[torch.dtype](), set[nn.Module](), list[Tensor]()
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
        own = [*parameters.values(), *plain_parameters_of(each)]
        if is_parametrization(each):
            own += each.buffers()
        stand_ins += (t for t in own if t is not None and not isinstance(t, nn.Parameter))
        tensors = (*own, *buffers.values())
        found.update(tensor.dtype for tensor in tensors if tensor is not None)
        waiting.extend(modules.values())
    return Found(_FLOATS & found, tuple(stand_ins))


class _ParameterCast(NamedTuple):
    param: Tensor
    version: int
    result: Tensor
    result_version: int


class InDtype(modes.FunctionMode):
    """Casts parameters of some dtypes to another one where a PyTorch function gets them.

    A parameter is cast once, unless it changes; its gradients are added up in the dtype of the
    cast.
    """

    def __init__(
        self, dtype: torch.dtype, others: frozenset[torch.dtype], stand_ins: tuple[Tensor, ...] = ()
    ) -> None:
        super().__init__()
        self.dtype, self.others, self.stand_ins = dtype, others, stand_ins
        self._casts: dict[tuple[int, bool], _ParameterCast] = {}
        self._has_data = False  # whether a parameter's .data, which has no version, was used

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        match _kind(func):
            case "cast":
                return self._call_with_casts(func, args, kwargs)
            case "dtype":  # x.to(self.weight.dtype)
                return self.dtype if self._is_other(args[0]) else func(*args)
            case "all but the first" if args:
                rest, kwargs = map_tensors(self.cast, (args[1:], kwargs))
                if torch.compiler.is_compiling():  # no mode sees that .dtype is read
                    rest, kwargs = map_leaves(self._not_lower, (rest, kwargs))
                return func(args[0], *rest, **kwargs)
            case "data":
                self._has_data |= self._is_other(args[0])
        return func(*args, **kwargs)

    def cast(self, tensor: Tensor) -> Tensor:
        """Return the cast of a parameter of another dtype, and any other tensor itself."""
        if not self._is_other(tensor):
            return tensor
        if torch.compiler.is_compiling() or self._has_data:
            return tensor.to(self.dtype)
        key = id(tensor), torch.is_grad_enabled()
        known = self._casts.get(key)
        if known is not None and known.param is tensor and known.version == version_of(tensor):
            return known.result
        if known is not None:
            _require_unwritten(known)
        result = tensor.to(self.dtype)
        if not modes.is_inside_functorch(result):  # it would outlive its transform
            self._casts[key] = _ParameterCast(
                tensor, version_of(tensor), result, version_of(result)
            )
        return result

    def require_unwritten(self) -> None:
        """Raise ``RuntimeError`` if something was written to a cast: the parameter misses it."""
        for cast in self._casts.values():
            _require_unwritten(cast)

    def _is_other(self, tensor: Tensor) -> bool:
        if tensor.dtype not in self.others:
            return False
        return isinstance(tensor, nn.Parameter) or any(tensor is each for each in self.stand_ins)

    def _not_lower(self, value: Any) -> Any:
        """Return the island's dtype for a lower one: x.to(self.weight.dtype) would round x."""
        if not isinstance(value, torch.dtype) or value not in self.others:
            return value
        return torch.promote_types(value, self.dtype)

    def _call_with_casts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if isinstance(out, Tensor) and self._is_other(out):
            self._write_back(self._call_with_casts(func, args, kwargs | {"out": None}), out)
            return out
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        flag, *places = _writes(func) or (None,)
        statistics = [_argument(place, args, kwargs) for place in places if place in _STATISTICS]

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dtype in self.others and any(tensor is statistic for statistic in statistics):
                return tensor.to(self.dtype)
            return self.cast(tensor)

        given, named = map_tensors(convert if statistics else self.cast, (args, kwargs))
        result = func(*given, **named) if out is None else func(*given, **named, out=out)
        if flag and _argument(flag, args, kwargs):
            for place in places:
                self._write_back(_argument(place, given, named), _argument(place, args, kwargs))
        return result

    def _write_back(self, cast: Tensor | None, tensor: Tensor | None) -> None:
        if tensor is None or cast is None or cast is tensor:
            return
        with torch.no_grad():
            tensor.copy_(cast)
        self._casts = {key: each for key, each in self._casts.items() if each.param is not tensor}


def _require_unwritten(cast: _ParameterCast) -> None:
    if version_of(cast.result) == cast.result_version:
        return
    param, dtype = cast.param, cast.result.dtype
    raise RuntimeError(
        f"an island in {dtype} wrote to a view of a parameter of shape {tuple(param.shape)} in "
        f"{param.dtype}, and in the island a view shows a cast: the parameter did not change. Write"
        f" to the parameter itself, or convert the module: module.to({dtype})"
    )


# --- what a function does -------------------------------------------------------------------------

_NO_VALUES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr"),
    *("element_size", "untyped_storage", "get_device", "is_contiguous", "is_floating_point"),
    *("is_complex", "is_inference", "register_hook", "backward", "grad"),
    *("__get__", "__set__", "__delete__", "__len__", "__hash__"),
}
"""Methods, and accesses to attributes, that need no values; and those that need the parameter."""

_CONVERSIONS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
"""Methods whose result, of another dtype, may be written to. They would return the cast itself."""


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


_VIEWS = _getters("T", "mT", "H", "mH", "real")
_DATA: list[Any] = [*_getters("data"), Tensor.data.__set__]  # type: ignore[attr-defined]
_DTYPE = _getters("dtype")


@compiler.run_while_tracing
def _kind(func: Any) -> Literal["cast", "dtype", "data", "all but the first", "no values"]:
    name = getattr(func, "__name__", "")
    if name in _NO_VALUES:
        if func in _VIEWS:
            return "cast"
        return "dtype" if func in _DTYPE else "data" if func in _DATA else "no values"
    dunder = name.startswith("__")
    if name == "__setitem__" or (name.startswith("__i") if dunder else name.endswith("_")):
        return "all but the first"  # written in place
    return "all but the first" if name in _CONVERSIONS else "cast"


# The position and the name of an argument.
_Place = tuple[int, str]


@compiler.run_while_tracing
def _writes(func: Any) -> tuple[_Place, ...]:
    """Return the arguments that a function writes to if the first of them is true."""
    return _WRITES.get(func, ())


_TRAINING, _OWN = (5, "training"), (5, "use_input_stats")
_OF_NN = ((1, "running_mean"), (2, "running_var"))
_OF_TORCH = ((3, "running_mean"), (4, "running_var"))
_STATISTICS = (*_OF_NN, *_OF_TORCH)  # buffers of the dtype that the other arguments had
_WRITES: dict[Any, tuple[_Place, ...]] = {
    F.batch_norm: (_TRAINING, *_OF_NN),
    F.instance_norm: (_OWN, *_OF_NN),
    torch.batch_norm: (_TRAINING, *_OF_TORCH),
    torch.instance_norm: (_OWN, *_OF_TORCH),
    F.embedding: ((3, "max_norm"), (1, "weight")),
    F.embedding_bag: ((3, "max_norm"), (1, "weight")),
}


def _argument(place: _Place, args: Any, kwargs: Any) -> Any:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


# --- recomputation --------------------------------------------------------------------------------


def in_the_same_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that a later call runs in the mode of an island, if this one does.

    For torch.utils.checkpoint inside of an island.
    """
    mode = next(iter(active()), None)
    if mode is None:
        return function
    settings = mode.dtype, mode.others, mode.stand_ins

    def running(*args: Any, **kwargs: Any) -> Any:
        with InDtype(*settings):
            return function(*args, **kwargs)

    return compiler.do_not_compile_alone(running, nor_below=False)


def active() -> list[InDtype]:
    """Return the modes of the islands that this thread is in, innermost first."""
    return [mode for mode in modes.function_modes() if isinstance(mode, InDtype)]
