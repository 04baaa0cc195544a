"""Casts of weights that a user holds across autocast contexts."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep._autocast import weight_cache
from halfstep._autocast.weight_cache import Casts
from halfstep._common.warn import warn
from halfstep._pytorch import amp, compiler, dispatch, modes, storages
from halfstep.errors import CallOrderError

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

_ATTRIBUTE = "_halfstep_casts"


class HoldInfo(NamedTuple):
    """The result of :meth:`halfstep.hold_casts.info`.

    Attributes:
        weights: Number of held parameters.
        casts: Number of kept casts.
        bytes: Total size of these casts.
        hits: Number of uses of a kept cast.
        misses: Number of casts of held weights.
        stale: Number of kept casts that were dropped because the weight changed or may have
            changed.
    """

    weights: int
    casts: int
    bytes: int
    hits: int
    misses: int
    stale: int


class hold_casts:
    """Keep the casts of a model's weights from one autocast context to the next.

    By default, weights are cast again in every context, as under ``torch.autocast``. That takes
    most of the time of small batches: each token in generation, each image in a service, each
    micro-batch. Holding the casts costs memory: half the size of the weights.

    As a context manager it ends with the block, as a decorator it holds during each call (of a
    generator function too), and otherwise until :meth:`release`. It applies to all threads.

    **Detected writes**, after which a weight is cast again: in-place ops, ``load_state_dict``,
    optimizer steps, ``weight.data = ...``, and writes through ``weight.data``, views, NumPy arrays,
    DLPack capsules and storages of a weight, whether or not these still exist.

    **Undetected writes** are those by code that calls no function of PyTorch's Python interface
    with the parameter: through a raw pointer, by a collective of ``torch.distributed``, a
    previously captured CUDA graph, TorchScript, or through a tensor that received the memory by
    ``other.data = weight`` or ``to_dlpack(weight)`` and no longer exists when the weight is used
    again. Call :meth:`clear` after such a write.

    While held, the parameters have a subclass of ``nn.Parameter``, which detects writes. (This
    disables the fast path of ``nn.MultiheadAttention``, which autocast does not use either.) Not
    held are parameters added to the model later, those of other classes (``DTensor``, quantized
    ones), those of another hold, and on the CPU those under 128 KiB, for which casting is faster
    than detection.

    Args:
        model: The module whose parameters are held, including those of its submodules.
        max_bytes: Maximum total size of the casts; further casts are not kept. None for no limit.

    Raises:
        TypeError: ``model`` is not a module, or ``max_bytes`` not an int.
        ValueError: ``max_bytes`` is negative.

    Warns:
        UserWarning: No parameter of the model can be held.

    ``make_fx`` over a function that uses held parameters without taking them as arguments raises
    :class:`CallOrderError`: call it outside of the hold.

    Sync: none.

    Example:
        >>> import halfstep
        >>> model, x = torch.nn.Linear(256, 256, bias=False), torch.ones(1, 256)
        >>> with torch.no_grad(), halfstep.hold_casts(model) as held:
        ...     for _ in range(5):
        ...         with halfstep.autocast("cpu", torch.bfloat16):
        ...             y = model(x)
        ...     print(held.info())
        HoldInfo(weights=1, casts=1, bytes=131072, hits=4, misses=1, stale=0)
    """

    def __init__(self, model: nn.Module, *, max_bytes: int | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"hold_casts takes a torch.nn.Module, got {type(model).__name__}")
        if max_bytes is not None and type(max_bytes) is not int:
            raise TypeError(
                f"hold_casts: max_bytes is a number of bytes or None, got {max_bytes!r}"
            )
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"hold_casts: max_bytes is 0 or more, or None, got {max_bytes}")
        self._model, self._max_bytes = model, max_bytes
        self._num_uses = self._num_misses = self._num_stale = self._num_bytes = 0
        self._is_released = False
        large = [p for p in model.parameters() if not weight_cache.is_small(p)]
        self._weights = [p for p in large if _can_be_held(p)]
        for weight in self._weights:
            weight.__dict__[_ATTRIBUTE] = _HeldCasts(weight, self)
            weight.__class__ = Held
        if large and not self._weights and not any(type(p) is Held for p in large):
            warn(
                f"hold_casts: no weight of this {type(model).__name__} can be held (they are of "
                f"{type(large[0])}, {large[0].layout}, {large[0].dtype}); they are cast in every "
                "context",
            )

    def __enter__(self) -> Self:
        if self._is_released:
            raise CallOrderError("this hold_casts was released; make a new one: hold_casts(model)")
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Return ``function`` with each call run in a hold of its own."""
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if not callable(function) or is_async:
            raise TypeError(
                f"hold_casts(model)(function) decorates a function that is not async, got "
                f"{function!r}; to run a block: with hold_casts(model):"
            )
        self.release()
        model, max_bytes = self._model, self._max_bytes
        call: Callable[..., Any] = function

        @functools.wraps(function)
        def holding(*args: Any, **kwargs: Any) -> Any:
            with hold_casts(model, max_bytes=max_bytes):
                return call(*args, **kwargs)

        @functools.wraps(function)
        def generating(*args: Any, **kwargs: Any) -> Any:
            with hold_casts(model, max_bytes=max_bytes):
                return (yield from call(*args, **kwargs))

        return generating if inspect.isgeneratorfunction(function) else holding

    def __repr__(self) -> str:
        if self._is_released:
            return f"<hold_casts of {type(self._model).__name__}: released>"
        return f"<hold_casts of {type(self._model).__name__}: {self.info()}>"

    def release(self) -> None:
        """Free the casts and stop holding; later casts end with their context. May be repeated."""
        self.clear()
        for weight in self._weights:
            casts = _held_casts(weight)
            if casts is not None and casts.hold is self:
                del weight.__dict__[_ATTRIBUTE]
                weight.__class__ = nn.Parameter
        self._weights, self._is_released = [], True

    def clear(self) -> None:
        """Drop all casts, after an undetected write, and reset the counts."""
        self._forget()
        self._num_uses = self._num_misses = self._num_stale = 0

    def info(self) -> HoldInfo:
        """Return what is kept and how often it was used. Sync: none."""
        num_casts = sum(e.kept is not None for casts in self._casts() for e in casts.values())
        num_hits = self._num_uses - self._num_misses
        counts = self._num_bytes, num_hits, self._num_misses, self._num_stale
        return HoldInfo(len(self._weights), num_casts, *counts)

    def _forget(self) -> None:
        for casts in self._casts():
            casts.forget()

    def _casts(self) -> list[_HeldCasts]:
        found = map(_held_casts, self._weights)
        return [casts for casts in found if casts is not None and casts.hold is self]


