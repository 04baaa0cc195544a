"""The calls of ``torch.amp.GradScaler``, with its arguments and its meaning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep._scaler import clipping, reporting
from halfstep._scaler.alarm import Alarm
from halfstep._scaler.closures import split_closure, step_with_closure
from halfstep._scaler.devices import default_device
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import parameters
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.optimizers import handles_scale, name, require_optimizer, takes_scaler
from halfstep._scaler.ranks.finding import Ranks
from halfstep._scaler.rules import Dynamic, Rule
from halfstep._scaler.saving import Saved
from halfstep._scaler.torch_attributes import TorchAttributes
from halfstep._torch import keep_out_of_graphs, saving_group
from halfstep.errors import CallOrderError

NUM_LOSSES_WITHOUT_UPDATE = 1000
"""So many calls of ``scale`` without an ``update`` are no accumulation but a forgotten call."""


class TorchCalls(TorchAttributes):
    """What :class:`halfstep.GradScaler` has in common with ``torch.amp.GradScaler``.

    The documentation of PyTorch ("Automatic Mixed Precision package") names the calls; what each
    does more is said there where it does it.
    """

    _device: str | None
    _engine: Engine
    _alarm: Alarm

    # --- the iteration ----------------------------------------------------------------------------

    def scale(self, outputs: Any, name: str | None = None) -> Any:
        """Multiply a loss, or all losses in nested containers, by the scale.

        It also looks whether they are finite, on the device: a step that is skipped because the
        loss was inf or NaN does not make the scale smaller.

        Args:
            outputs: A tensor of any shape and floating dtype, or a (nested) list, tuple, named
                tuple, mapping or other iterable of tensors, on one or several devices.
            name: A loss with a name has a scale of its own. Two names in one iteration need
                :meth:`accumulate`.

        Returns:
            The same, scaled; iterables that are no list, tuple or mapping become lists. A float16
            tensor with dimensions is scaled in float32.

        Raises:
            TypeError: There is something else than tensors in ``outputs``.

        Sync: none.
        """
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"scale(name={name!r}): the name of a loss is a string")
        scaled = self._engine.scale(outputs, name)
        if self._device is None:
            self._device = self._engine.scales.device_type()
        if self._engine.iteration.num_losses == NUM_LOSSES_WITHOUT_UPDATE:
            warnings.warn(
                f"{NUM_LOSSES_WITHOUT_UPDATE} losses have been scaled since the last update(). If "
                "this is no accumulation, scaler.step(optimizer) and scaler.update() are missing: "
                "optimizer.step() alone steps with gradients that are multiplied by the scale",
                stacklevel=2,
            )
        return scaled

    @keep_out_of_graphs
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place, and look for inf and NaN.

        Call it before clipping or looking at gradients; :meth:`step` does it otherwise. A gradient
        that another optimizer shares, or a wrapper of this one, is divided once. Without any
        gradient it does nothing.

        Raises:
            CallOrderError: Before ``scale``, twice between two ``update``, or after ``step``.
            ValueError: The gradients are float16. Nothing was changed.

        Sync: none.
        """
        require_optimizer("unscale_", optimizer)
        self._engine.unscale_(optimizer)

    @keep_out_of_graphs
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Unscale the gradients if that is still to do; step if all of them are finite.

        An optimizer that handles the scale itself (``_step_supports_amp_scaling``, as the fused
        ones of PyTorch) is always called and skips on the device. After a step that was taken the
        gradients are unscaled and clipped; one that was skipped leaves them as they were.

        With a closure, which every optimizer takes, the gradients of each evaluation are unscaled
        and checked. The closure calls ``scaler.scale(loss).backward()``, or only returns the loss.
        An evaluation with inf or NaN ends the step, and the parameters are as before it.

        Args:
            optimizer: The optimizer whose ``step`` is to be called.
            *args: Arguments for it; a closure is the first one.
            max_norm: Clip the norm of the unscaled gradients to this, in the same pass;
                ``math.inf`` only measures it, for :meth:`outcome`.
            **kwargs: Keyword arguments for it.

        Returns:
            What ``optimizer.step`` returned, None for a skipped step. :meth:`outcome` says more.

        Raises:
            CallOrderError: Before ``scale``, twice between two ``update``, without any gradient, or
                with a closure that calls ``backward`` on a loss that was not scaled.
            ValueError: The gradients are float16 and the optimizer cannot unscale them itself.

        Sync: one; none for an optimizer that handles the scale itself; one for each evaluation of
        a closure.
        """
        require_optimizer("step", optimizer)
        if max_norm is not None:
            max_norm = clipping.checked_max_norm(max_norm)
        closure, args, kwargs = split_closure(args, kwargs)
        if closure is not None:
            return step_with_closure(self._engine, optimizer, closure, args, kwargs, max_norm)
        if handles_scale(optimizer) and takes_scaler(optimizer):
            return self._step_with_scaler(optimizer, args, kwargs, max_norm)
        return self._engine.step(optimizer, args, kwargs, max_norm)

    @keep_out_of_graphs
    def update(self, new_scale: float | Tensor | None = None, name: str | None = None) -> None:
        """End the iteration: let the scale back off, count or grow; or set it by hand.

        Args:
            new_scale: The scale from now on; the count of steps in a row stays. A number is checked
                here. A 1-element tensor is copied without waiting for it: if it turns out to be
                zero, negative, inf or NaN, the scale stays as it is; and since it may be below 1,
                unscaling costs a second look at the gradients from then on.
            name: Name of the loss whose scale is set.

        Raises:
            CallOrderError: No gradients were checked since the last ``update`` (no ``step``), or a
                tensor before the first ``scale``.
            RanksError: The states of ranks under DistributedDataParallel, which are compared every
                100 updates, were different. The iteration has ended all the same.
            SkippedStepsError: Too many steps were skipped, and ``on_skips`` is "raise". The
                iteration has ended all the same.
            TypeError: ``new_scale`` is neither a number nor a real tensor.
            ValueError: ``new_scale`` is a number out of range, has not exactly one element, or
                requires a gradient.

        Sync: none, as long as there is nothing to report; one with several ranks and ``on_skips``
        other than "warn".
        """
        if new_scale is None and name is not None:
            raise ValueError(f"update(name={name!r}): give the new scale of this loss too")
        if new_scale is not None:
            self._engine.set_scale(self._named(name), new_scale)
            return
        for scale in self._engine.update():
            reporting.sound(self._alarm, scale, self._engine.journal)

    # --- looking and setting ----------------------------------------------------------------------

    @keep_out_of_graphs
    def get_scale(self, name: str | None = None) -> float:
        """Return the scale (of the loss of this name), 1.0 if the scaler is disabled. Sync: one."""
        return self._named(name).value()

    def get_growth_factor(self) -> float:
        """Return the growth factor. Sync: none."""
        return self._rule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, >= 1, of all losses. Sync: none."""
        self._change_rule(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor. Sync: none."""
        return self._rule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, in (0, 1], of all losses. Sync: none."""
        self._change_rule(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval. Sync: none."""
        return self._rule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, >= 1, of all losses; a lower one may let the next step grow.

        Sync: none.
        """
        self._change_rule(growth_interval=new_interval)

    def is_enabled(self) -> bool:
        """Return whether this object scales anything. Sync: none."""
        return True

    def __repr__(self) -> str:
        """Return scale and rule. Sync: one."""
        return f"GradScaler(scale={self.get_scale():g}, rule={self._rule})"

    # --- saving and loading -----------------------------------------------------------------------

    @keep_out_of_graphs
    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last ``update``; ``{}`` if the scaler is disabled.

        The keys are those of ``torch.amp.GradScaler``, which can load it: ``scale``,
        ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``; and one
        more, ``halfstep``, with a version and what PyTorch does not know, as JSON text.

        When ``torch.distributed.checkpoint`` saves the scaler, which is ``Stateful``, it asks on
        all ranks, and those that step together compare their states.

        Raises:
            RanksError: In that case, if a scale or a counter is not the same on all of them.

        Sync: one for each loss name, and one for each optimizer with a norm limit.
        """
        engine = self._engine
        state = Saved(engine.scales.read(), engine.steps.norm_limits).to_dict()
        group = saving_group()
        if group is not None:
            engine.ranks.require_same("state_dict()", state, group)
        return state

    @keep_out_of_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class or ``torch.amp.GradScaler`` saved.

        An empty dict, the state of a disabled scaler, changes nothing and warns. On the device the
        values are replaced in place.

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
        self._engine.load(Saved.from_dict(state_dict, self._engine.scales.first))

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy keep; the copy creates its tensors on its first loss.

        Raises:
            CallOrderError: In the middle of an iteration.
        """
        stepped = [name(record.optimizer) for record in self._engine.iteration.records()]
        if stepped or self._engine.iteration.looks:
            raise CallOrderError(
                "a GradScaler cannot be pickled or copied between unscale_() or step() and "
                f"update(): do it after update(). Seen since the last one: {', '.join(stepped)}"
            )
        return self.__dict__ | {"_engine": self._engine.scales.first, "_saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a scaler with the state of another."""
        saved = state.pop("_saved")
        self.__dict__ |= state | {"_engine": Engine(state["_engine"], Ranks())}
        if saved:
            self.load_state_dict(saved)

    # --- the protocol for optimizers that handle the scale themselves -----------------------------

    def _step_with_scaler(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_norm: float | None,
    ) -> Any:
        """Call ``optimizer.step`` with ourselves as ``grad_scaler``, the older protocol.

        The optimizer calls ``unscale_``, ``_check_inf_per_device``, ``_found_inf_per_device`` and
        ``_get_scale_async``, or writes what it found into ``_per_optimizer_states``.
        """
        engine = self._engine
        record = engine.require_not_stepped(optimizer)
        if record.blocks is not None:
            raise CallOrderError(
                f"step({name(optimizer)}): it takes the scaler (grad_scaler=...) to unscale its "
                "gradients by itself, which accumulate() has already done. Call backward() without "
                "accumulate() for this optimizer"
            )
        if max_norm is not None:
            raise ValueError(
                f"step({name(optimizer)}, max_norm={max_norm}): it takes the scaler "
                "(grad_scaler=...) and unscales by itself; let it clip too"
            )
        params = list(parameters(optimizer))
        engine.scale_of_iteration("step", optimizer, params)
        engine.unused.use(params)
        engine.iteration.keep(record)
        try:
            result = optimizer.step(*args, **(kwargs | {"grad_scaler": self}))
            engine.finish_foreign(record)
        finally:
            if not record.looks:
                engine.iteration.drop(record)
        return result

    def _get_scale_async(self) -> Tensor | None:
        names = [*self._engine.iteration.losses]
        scale = self._engine.scales[names[0] if len(names) == 1 else None]
        return None if scale.on_device is None else scale.on_device.scale

    @keep_out_of_graphs
    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return self._engine.check(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return self._engine.iteration.record(optimizer).found_inf()

    # --- inside -----------------------------------------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str | None) -> None:
        # accelerate 1.15 calls it by this name, with self._device, to load an FSDP2 checkpoint.
        device = default_device() if dev is None else torch.device(dev)
        self._device = self._device or device.type
        self._engine.scales[None].create(device)

    def _named(self, name: str | None) -> LossScale:
        if name not in self._engine.scales:
            known = [key for key in self._engine.scales if key is not None]
            raise ValueError(f"no loss named {name!r} has been scaled; known names: {known}")
        return self._engine.scales[name]

    @property
    def _rule(self) -> Rule:
        return self._engine.scales.first.rule

    def _change_rule(self, **changes: float) -> None:
        if not isinstance(self._rule, Dynamic):
            raise ValueError(
                f"the rule {self._rule} has no {next(iter(changes))}: make the GradScaler with "
                "rule=Dynamic(...), or leave it out"
            )
        self._engine.scales.set_rule(replace(self._rule, **changes))  # type: ignore[arg-type]
