"""fastai: a callback for mixed precision, with halfstep's autocast and scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from halfstep import GradScaler, Outcome, Policy, autocast
from halfstep.integrations import needs

with needs("fastai"):
    from fastai.callback.core import Callback, CancelStepException
    from fastai.callback.fp16 import MixedPrecision as _Theirs
    from fastai.torch_core import to_float


class MixedPrecision(Callback):
    """A callback of a ``Learner`` for mixed precision, with halfstep's autocast and scaler.

    It replaces ``fastai.callback.fp16.MixedPrecision`` at the same position among the callbacks, so
    that ``GradientAccumulation`` and ``GradientClip`` work with it. The model and the loss run
    under autocast. A bad step is skipped by cancelling it in fastai: ``after_cancel_step`` runs
    instead of the step. All devices of halfstep's autocast are supported, including the CPU. The
    scaler lives as long as the callback: a second ``fit`` continues with its scale.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        policy: The policy for autocast, or its text; rules for modules refer to the Learner's
            model.
        scaler: The scaler; by default a ``GradScaler()``, disabled for bfloat16.
        max_norm: The norm to clip the gradients to, in the same pass that unscales them;
            ``math.inf`` only measures the norm. ``GradientClip`` clips in separate passes.

    Raises:
        ValueError: At ``fit``: the policy, or the dtype on this device, is not possible.

    Sync: one for each step with a scaler.

    Example:
        >>> callback = MixedPrecision(torch.bfloat16, policy="standard; softmax:lower")
        >>> callback.scaler.is_enabled()
        False
        >>> MixedPrecision().scaler.is_enabled()
        True
    """

    order = _Theirs.order  # keeps its position among fastai's callbacks

    def __init__(
        self,
        dtype: torch.dtype = torch.float16,
        *,
        policy: Policy | str | None = None,
        scaler: GradScaler | None = None,
        max_norm: float | None = None,
    ) -> None:
        super().__init__()
        if scaler is None:
            scaler = GradScaler(enabled=dtype == torch.float16)
        self.dtype, self.policy, self.scaler, self.max_norm = dtype, policy, scaler, max_norm
        self._optimizer = LearnerOptimizer(self)
        self._autocast: AbstractContextManager[object] = nullcontext()  # for Learner.export
        self._is_inside = self._has_stepped = False
        self._state: dict[str, Any] = {}  # the scaler's state before a learning rate search

    @property
    def outcome(self) -> Outcome:
        """The outcome of the last step. Sync: none; reading the outcome waits."""
        return self.scaler.outcome(self._optimizer)  # type: ignore[arg-type]

    def before_fit(self) -> None:
        """Create the autocast for the device of the model."""
        self.leave()
        self._state = self.scaler.state_dict() if hasattr(self.learn, "lr_finder") else {}
        device = next(self.model.parameters()).device.type
        self._autocast = autocast(device, self.dtype, policy=self.policy, module=self.model)
        self.scaler.watch(self.model)

    def before_batch(self) -> None:
        """Enter autocast."""
        self.leave()
        self._autocast.__enter__()
        self._is_inside = True

    def after_pred(self) -> None:
        """Cast the predictions to float32 for the loss."""
        self.learn.pred = to_float(self.pred)

    def leave(self) -> None:
        """Leave autocast, also after a batch or a fit was interrupted inside of it."""
        if self._is_inside:
            self._is_inside = False
            self._autocast.__exit__(None, None, None)

    after_loss = after_cancel_batch = leave

    def before_backward(self) -> None:
        """Scale the loss."""
        self.learn.loss_grad = self.scaler.scale(self.loss_grad)

    def before_step(self) -> None:
        """Unscale the gradients, and cancel the step if one of them is inf or NaN."""
        self._optimizer.is_taken = False
        self._has_stepped = True
        self.scaler.step(self._optimizer, max_norm=self.max_norm)  # type: ignore[arg-type]
        if not self._optimizer.is_taken:
            raise CancelStepException

    def after_step(self) -> None:
        """Update the scaler, unless another callback has cancelled the step earlier."""
        if self._has_stepped:
            self._has_stepped = False
            self.scaler.update()

    def after_fit(self) -> None:
        """Leave autocast; after a learning rate search, also restore the scaler."""
        self.leave()
        self._autocast = nullcontext()
        if self._state:
            self.scaler.load_state_dict(self._state)


class LearnerOptimizer:
    """The optimizer of a ``Learner`` for the scaler: its gradients, and a step that does nothing.

    The Learner steps itself, after all callbacks have seen the unscaled gradients.
    """

    def __init__(self, callback: MixedPrecision) -> None:
        self._callback = callback
        self.is_taken = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the Learner's optimizer."""
        groups: list[dict[str, Any]] = self._callback.learn.opt.param_groups
        return groups

    def step(self) -> None:
        """Record that the scaler takes the step."""
        self.is_taken = True
