"""torch.amp: autocast's switches, and the scaler's kernels and state."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.amp.autocast_mode

from halfstep._pytorch.compiler import GUARD_DEVICE
from halfstep._pytorch.devices import can_move_scale, has_float64

# (gradients, found_inf, inv_scale): sets found_inf to 1 if any entry is inf or NaN, then multiplies
# all gradients by inv_scale in place, in float32 arithmetic. The gradients have one device and one
# real dtype, which must be among Facts.unscales; found_inf and inv_scale are float32 scalars on
# that device.
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# (tensors, p, dtype=): the p-norm of each tensor, all on one device.
norms_of_each = torch._foreach_norm

# (tensors, others): copies each to its tensor, converted to the tensor's dtype.
copy_to_each_ = torch._foreach_copy_

# (tensors): the implementation of torch.autograd.graph.increment_version().
increment_version: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version

# (device_type, dtype, enabled, cache_enabled), (what that returned): autocast as torch.export puts
# it into the program that it makes.
enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
exit_autocast: Callable[[Any], None] = torch.amp.autocast_mode._exit_autocast

# (is_on): the implementation of torch.no_grad(), which reaches it through seven functions, twice.
set_grad_enabled = torch._C._set_grad_enabled


def check_each_(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
    """Set ``found_inf`` to 1 if any entry is inf or NaN: one half of ``check_and_unscale_``.

    In five ops, one of which reads the tensors. Sync: none.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]  # the kernel rejects an empty tensor
    if filled:
        largest = torch.stack(norms_of_each(filled, math.inf))
        found_inf.logical_or_((largest * 0.0).sum())  # 0 or NaN, which is true


def multiply_each_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a float32 scalar in float32 arithmetic: the other half.

    One op, but one kernel for each tensor. Sync: none.
    """
    # A 0-dim factor would be rounded to the dtype of the tensors first.
    factors = [factor.reshape(1)] * len(tensors)
    torch._foreach_mul_([tensor if tensor.dim() else tensor.view(1) for tensor in tensors], factors)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Make the transition of torch.amp, in place on the device. Sync: none.

    The scale backs off unless ``found_inf`` is 0, and grows when ``growth_tracker + 1 ==
    growth_interval``, by equality, but not to inf. The tensors are scalars, the tracker int32 and
    the others float32.
    """
    if can_move_scale(scale.device):
        torch._amp_update_scale_(
            scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
        )
        return
    found, counted = found_inf.ne(0.0), growth_tracker + 1
    grown, is_due = scale * growth_factor, counted.eq(growth_interval)
    kept = torch.where(is_due & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(found, scale * backoff_factor, kept))
    growth_tracker.copy_(counted * ~(found | is_due))


# (scaler, optimizer, inv_scale, found_inf, allow_fp16): the divisions and checks of torch.amp;
# (scaler, optimizer, state, ...): its step. Neither uses the scaler. (scaler, call): the tensors of
# the scale, an error without them.
unscale_grads_: Callable[..., dict[torch.device, torch.Tensor]] = (
    torch.amp.GradScaler._unscale_grads_
)
maybe_opt_step: Callable[..., Any] = torch.amp.GradScaler._maybe_opt_step
check_scale_growth_tracker: Callable[..., tuple[torch.Tensor, torch.Tensor]] = (
    torch.amp.GradScaler._check_scale_growth_tracker
)


def reciprocal_of(scale: torch.Tensor) -> torch.Tensor:
    """Return the factor by which torch.amp multiplies gradients. Sync: none."""
    # Via float64: float32 division may be inexact under some compiler options.
    if has_float64(scale.device):
        return scale.double().reciprocal().float()
    return scale.reciprocal()


# (): the name of a backend added by a library, else "privateuseone".
custom_backend_name: Callable[[], str] = torch._C._get_privateuse1_backend_name


def restart_scaler(scaler: torch.amp.GradScaler, scale: float | None) -> None:
    """Give PyTorch's scaler new state objects, with its scale unless one is given.

    The existing objects do not change: ``vars(scaler)`` from before restores them.
    """
    attributes: Any = vars(scaler)
    device = None if attributes["_scale"] is None else attributes["_scale"].device
    value = scaler.get_scale() if scale is None else scale
    if device is None:
        attributes["_init_scale"] = value
    else:
        attributes["_scale"] = torch.tensor(value, dtype=torch.float32, device=device)
        attributes["_growth_tracker"] = torch.tensor(0, dtype=torch.int32, device=device)
    states = attributes["_per_optimizer_states"]
    attributes["_per_optimizer_states"] = type(states)(states.default_factory)


class Switches(NamedTuple):
    """PyTorch's autocast switches of a thread for one device type."""

    device: str
    dtype: torch.dtype
    enabled: bool
    cache: bool


_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_is_cache_enabled = torch.is_autocast_cache_enabled
_set_cache_enabled = torch.set_autocast_cache_enabled


def autocast_switches(device_type: str) -> Switches:
    """Return the switches of this thread."""
    return Switches(
        device_type, _get_dtype(device_type), _is_enabled(device_type), _is_cache_enabled()
    )


def set_autocast_switches(switches: Switches) -> None:
    """Set the switches of this thread."""
    device_type, dtype, enabled, cache = switches
    _set_enabled(device_type, enabled)
    _set_dtype(device_type, dtype)
    _set_cache_enabled(cache)


# (): whether any __torch_function__ mode is active in this thread.
has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

# (): the original torch.clear_autocast_cache, before call_when_cache_is_cleared replaces it.
clear_autocast_cache: Callable[[], None] = torch.clear_autocast_cache


def switches_of(context: torch.amp.autocast_mode.autocast) -> Switches:
    """Return the switches that a plain ``torch.autocast`` context sets."""
    return Switches(
        context.device, context.fast_dtype, context._enabled, bool(context._cache_enabled)
    )


def remember_for_custom_bwd(ctx: Any, switches: Switches) -> None:
    """Store the forward pass's switches for ``torch.amp.custom_bwd``, as ``custom_fwd`` does."""
    ctx._fwd_used_autocast, ctx._dtype = switches.enabled, switches.dtype


@cache
def switch_devices() -> list[str]:
    """Return the device types for which this PyTorch build has autocast switches."""
    return [device for device in torch._C._autocast_supported_devices() if device != GUARD_DEVICE]


@cache
def autocast_devices() -> list[str]:
    """Return the :func:`switch_devices` for which autocast kernels can be registered.

    For some others (XLA) there is autocast, but no Python name of its key.
    """
    keys = torch._C.DispatchKey.__members__
    return [
        device
        for device in switch_devices()
        if "Autocast" + torch._C._dispatch_key_for_device(device) in keys
    ]


def call_when_cache_is_cleared(function: Callable[[], None]) -> None:
    """Make ``torch.clear_autocast_cache()`` also call ``function``, permanently."""
    clear = torch.clear_autocast_cache

    @functools.wraps(clear)
    def clear_autocast_cache() -> None:
        clear()
        function()

    torch.clear_autocast_cache = clear_autocast_cache
