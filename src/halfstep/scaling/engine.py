"""What :class:`halfstep.GradScaler` does, without its face: losses, gradients, steps, updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import CallOrderError
from halfstep.scaling import scalars
from halfstep.scaling.gradients import passes
from halfstep.scaling.gradients.collecting import Gradients, collect, parameters, refuse_float16
from halfstep.scaling.optimizers import handles_scale, name, step_with_scale
from halfstep.scaling.outcomes.journal import Journal
from halfstep.scaling.outcomes.names import Names
from halfstep.scaling.outcomes.outcome import Findings, Outcome, StepGradients
from halfstep.scaling.saving import Saved
from halfstep.scaling.scale.loss_scale import LossScale
from halfstep.scaling.scale.losses import Multiplier
from halfstep.scaling.scale.rules import Rule
from halfstep.scaling.scale.state import ScaleState
from halfstep.scaling.steps import clipping, stepping
from halfstep.scaling.steps.early_clipping import EarlyClipping
from halfstep.scaling.steps.iteration import (
    Blocks,
    Iteration,
    Look,
    OptimizerRecord,
    Stage,
    nothing_checked,
    versions,
)
from halfstep.scaling.steps.outliers import NormLimits
from halfstep.scaling.steps.stepping import Preparation

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Engine:
    """Scales of all losses, and what has been done since the last ``update``.

    Args:
        first: The state that the scale of every loss starts from.
    """

    def __init__(self, first: ScaleState) -> None:
        self.first = first
        self.scales: dict[str | None, LossScale] = {None: LossScale(first)}
        self.iteration = Iteration()
        self.journal = Journal()
        self.names = Names()
        self.norm_limits = NormLimits()
        self.early_clipping = EarlyClipping()

    def set_rule(self, rule: Rule) -> None:
        """Move all scales by another rule. Sync: none."""
        self.first = replace(self.first, rule=rule)
        for scale in self.scales.values():
            scale.set_rule(rule)

    def save(self) -> Saved:
        """Return what a checkpoint holds. Sync: one for each loss."""
        states = {loss: scale.read() for loss, scale in self.scales.items()}
        return Saved(states, self.norm_limits)

    def load(self, saved: Saved) -> None:
        """Take over what a checkpoint held. Sync: none."""
        self.norm_limits = saved.norm_limits
        rule = saved.scales[None].rule
        self.first = replace(self.first, rule=rule, hysteresis_left=rule.hysteresis)
        for loss in self.scales.keys() - saved.scales.keys():
            del self.scales[loss]
        for loss, state in saved.scales.items():
            self.scales.setdefault(loss, LossScale(state)).load(state)

    # --- losses -----------------------------------------------------------------------------------

    def scale(self, outputs: Any, loss: str | None) -> Any:
        """Multiply all tensors in ``outputs`` by the scale of a loss. Sync: none."""
        scale = self.scales.get(loss) or LossScale(self.first)
        scaled = Multiplier(scale.see_loss)(outputs)
        self.scales[loss] = scale
        self.iteration.count_loss(loss)
        return scaled

    def device_type(self) -> str | None:
        """Return the type of the device that the first loss came from, None before it."""
        for scale in self.scales.values():
            if scale.on_device is not None:
                return scale.on_device.device.type
        return None

    def scale_of_iteration(self, method: str, optimizer: object, params: list[Tensor]) -> LossScale:
        """Return the scale of the losses since the last ``update``.

        With losses of several names it is that of ``params``, if all have been unscaled already.

        Raises:
            CallOrderError: No loss has been scaled yet, or losses of several names have.
        """
        losses = list(self.iteration.losses) or [None]
        if len(losses) > 1:
            known = self._known_scale(params)
            if known is not None:
                return known
            raise CallOrderError(
                f"{method}({name(optimizer)}): losses of several names have been scaled since the "
                f"last update(), {losses}, so that these gradients have no one scale. Run the "
                "backward() of each name in a block of its own: "
                "with scaler.accumulate(optimizer): scaler.scale(loss, name=...).backward(). This "
                "iteration can only be given up: update(new_scale=scaler.get_scale())"
            )
        scale = self.scales[losses[0]]
        if scale.on_device is None:
            raise CallOrderError(
                f"{method}({name(optimizer)}) before scale(): no loss has been scaled by this "
                "GradScaler yet. Call scaler.scale(loss).backward() first"
            )
        return scale

    def _known_scale(self, params: list[Tensor]) -> LossScale | None:
        """Return what the gradients have been divided by (one scale of several), else None."""
        in_blocks = {
            id(param): record.blocks.scale
            for record in self.iteration.records()
            if record.blocks is not None
            for param in parameters(record.optimizer)
        }
        known = [
            in_blocks.get(id(param)) or self.iteration.scale_of(param.grad)
            for param in params
            if param.grad is not None
        ]
        return known[0] if known and all(known) else None

    # --- gradients --------------------------------------------------------------------------------

    def gather(self, method: str, record: OptimizerRecord) -> Preparation:
        """Find the gradients of an optimizer for ``unscale_``, ``clip_grad_norm_`` or ``step``."""
        params = list(parameters(record.optimizer))
        if record.looks:
            scale = record.looks[0].scale
        else:
            scale = self.scale_of_iteration(method, record.optimizer, params)
        self._end_blocks(params)
        refuse = partial(self.refuse_float16, optimizer=record.optimizer)
        return stepping.gather(params, self.iteration, record, scale, refuse)

    def _end_blocks(self, params: list[Tensor]) -> None:
        """Put the blocks of ``accumulate`` together whose gradients are those of ``params``."""
        with_blocks = [r for r in self.iteration.records() if r.blocks is not None]
        wanted = set(map(id, params)) if with_blocks else set()
        for record in with_blocks:
            # A wrapper accumulates, and what it wraps steps; or somebody clips all parameters.
            if record.blocks and not wanted.isdisjoint(map(id, parameters(record.optimizer))):
                self._require_no_backward_after(record, record.blocks)
                self._put_together(record, record.blocks)

    def _require_no_backward_after(self, record: OptimizerRecord, blocks: Blocks) -> None:
        has_new_loss = self.iteration.num_losses != blocks.num_losses
        if has_new_loss and versions(record.optimizer) != blocks.versions:
            raise CallOrderError(
                f"accumulate({name(record.optimizer)}): a loss was scaled and backward() called "
                "after the last block, which adds scaled gradients to unscaled ones. Put every "
                "backward() of the iteration into a block; zero_grad() and update(new_scale=...) "
                "end this one"
            )

    def _put_together(self, record: OptimizerRecord, blocks: Blocks) -> None:
        """Make the sum over the good blocks an average over as many as there were."""
        assert blocks.scale is not None
        device = blocks.scale.tensor.device
        is_lost = blocks.bad == blocks.count
        gradients = collect(parameters(record.optimizer))
        if blocks.bad and not is_lost and not blocks.has_several_losses:
            factor = blocks.count / (blocks.count - blocks.bad)
            passes.multiply_(gradients, torch.tensor(factor, device=device))
        if is_lost and not blocks.overflowed:
            blocks.scale.see_loss(torch.full((), torch.inf, device=device))
        if is_lost or not gradients.grads:
            found_inf = torch.full((), float(is_lost), device=device)
        else:  # each block was finite, and their sum may not be
            found_inf = scalars.is_nonfinite(passes.measure(gradients, None).total(device))
        look = Look(blocks.scale, gradients, {device: found_inf})
        self.iteration.add(look)
        record.looks, record.blocks = [look], None

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale. Sync: none."""
        record = self.iteration.record(optimizer)
        if record.stage is not Stage.SCALED:
            raise CallOrderError(
                f"unscale_({name(optimizer)}): {record.stage.value} since the last update(). Call "
                "unscale_() at most once an iteration, after the last backward() and before "
                "step(); call update() at the end of the iteration"
            )
        ready = self.gather("unscale_", record)
        self.refuse_float16(ready, optimizer)
        stepping.unscale_(ready)
        self.keep(ready, record, Stage.UNSCALED)

    def clip_grad_norm_(
        self,
        target: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float,
        per: clipping.Per,
    ) -> Tensor:
        """Divide gradients by the scale and clip them. Sync: none."""
        optimizer, params = clipping.target(target)
        record = None if optimizer is None else self.iteration.record(optimizer)
        if record is not None and record.stage is Stage.STEPPED:
            raise CallOrderError(
                f"clip_grad_norm_({name(optimizer)}): {record.stage.value} since the last "
                "update(). Clip before step()"
            )
        if record is not None:
            ready = self.gather("clip_grad_norm_", record)
        else:
            scale = self.scale_of_iteration("clip_grad_norm_", target, params)
            self._end_blocks(params)
            refuse = partial(self.refuse_float16, optimizer=None)
            ready = stepping.gather(params, self.iteration, None, scale, refuse)
        self.refuse_float16(ready, optimizer)
        norm = clipping.clip_(
            ready,
            max_norm,
            norm_type,
            per,
            lambda: self.names.layers_of(ready.gradients.params, optimizer),
        )
        if record is not None:
            self.keep(ready, record, Stage.UNSCALED)
        elif ready.look is not None:
            self.iteration.add(ready.look)
        return norm

    def refuse_float16(self, ready: Preparation, optimizer: torch.optim.Optimizer | None) -> None:
        """Raise if float16 gradients would have to be unscaled in place."""
        if ready.scale is not None:
            owner = "the list of parameters" if optimizer is None else name(optimizer)
            refuse_float16(
                ready.gradients, owner, lambda: self.names.of(ready.gradients.params, optimizer)
            )

    def keep(self, ready: Preparation, record: OptimizerRecord, stage: Stage) -> None:
        """Remember what was found and done; without any gradient there is nothing to remember."""
        looks = list(ready.looks)
        if ready.look is not None:
            self.iteration.add(ready.look)
            looks.append(ready.look)
        if looks:
            record.looks, record.stage, record.outlier = looks, stage, ready.outlier
            self.iteration.keep(record)

    # --- steps ------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        args: Args,
        kwargs: Kwargs,
        max_norm: float | None,
    ) -> Any:
        """Step if all gradients are finite and, unscaled, still are.

        Sync: one; none for an optimizer that handles the scale itself.
        """
        record = self.require_not_stepped(optimizer)
        if record.stage is Stage.SCALED and all(p.grad is None for p in parameters(optimizer)):
            raise nothing_checked(optimizer)
        ready = self.gather("step", record)
        run = self._step_fused if handles_scale(optimizer) else self._step_plain
        return run(record, ready, args, kwargs, max_norm)

    def require_not_stepped(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """Return the record of an optimizer that may step now.

        Raises:
            CallOrderError: It has stepped since the last ``update``.
        """
        record = self.iteration.record(optimizer)
        if record.stage is Stage.STEPPED:
            raise CallOrderError(
                f"step({name(optimizer)}): {record.stage.value} since the last update(). Call "
                "update() once at the end of each iteration, after step() of every optimizer"
            )
        return record

    def _step_fused(
        self,
        record: OptimizerRecord,
        ready: Preparation,
        args: Args,
        kwargs: Kwargs,
        max_norm: float | None,
    ) -> Any:
        optimizer = record.optimizer
        norm_limit = self.norm_limits.of(optimizer)
        # Elsewhere looking would be a sync.
        is_looking = ready.is_on_cpu and self._is_looking(optimizer, ready)
        if is_looking or max_norm is not None or norm_limit is not None:
            stepping.measure(ready)
            stepping.limit(ready, max_norm, norm_limit)
        else:
            stepping.check(ready)
        skip = _require_found(ready, optimizer)
        if is_looking:
            self._read(skip, optimizer, ready)
        result = step_with_scale(
            optimizer, ready.grad_scale(), _or(skip, ready.outlier), args, kwargs
        )
        self.finish(record, ready, skip)
        return result

    def _step_plain(
        self,
        record: OptimizerRecord,
        ready: Preparation,
        args: Args,
        kwargs: Kwargs,
        max_norm: float | None,
    ) -> Any:
        optimizer = record.optimizer
        self.refuse_float16(ready, optimizer)
        norm_limit = self.norm_limits.of(optimizer)
        is_looking = self._is_looking(optimizer, ready)
        undo = None
        # Dividing by a scale below 1 may make inf of a gradient that a skipped step has to leave.
        can_amplify = ready.scale is not None and ready.loss_scale.can_amplify
        if is_looking or can_amplify or max_norm is not None or norm_limit is not None:
            stepping.measure(ready)
            stepping.limit(ready, max_norm, norm_limit)
        else:
            undo = ready.scale
            stepping.unscale_(ready)
        skip = _require_found(ready, optimizer)
        if self._read(_or(skip, ready.outlier), optimizer if is_looking else None, ready):
            _restore(ready, undo)
            result = None
        else:
            factor = ready.factor()
            undo = undo if factor is None else scalars.reciprocal(factor)
            stepping.multiply_(ready)
            try:
                # Through the instance: accelerate replaces `step` there to see whether it was
                # called.
                result = optimizer.step(*args, **kwargs)
            except BaseException:
                _restore(ready, undo)
                raise
        self.finish(record, ready, skip)
        return result

    def _is_looking(self, optimizer: torch.optim.Optimizer, ready: Preparation) -> bool:
        return (
            ready.scale is not None
            and not torch.compiler.is_compiling()
            and self.early_clipping.is_looking(optimizer)
        )

    def _read(
        self, skip: Tensor, first_steps_of: torch.optim.Optimizer | None, ready: Preparation
    ) -> bool:
        """Return whether to skip. Sync: the one of a plain step."""
        if first_steps_of is None or ready.norm is None or ready.scale is None:
            return bool(skip.item())
        values = torch.stack([skip, ready.norm.to(skip) * ready.scale, ready.scale]).tolist()
        if not values[0]:
            self.early_clipping.see(first_steps_of, values[1], values[2])
        return bool(values[0])

    def finish(self, record: OptimizerRecord, ready: Preparation, found_inf: Tensor) -> None:
        """Remember the step and its outcome."""
        scale = ready.scale
        if ready.look is not None and scale is not None:
            is_skipped = _or(found_inf, ready.outlier)
            ready.look.left_scaled = is_skipped, scale
            if ready.norms is None:
                scale = torch.where(is_skipped > 0, scale, 1.0)
        self.keep(ready, record, Stage.STEPPED)
        before = ready.loss_scale.snapshot()
        findings = Findings(before, found_inf, ready.outlier, ready.norm)
        gradients = StepGradients(ready.gradients, ready.norms, scale)
        outcome = Outcome(record.optimizer, self.names, ready.loss_scale, findings, gradients)
        self.journal.add(record.optimizer, outcome)

    def check(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Look for inf and NaN and change nothing, for an optimizer that unscales by itself."""
        record = self.iteration.record(optimizer)
        gradients = collect(parameters(optimizer))
        if not gradients.grads:
            return {}
        scale = self.scale_of_iteration("step", optimizer, gradients.params)
        found_inf = passes.multiply_(gradients, torch.ones_like(scale.tensor))
        look = Look(scale, Gradients([], [], []), found_inf)
        self.iteration.looks.append(look)
        record.looks = [look]
        self.iteration.keep(record)
        return found_inf

    def finish_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the step of an optimizer that was given the scaler."""
        record = self.iteration.record(optimizer)
        if not record.looks:
            raise nothing_checked(optimizer)
        scale = record.looks[0].scale
        ready = Preparation(collect(parameters(optimizer)), scale, None, record.looks)
        self.finish(record, ready, _require_found(ready, optimizer))

    # --- the end of an iteration ------------------------------------------------------------------

    def update(self) -> list[LossScale]:
        """Let every scale that was used back off, count or grow; return them. Sync: none."""
        if not self.iteration.looks:
            raise CallOrderError(
                "update(): no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) for at least one optimizer first, or give a scale: "
                "update(new_scale=65536.0)"
            )
        looks_of: dict[LossScale, list[Look]] = defaultdict(list)
        outliers_of: dict[LossScale, list[Tensor]] = defaultdict(list)
        for look in self.iteration.looks:
            looks_of[look.scale].append(look)
        for record in self.iteration.records():
            if record.outlier is not None:
                outliers_of[record.looks[0].scale].append(record.outlier)
        for scale, looks in looks_of.items():
            scale.update(
                [scalar for look in looks for scalar in look.found_inf.values()],
                outliers_of[scale],
                [look.amax for look in looks if look.amax is not None],
            )
        self.end_iteration()
        return list(looks_of)

    def end_iteration(self) -> None:
        """Forget what was done to gradients."""
        self.iteration = Iteration()
        self.journal.end()


def _require_found(ready: Preparation, optimizer: torch.optim.Optimizer) -> Tensor:
    found_inf = ready.found_inf()
    if found_inf is None:
        raise nothing_checked(optimizer)
    return found_inf


def _or(found_inf: Tensor, outlier: Tensor | None) -> Tensor:
    return found_inf if outlier is None else torch.maximum(found_inf, outlier)


def _restore(ready: Preparation, undo: Tensor | None) -> None:
    """Leave the gradients as they were when ``step`` was called."""
    if undo is not None:
        passes.multiply_(ready.gradients, undo)
        ready.scale = undo
