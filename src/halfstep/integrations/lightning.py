"""Lightning: a precision plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep import GradScaler, Policy, autocast
from halfstep._autocast import settled_policy
from halfstep._scaler import DueSchedules
from halfstep._scaler.access import is_unscaled
from halfstep.errors import CallOrderError
from halfstep.integrations import needs

with needs("lightning"):
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.utilities.model_helpers import is_overridden

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class HalfstepPrecision(MixedPrecision):
    """A precision plugin of a Trainer with halfstep's autocast and, for float16, its GradScaler.

    ``gradient_clip_val`` clips in the pass that checks the gradients, with fused optimizers too.
    LBFGS works. A learning rate schedule that advances with each step does not advance if the step
    was skipped. Hooks that see gradients before the step see them unscaled.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        policy: A policy for autocast, or its text; rules for modules refer to names in the
            LightningModule. By default that of :class:`halfstep.use_policy` around ``fit``, else
            ``"standard"``.
        scaler: The scaler for float16; by default a new one. Its state is saved in Lightning's
            checkpoints. This plugin and Lightning's own can load each other's checkpoints.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The precision or the policy is invalid, or a scaler is given for bfloat16.

    Sync: as :meth:`halfstep.GradScaler.step`; one more in a step of a fused optimizer that a
    schedule follows.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> plugin = HalfstepPrecision("16-mixed", policy="standard; softmax:lower")
        >>> trainer = Trainer(accelerator="cpu", plugins=[plugin], logger=False)
        >>> trainer.precision_plugin.scaler.get_scale()
        65536.0
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed",
        *,
        policy: Policy | str | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        if precision not in DTYPES:
            raise ValueError(
                f"HalfstepPrecision({precision!r}): pass '16-mixed' or 'bf16-mixed'; "
                "halfstep.master_weights is for models in 16 bits ('bf16-true')"
            )
        if not (scaler is None or isinstance(scaler, GradScaler)):
            raise TypeError(f"HalfstepPrecision(scaler={scaler!r}): pass a halfstep.GradScaler")
        if precision == "bf16-mixed" and scaler is not None:
            raise ValueError(
                "HalfstepPrecision('bf16-mixed', scaler=...): bfloat16 needs no scale. To skip "
                "steps that are not finite: halfstep.guard(optimizer) in configure_optimizers"
            )
        if precision == "16-mixed" and scaler is None:
            scaler = GradScaler()
        # Not super().__init__(), which would create PyTorch's scaler.
        self.precision = precision
        self.scaler = scaler
        self._policy = policy if policy is None else settled_policy(policy)
        self._module: LightningModule | None = None
        self._contexts: dict[tuple[str, bool], autocast] = {}
        self._changes: RemovableHandle | None = None
        self._due: DueSchedules | None = None
        self._max_norm: float | None = None
        self._clips_in_step = False

    def connect(
        self, model: Any, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Any, list[Optimizer], list[Any]]:
        """Prepare the module for training."""
        module = self._module = model if isinstance(model, LightningModule) else model.module
        self._contexts.clear()
        if self._changes is None:  # a newly registered submodule may have a rule
            self._changes = register_module_module_registration_hook(self._forget_contexts)
        if self.scaler is not None:
            self.scaler.watch(module)
            self._due = DueSchedules()
            module.lr_scheduler_step = _AfterSteps(self._due, module)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Undo the changes to the module."""
        if self._module is not None:
            # Keep the module: a model summary after the training runs it under autocast.
            vars(self._module).pop("lr_scheduler_step", None)
        self._due = None
        if self._changes is not None:
            self._changes.remove()
            self._changes = None
        self._contexts.clear()
        super().teardown()

    def autocast_context_manager(self) -> autocast:
        """Return the autocast of a step."""
        if self._module is None:
            raise CallOrderError(
                "HalfstepPrecision does not know its module yet: call this in or after a fit"
            )
        device = self._module.device.type
        key = device, torch.is_autocast_cache_enabled()
        if key not in self._contexts:  # cached, since rules for modules walk the model
            self._contexts[key] = autocast(
                device,
                DTYPES[self.precision],
                policy=self._policy,
                module=self._module if self._policy and self._policy.module_rules else None,
            )
        return self._contexts[key]

    def _forget_contexts(self, *_: object) -> None:
        self._contexts.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A copy made during training must be connected to its own module.
        return vars(self) | {"_contexts": {}, "_changes": None, "_due": None}

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Evaluate the closure, call the hooks, and step if the gradients are finite."""
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        is_line_search = isinstance(optimizer, LBFGS)
        if is_line_search and model.trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "LBFGS evaluates its closure several times in a step, each time without the "
                "gradients of earlier batches: Trainer(accumulate_grad_batches=1)"
            )
        assert self._due is not None
        self._max_norm = None
        are_seen = is_line_search or _are_gradients_seen(model)

        def evaluate() -> Any:
            loss = closure()
            # training_step returned None, or StochasticWeightAveraging only measures batch norm.
            is_forward_only = loss is None or model.trainer.fit_loop._skip_backward
            if is_forward_only and model.automatic_optimization:
                return None
            if are_seen:
                _unscale(scaler, optimizer)
            self._clips_in_step = not are_seen
            try:
                self._after_closure(model, optimizer)
            finally:
                self._clips_in_step = False
            return loss

        if is_line_search:
            result = scaler.step(optimizer, evaluate, **kwargs)
        else:
            if evaluate() is None and model.automatic_optimization:
                self._due.note(optimizer, False)
                return None
            result = scaler.step(optimizer, max_norm=self._max_norm, **kwargs)
        self._due.note(optimizer, scaler.outcome(optimizer))
        scaler.update()
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Clip unscaled gradients, now or in the step."""
        if isinstance(optimizer, LightningOptimizer):  # called in manual optimization
            optimizer = optimizer.optimizer
        if self.scaler is None or clip_val <= 0:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "norm" and self._clips_in_step:
            self._max_norm = clip_val
        else:
            _unscale(self.scaler, optimizer)
            by_value = gradient_clip_algorithm == "value"
            (self.clip_grad_by_value if by_value else self.clip_grad_by_norm)(optimizer, clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scaler's state for Lightning's own plugin too."""
        if self.scaler is not None:
            checkpoint[MixedPrecision.__qualname__] = checkpoint[type(self).__qualname__]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scaler's state that Lightning's own plugin saved."""
        state = checkpoint.get(MixedPrecision.__qualname__)
        if state:
            self.load_state_dict(state)


def _unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Unscale the gradients of an optimizer, unless already done in this iteration."""
    if not is_unscaled(scaler, optimizer):
        scaler.unscale_(optimizer)


def _are_gradients_seen(model: LightningModule) -> bool:
    """Return whether user code may see the gradients between backward and step."""
    return (
        is_overridden("configure_gradient_clipping", model)
        or is_overridden("on_before_optimizer_step", model)
        or any(
            is_overridden("on_before_optimizer_step", callback)
            for callback in model.trainer.callbacks
        )
    )


class _AfterSteps:
    """A replacement of a module's ``lr_scheduler_step`` that takes skipped steps into account.

    A schedule with the interval ``"step"`` does not advance if all steps since its last move were
    skipped. A copy of the module, by ``copy.deepcopy`` or pickle, has the module's own method.
    """

    def __init__(self, due: DueSchedules, module: LightningModule) -> None:
        self._due, self._module = due, module
        self.__wrapped__ = module.lr_scheduler_step  # Lightning checks for overrides

    def __call__(self, scheduler: Any, metric: Any) -> None:
        configs = self._module.trainer.lr_scheduler_configs
        intervals = [config.interval for config in configs if config.scheduler is scheduler]
        if "step" not in intervals or self._due.try_move(scheduler):
            self.__wrapped__(scheduler, metric)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module does not have its attributes yet: this is the method of its class.
        return getattr, (self._module, "lr_scheduler_step")
