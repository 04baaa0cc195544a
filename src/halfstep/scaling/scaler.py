"""The gradient scaler: moves values between the scale, the gradients and the optimizer.

The algorithm is dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018,
arXiv:1710.03740), with the calls of the PyTorch documentation ("Automatic Mixed Precision package",
``torch.amp.GradScaler``).
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any, Self

import torch

from halfstep.errors import CallOrderError
from halfstep.scaling import gradients
from halfstep.scaling.device import DeviceState, available_device, default_device, moved
from halfstep.scaling.iteration import Iteration, Stage
from halfstep.scaling.losses import Multiplier
from halfstep.scaling.optimizers import (
    handles_scale,
    name,
    refuse_closure,
    step_with_scale,
    takes_scaler,
)
from halfstep.scaling.state import ScaleState, checked_scale


class GradScaler:
    """Multiplies the loss by a scale so that small gradients survive float16, and undoes it.

    The scale follows the gradients: when one is inf or NaN, the optimizer's step is skipped and the
    scale is multiplied by ``backoff_factor``; after ``growth_interval`` steps in a row it is
    multiplied by ``growth_factor``. It does not back off below 1, or below the smallest scale that
    the user has set by ``init_scale``, ``update(new_scale=)`` or ``load_state_dict``.

    Has every method of ``torch.amp.GradScaler``; docs/scaler.md lists where they differ on purpose.

    Args:
        device: Device type, such as ``"cuda"``. Left out, the device of the first loss decides.
        init_scale: The first scale, > 0.
        growth_factor: >= 1.
        backoff_factor: In (0, 1]. Both factors at 1 keep the scale as it is.
        growth_interval: Number of steps in a row before the scale grows, >= 1.
        enabled: False makes an object that scales nothing; ``step`` only calls ``optimizer.step``.

    Raises:
        TypeError: An argument is not a number of the right kind.
        ValueError: A number is out of range, or PyTorch sees no such device here.

    Sync: none for the constructor; each method says what it costs.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler()
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(2, 4)).square().mean()
        ...     scaler.scale(loss).backward()
        ...     _ = scaler.step(optimizer)
        ...     scaler.update()
        >>> scaler.get_scale()
        65536.0
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the null object, a subclass, when ``enabled`` is false."""
        enabled = args[5] if len(args) > 5 else kwargs.get("enabled", True)
        if cls is GradScaler and not enabled:
            # Imported here because that class derives from this one.
            from halfstep.scaling.disabled import DisabledGradScaler

            return object.__new__(DisabledGradScaler)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not enabled:
            raise TypeError(
                f"{type(self).__name__}(enabled=False): a subclass of GradScaler cannot be "
                "switched off this way, use halfstep.GradScaler(enabled=False)"
            )
        self._device = None if device is None else available_device(device)
        # Factors and interval are always read here; scale, count and floor only until _on_device.
        self._host = ScaleState.first(init_scale, growth_factor, backoff_factor, growth_interval)
        self._on_device: DeviceState | None = None
        self._can_amplify = self._host.can_amplify
        self._iteration = Iteration()

    # What help() and editors show; without it they would show the arguments of __new__.
    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    # --- the iteration ----------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or all losses in nested containers, by the scale.

        Args:
            outputs: A tensor of any shape and floating dtype, or a (nested) list, tuple, named
                tuple, mapping or other iterable of tensors, on one or several devices.

        Returns:
            The same, scaled; iterables that are no list, tuple or mapping become lists. A float16
            tensor with dimensions is scaled in float32.

        Raises:
            TypeError: There is something else than tensors in ``outputs``.

        Sync: none.
        """
        return Multiplier(self._scale_on)(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place, and look for inf and NaN.

        Call it before clipping or looking at gradients; :meth:`step` does it otherwise. Without any
        gradient it does nothing.

        Raises:
            CallOrderError: Before ``scale``, twice between two ``update``, or after ``step``.
            ValueError: The gradients are float16. Nothing was changed.

        Sync: none.
        """
        scale = self._require_scale("unscale_", optimizer)
        stage = self._iteration.record(optimizer).stage
        if stage is not Stage.SCALED:
            raise CallOrderError(
                f"unscale_({name(optimizer)}): {stage.value} since the last update(). Call "
                "unscale_() at most once an iteration, after the last backward() and before "
                "step(); call update() at the end of the iteration"
            )
        gradients.refuse_float16(optimizer)
        self._iteration.unscale_(optimizer, scale, can_amplify=self._can_amplify)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if that is still to do; step if all of them are finite.

        An optimizer that handles the scale itself (``_step_supports_amp_scaling``, as the fused
        ones of PyTorch) is always called and skips on the device.

        Args:
            optimizer: The optimizer whose ``step`` is to be called.
            *args: Arguments for it. A closure is refused: it would run ``backward`` after the
                gradients have been unscaled.
            **kwargs: Keyword arguments for it, no closure either.

        Returns:
            What ``optimizer.step`` returned, None for a skipped step.

        Raises:
            CallOrderError: Before ``scale``, twice between two ``update``, or without any gradient.
            TypeError: There is a closure.
            ValueError: The gradients are float16 and the optimizer cannot unscale them itself.

        Sync: one; none for an optimizer that handles the scale itself.
        """
        refuse_closure(optimizer, args, kwargs)
        scale = self._require_scale("step", optimizer)
        stage = self._iteration.record(optimizer).stage
        if stage is Stage.STEPPED:
            raise CallOrderError(
                f"step({name(optimizer)}): {stage.value} since the last update(). Call "
                "update() once at the end of each iteration, after step() of every optimizer"
            )
        if handles_scale(optimizer):
            result = self._step_with_scale(optimizer, scale, args, kwargs)
        else:
            if stage is Stage.SCALED:
                self.unscale_(optimizer)
            skip = self._iteration.found_inf_of(optimizer, scale.device).item()
            # Through the instance: accelerate replaces `step` there to see whether it was called.
            result = None if skip else optimizer.step(*args, **kwargs)
        self._iteration.keep(optimizer).stage = Stage.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: let the scale back off, count or grow; or set it by hand.

        Args:
            new_scale: The scale from now on; the count of steps in a row stays. A number is checked
                here. A 1-element tensor is copied without waiting for it: if it turns out to be
                zero, negative, inf or NaN, the scale stays as it is; and since it may be below 1,
                unscaling costs a second look at the gradients from then on.

        Raises:
            CallOrderError: No gradients were checked since the last ``update`` (no ``step``), or a
                tensor before the first ``scale``.
            TypeError: ``new_scale`` is neither a number nor a real tensor.
            ValueError: ``new_scale`` is a number out of range, has not exactly one element, or
                requires a gradient.

        Sync: none.
        """
        if new_scale is None:
            self._update_from_gradients()
        elif isinstance(new_scale, torch.Tensor):
            self._set_scale_from_tensor(new_scale)
        else:
            self._host = self._host.with_scale(checked_scale("new_scale", new_scale))
            self._can_amplify |= self._host.can_amplify
            if self._on_device is not None:
                self._on_device.fill_(self._host.scale)
        self._iteration = Iteration()

    # --- looking and setting ----------------------------------------------------------------------

    def get_scale(self) -> float:
        """Return the scale, 1.0 if the scaler is disabled. Sync: one."""
        return self._host.scale if self._on_device is None else self._on_device.scale.item()

    def get_growth_factor(self) -> float:
        """Return the growth factor. Sync: none."""
        return self._host.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, >= 1. Sync: none."""
        self._host = replace(self._host, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor. Sync: none."""
        return self._host.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, in (0, 1]. Sync: none."""
        self._host = replace(self._host, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval. Sync: none."""
        return self._host.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, >= 1; a lower one may let the next step grow. Sync: none."""
        self._host = replace(self._host, growth_interval=new_interval)
        if self._on_device is not None:
            self._on_device.clamp_tracker_(self._host.growth_interval)

    def is_enabled(self) -> bool:
        """Return whether this object scales anything. Sync: none."""
        return True

    # --- saving and loading -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, to be saved after ``update``; ``{}`` if the scaler is disabled.

        The keys are those of ``torch.amp.GradScaler``, which can load it: ``scale``,
        ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``; and one
        more, ``halfstep``, with a version and what PyTorch does not know (``min_scale``).

        Sync: one for each of scale, count and floor.
        """
        return self._read_state().to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class or ``torch.amp.GradScaler`` saved.

        An empty dict, the state of a disabled scaler, changes nothing and warns.

        Raises:
            ValueError: A key is missing or a value cannot be right. Nothing was changed.

        Sync: none.
        """
        if not state_dict:
            warnings.warn(
                "GradScaler.load_state_dict({}): the checkpoint was saved by a disabled GradScaler "
                "and holds no scale. This one keeps its present values.",
                stacklevel=2,
            )
            return
        self._host = ScaleState.from_dict(state_dict)
        self._can_amplify = self._host.can_amplify
        if self._on_device is not None:
            self._on_device = DeviceState(self._host, self._on_device.device)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy keep; the copy creates its tensors on its first loss.

        Raises:
            CallOrderError: In the middle of an iteration.
        """
        if self._iteration.names():
            raise CallOrderError(
                "a GradScaler cannot be pickled or copied between unscale_() or step() and "
                f"update(): do it after update(). Seen since the last one: "
                f"{', '.join(self._iteration.names())}"
            )
        return self.__dict__ | {"_host": self._read_state(), "_on_device": None}

    # --- the protocol for optimizers that handle the scale themselves -----------------------------

    def _step_with_scale(
        self,
        optimizer: torch.optim.Optimizer,
        scale: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call ``optimizer.step`` with the scale and the finding, as attributes or as ourselves.

        The older protocol passes the scaler, and the optimizer calls ``unscale_``,
        ``_check_inf_per_device``, ``_found_inf_per_device`` and ``_get_scale_async``. The present
        one sets the attributes ``grad_scale`` and ``found_inf`` for the time of the call.
        """
        if takes_scaler(optimizer):
            return optimizer.step(*args, **(kwargs | {"grad_scaler": self}))
        if self._iteration.record(optimizer).stage is Stage.SCALED:
            if self._can_amplify:
                # Its kernel would divide by the scale after our check. Divide before it instead.
                self._iteration.unscale_(optimizer, scale, can_amplify=True)
            else:
                self._iteration.check(optimizer)
        found_inf = self._iteration.found_inf_of(optimizer, scale.device)
        is_scaled = self._iteration.record(optimizer).stage is Stage.SCALED
        return step_with_scale(optimizer, scale if is_scaled else None, found_inf, args, kwargs)

    def _get_scale_async(self) -> torch.Tensor | None:
        return None if self._on_device is None else self._on_device.scale

    def _check_inf_per_device(
        self, optimizer: torch.optim.Optimizer
    ) -> dict[torch.device, torch.Tensor]:
        return self._iteration.check(optimizer)

    def _found_inf_per_device(
        self, optimizer: torch.optim.Optimizer
    ) -> dict[torch.device, torch.Tensor]:
        return self._iteration.record(optimizer).found_inf

    # --- inside -----------------------------------------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str | None) -> None:
        # accelerate 1.15 calls it by this name, with self._device, to load an FSDP2 checkpoint.
        device = default_device() if dev is None else torch.device(dev)
        self._device = self._device or device.type
        self._on_device = DeviceState(self._host, device)

    def _scale_on(self, device: torch.device) -> torch.Tensor:
        if self._on_device is None:
            self._lazy_init_scale_growth_tracker(device)
            assert self._on_device is not None
        return moved(self._on_device.scale, device)

    def _require_scale(self, method: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        if self._on_device is None:
            raise CallOrderError(
                f"{method}({name(optimizer)}) before scale(): no loss has been scaled by this "
                "GradScaler yet. Call scaler.scale(loss).backward() first"
            )
        return self._on_device.scale

    def _read_state(self) -> ScaleState:
        return self._host if self._on_device is None else self._on_device.read(self._host)

    def _update_from_gradients(self) -> None:
        found = self._iteration.found_inf()
        if self._on_device is None or not found:
            raise CallOrderError(
                "update(): no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) for at least one optimizer first, or give a scale: "
                "update(new_scale=65536.0)"
            )
        self._on_device.update_(gradients.combine(found, self._on_device.device), self._host)

    def _set_scale_from_tensor(self, new_scale: torch.Tensor) -> None:
        if new_scale.is_complex() or new_scale.dtype == torch.bool:
            raise TypeError(f"new_scale is {gradients.describe(new_scale)}: pass a real tensor")
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ValueError(
                f"new_scale is {gradients.describe(new_scale)} with "
                f"requires_grad={new_scale.requires_grad}: pass a number or a tensor with one "
                "element that requires no gradient (tensor.detach())"
            )
        if self._on_device is None:
            raise CallOrderError(
                "update(new_scale=tensor) before scale(): the scale is not on any device yet. Pass "
                "a number, or scale a loss first"
            )
        self._can_amplify = True
        self._on_device.copy_(new_scale)