class Held(nn.Parameter):
    """A held parameter, whose hold is notified of possible undetected writes.

    A function that gets the parameter may expose its memory (``.data``, a view, an array), and
    later writes to that are not counted. While the exposed object lives, the storage has a second
    user and casts are not used. So it suffices to drop the casts when memory is exposed.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True, **others: Any) -> nn.Parameter:  # type: ignore[misc]
        """Return a plain parameter: copies of a held parameter are not held."""
        others.pop(_ATTRIBUTE, None)  # accelerate copies parameters by their attributes
        return nn.Parameter(data, requires_grad, **others)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Become a plain parameter: ``nn.Parameter(held)`` shares memory with ``held``."""
        self.__dict__.clear()
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    @classmethod
    @compiler.do_not_compile_alone
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call ``function``, then drop the casts of parameters it wrote to or exposed."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with modes.no_torch_function():
                return function(*args, **kwargs)
        if function is Tensor.__dlpack__ and not args[0].requires_grad:
            # Export a tensor of its own, so that the storage visibly has a second user.
            args = (args[0].detach(), *args[1:])
        try:
            # The result must stay alive until the storage's users are counted.
            result = _call_as_plain(function, types, args, kwargs)
        finally:
            with modes.no_torch_function():
                _forget_unseen(function, (*args, *kwargs.values()))
        if function is Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
            result.__class__ = cls  # nn.Parameter expects the class of its argument
        return result


_NEW_PARAMETER = nn.Parameter.__new__.__code__


