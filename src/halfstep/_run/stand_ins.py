"""Our classes with PyTorch's arguments and manners, for scripts that do not know of halfstep.

Where PyTorch warns and switches itself off, such as for CUDA on a machine without it, halfstep
raises; these do as PyTorch does.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import distributed
from torch.amp import autocast_mode

import halfstep
from halfstep import Policy, preset
from halfstep._autocast.region import Region, Settings
from halfstep._autocast.rule import LOWER_PRECISIONS
from halfstep._pytorch import compiler
from halfstep._scaler.disabled import DisabledGradScaler

_TorchAutocast = autocast_mode.autocast
_TorchGradScaler = torch.amp.GradScaler

# --- autocast -------------------------------------------------------------------------------------

_policy = preset("standard")


def set_policy(policy: Policy) -> Policy:
    """Set what :class:`Autocast` uses where no context around it has a policy.

    Returns:
        What it was before.
    """
    global _policy
    before, _policy = _policy, policy
    return before


class Autocast(halfstep.autocast):
    """Stands in for ``torch.autocast``."""

    @compiler.do_not_compile_alone
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        Region.__init__(self, _settings(device_type, dtype, enabled, cache_enabled))


class CudaAutocast(Autocast):
    """Stands in for ``torch.cuda.amp.autocast``."""

    @compiler.do_not_compile_alone
    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
    ) -> None:
        Region.__init__(self, _settings("cuda", dtype, enabled, cache_enabled))


class CpuAutocast(Autocast):
    """Stands in for ``torch.cpu.amp.autocast``."""

    @compiler.do_not_compile_alone
    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        Region.__init__(self, _settings("cpu", dtype, enabled, cache_enabled))


@compiler.run_while_tracing
def _settings(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> Settings:
    if isinstance(device_type, str) and not torch.amp.is_autocast_available(device_type):
        raise RuntimeError(f"PyTorch has no autocast for {device_type!r}")
    if enabled:
        problem = _autocast_problem(device_type, dtype)
        if problem is not None:
            warnings.warn(f"{problem}: autocast is off in this block", stacklevel=3)
            enabled = False
    if dtype not in LOWER_PRECISIONS:
        dtype = None  # it is off then, or the default is meant
    ours = halfstep.autocast(device_type, dtype, bool(enabled), cache_enabled, policy=_policy)
    # A context of halfstep around it, with a policy of the script's own, goes before.
    return ours._settings._replace(inherit=True)


def _autocast_problem(device_type: str, dtype: torch.dtype | None) -> str | None:
    """Say why ``torch.autocast`` would switch itself off, None if it would not."""
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return "autocast('cuda'), but PyTorch sees no CUDA device here"
        possible: tuple[torch.dtype | None, ...] = (None, *LOWER_PRECISIONS)
    else:
        possible = (None, torch.float16, torch.bfloat16)
    if dtype in possible:
        return None
    return f"autocast({device_type!r}) lowers to float16 or bfloat16, not to {dtype}"


class _PlaceInMode(type):
    """Lets torch.compile know PyTorch's class, and not ours, at the place where it looks for it.

    It compares what it meets with ``torch.amp.autocast_mode.autocast``, and compiles what it finds
    equal, or an instance, in its own way, in which there are no policies.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Autocast:
        return Autocast(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _TorchAutocast

    __hash__ = type.__hash__

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchAutocast)


class AutocastInMode(Autocast, metaclass=_PlaceInMode):
    """Stands in for ``torch.amp.autocast_mode.autocast``; makes :class:`Autocast`."""


# --- the scaler -----------------------------------------------------------------------------------


class GradScaler(halfstep.GradScaler):
    """Stands in for ``torch.amp.GradScaler``."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._begin(_is_possible(device, enabled), numbers)

    def _begin(
        self,
        enabled: bool,
        numbers: tuple[float, float, float, int],
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        if not enabled:
            self.__class__ = _switched_off(type(self))
            super().__init__()  # that of the new class; PyTorch does not look at the numbers either
            return
        # The device is that of the first loss, as it is with PyTorch's scaler whatever it is told.
        super().__init__(None, *numbers, process_group=process_group)

    def _switch_off(self) -> None:
        self.__class__ = _switched_off(type(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell of methods that PyTorch's scaler calls and ours does not."""
        super(halfstep.GradScaler, cls).__init_subclass__(**kwargs)  # ours refuses such a class
        internal = vars(_TorchGradScaler).keys() - set(dir(halfstep.GradScaler))
        overridden = sorted(internal & vars(cls).keys())
        if overridden:
            warnings.warn(
                f"{cls.__name__} overrides {', '.join(overridden)} of torch.amp.GradScaler, which "
                "halfstep's GradScaler does not have: it is never called",
                stacklevel=2,
            )


def _is_possible(device: str, enabled: bool) -> bool:
    """Return ``enabled``; False, with a warning, for CUDA on a machine without it."""
    if not enabled or device != "cuda" or torch.cuda.is_available():
        return enabled
    frame, depth = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename == __file__:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(
        "GradScaler for 'cuda', but PyTorch sees no CUDA device here: it is switched off",
        stacklevel=depth + 1,
    )
    return False


_switched_off_classes: dict[type[GradScaler], type[GradScaler]] = {}


def _switched_off(cls: type[GradScaler]) -> type[GradScaler]:
    """Return ``cls`` with the methods of a scaler that does not scale in place of ours.

    What a script overrides stays.
    """
    if cls not in _switched_off_classes:
        members = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__reduce__": lambda self: (_make_switched_off, (cls,), self.__getstate__()),
        }
        _switched_off_classes[cls] = type(cls.__name__, (cls, DisabledGradScaler), members)
    return _switched_off_classes[cls]


def _make_switched_off(cls: type[GradScaler]) -> GradScaler:
    return object.__new__(_switched_off(cls))


class CudaGradScaler(GradScaler):
    """Stands in for ``torch.cuda.amp.GradScaler``."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            "cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )


class CpuGradScaler(GradScaler):
    """Stands in for ``torch.cpu.amp.GradScaler``."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class ShardedGradScaler(GradScaler):
    """Stands in for ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        if process_group is None and distributed.is_initialized():
            process_group = distributed.group.WORLD  # as PyTorch's: all ranks step together
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._begin(_is_possible(device, enabled), numbers, process_group)
