"""Autocast inside ``torch.autograd.Function``."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from halfstep._autocast.casts import is_eligible
from halfstep._autocast.context import autocast, default_device
from halfstep._autocast.region import Region, Settings, current_settings, in_graph
from halfstep.errors import CallOrderError

_Method = TypeVar("_Method", bound=Callable[..., Any])


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[_Method], _Method]: ...


@overload
def custom_fwd(
    fwd: _Method, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> _Method: ...


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Decorate the ``forward`` of a ``torch.autograd.Function`` for use under autocast.

    Does what ``torch.amp.custom_fwd`` does. Goes with :func:`custom_bwd` on ``backward``.

    Args:
        fwd: the method, when used without arguments: ``@custom_fwd``.
        device_type: ``"cuda"``, ``"cpu"``, ...; None as in :class:`~halfstep.autocast`.
        cast_inputs: None runs ``forward`` under the autocast of its caller. A dtype casts the
            floating-point inputs on the device, float64 ones excepted, to it and runs ``forward``
            with autocast off. Outside autocast neither has an effect.

    Sync: none.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     Square.apply(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any) -> Any:
        device = device_type or default_device()
        settings = current_settings(device)
        switches = settings.switches
        if cast_inputs is None or not switches.enabled:
            _remember(ctx, settings)
            return fwd(ctx, *args)
        _remember(ctx, settings._replace(switches=switches._replace(enabled=False)))
        with autocast(device, enabled=False):
            return fwd(ctx, *_cast(args, device, cast_inputs))

    return forward


@overload
def custom_bwd(
    bwd: None = None, *, device_type: str | None = None
) -> Callable[[_Method], _Method]: ...


@overload
def custom_bwd(bwd: _Method, *, device_type: str | None = None) -> _Method: ...


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Decorate the ``backward`` that goes with a :func:`custom_fwd`.

    ``backward`` runs under the autocast, and the policy, that ``forward`` ran under.

    Args:
        bwd: the method, when used without arguments: ``@custom_bwd``.
        device_type: as for :func:`custom_fwd`.

    Raises:
        CallOrderError: ``forward`` is not decorated with :func:`custom_fwd`.

    Sync: none.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *gradients: Any) -> Any:
        settings = getattr(ctx, "_halfstep_settings", None)
        if settings is None:
            raise CallOrderError(
                "custom_bwd: the forward of this function did not run under halfstep.custom_fwd, "
                "so its autocast is not known. Decorate forward with halfstep.custom_fwd"
            )
        if torch.compiler.is_compiling():
            # The one context of ours that it can enter in the backward of a Function.
            with in_graph(settings):
                return bwd(ctx, *gradients)
        with Region(settings):
            return bwd(ctx, *gradients)

    return backward


def _remember(ctx: Any, settings: Settings) -> None:
    """Tell ``backward`` what to run under; in the words of torch.amp too, in case it is its own."""
    ctx._halfstep_settings = settings
    ctx._fwd_used_autocast, ctx._dtype = settings.switches.enabled, settings.switches.dtype


def _cast(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast eligible tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if is_eligible(value, device) else value
    if isinstance(value, Mapping):
        return {key: _cast(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, device, dtype) for item in value)
    return value