def _call_as_plain(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call ``function`` as if no parameter were held."""
    others = tuple(kind for kind in types if not issubclass(kind, Held))
    for kind in others:
        result = kind.__torch_function__(function, others, args, kwargs)
        if result is not NotImplemented:
            return result
    with modes.no_torch_function():
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if not modes.is_making_graph():
                raise
            raise CallOrderError(
                "make_fx cannot trace weights held by hold_casts. Call make_fx outside of the "
                "hold, or after release(), or give it the weights as arguments"
            ) from error


def _forget_unseen(function: Any, arguments: Any) -> None:
    """Drop the casts of held parameters that a function may have written to or exposed."""
    writes = _writes_unseen(function)
    for argument in arguments:
        for weight in argument if type(argument) in (list, tuple) else (argument,):
            casts = _held_casts(weight)
            if casts is None:
                continue
            if function is torch.autograd.grad:  # hooks have run, which bypass held parameters
                casts.hold._forget()
            elif writes or not storages.is_used_once(weight):
                casts.forget()


class _HeldCasts(Casts):
    """The casts of a held weight, stored as its attribute to share its lifetime."""

    def __init__(self, weight: Tensor, hold: hold_casts) -> None:
        self.hold = hold
        self.weight_id = id(weight)  # its attributes may have been copied to another tensor

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        cast = super().cast(weight, dtype)
        self.hold._num_uses += cast is not None
        return cast

    def _cast_anew(self, *args: Any) -> Tensor:
        self.hold._num_misses += 1
        return super()._cast_anew(*args)

    def _is_worth_keeping(self, num_bytes: int, is_unchanged: bool) -> bool:
        most = self.hold._max_bytes
        return most is None or self.hold._num_bytes + num_bytes <= most

    def _keep(self, entry: Any, kept: Any) -> None:
        super()._keep(entry, kept)
        self.hold._num_bytes += kept.cast.nbytes

    def _drop(self, entry: Any) -> None:
        kept = entry.kept
        super()._drop(entry)
        if kept is not None:
            self.hold._num_stale += 1
            self.hold._num_bytes -= kept.cast.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, ()  # saved files need neither casts nor halfstep


def _held_casts(weight: Any) -> _HeldCasts | None:
    if type(weight) is not Held:
        return None
    casts = weight.__dict__.get(_ATTRIBUTE)
    return casts if type(casts) is _HeldCasts and casts.weight_id == id(weight) else None


_HAND_OUT_ADDRESSES = (Tensor.data_ptr, Tensor.__cuda_array_interface__.__get__)


@functools.lru_cache(maxsize=4096)
def _writes_unseen(function: Any) -> bool:
    """Return whether versions and storage users may miss a function's writes, now or later."""
    name = getattr(function, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")  # fused ones do not bump versions
    return is_in_place or function in _HAND_OUT_ADDRESSES or dispatch.writes_to_arguments(function)


def _can_be_held(weight: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.is_floating_point()
        and weight.layout is torch.strided
        and not (weight.is_nested or weight.is_inference() or weight.is_meta)
    )


# --- casts of held weights, and writes to any -----------------------------------------------------


def kept_cast(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a parameter in ``dtype``, or None if the caller must cast it.

    See :meth:`halfstep._autocast.weight_cache.Casts.cast`. Not for DTensors, some writes to which
    are not counted. Sync: none.
    """
    casts = _held_casts(weight)
    if casts is None:
        return weight_cache.cast_in_context(weight, dtype)
    with modes.no_torch_function():
        return casts.cast(weight, dtype) if weight_cache.can_be_kept(weight) else None


@functools.cache
def follow_writes() -> None:
    """Drop casts when PyTorch's are cleared and after optimizer steps; installed only once."""
    amp.call_when_cache_is_cleared(weight_cache.clear)
    register_optimizer_step_post_hook(_forget_stepped)


def _forget_stepped(optimizer: Optimizer, *_: object) -> None:
    """Drop the casts of weights that fused optimizers, or writes to ``.data``, have changed."""
    if torch.compiler.is_compiling():  # compiled steps always bump versions
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight_cache.forget(weight)
            if (casts := _held_casts(weight)) is not None:
                casts.forget()
