"""What :class:`halfstep.GradScaler` does, without its face: losses, gradients, steps, updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep._scaler import clipping, passes, stepping
from halfstep._scaler.blocks import end_blocks
from halfstep._scaler.gradients import Gradients, collect, parameters
from halfstep._scaler.iteration import (
    Iteration,
    Look,
    OptimizerRecord,
    Stage,
    nothing_checked,
)
from halfstep._scaler.journal import Journal
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.names import Names
from halfstep._scaler.observers import OBSERVERS
from halfstep._scaler.optimizers import handles_scale, name, writes_unscaled
from halfstep._scaler.outcome import Findings, Outcome, StepGradients
from halfstep._scaler.ranks.deciding import ALONE, Alone, Together
from halfstep._scaler.ranks.finding import Ranks
from halfstep._scaler.saving import Saved
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.scales import Scales
from halfstep._scaler.stepping import Preparation, refuse_float16
from halfstep._scaler.taking import Args, Kwargs, Steps, require_found
from halfstep._scaler.unused import Unused, Waiting
from halfstep.errors import CallOrderError, NothingCheckedError, RanksError


class Engine:
    """Scales of all losses, and what has been done since the last ``update``.

    Args:
        first: The state that the scale of every loss starts from.
        ranks: Finds out with which other ranks the steps are decided.
    """

    def __init__(self, first: ScaleState, ranks: Ranks) -> None:
        self.ranks = ranks
        self.scales = Scales(first)
        self.iteration = Iteration()
        self.journal = Journal()
        self.names = Names()
        self.steps = Steps(self.names)
        self.unused = Unused(self.journal)

    # --- losses -----------------------------------------------------------------------------------

    def scale(self, outputs: Any, loss: str | None) -> Any:
        """Multiply all tensors in ``outputs`` by the scale of a loss. Sync: none."""
        if self.iteration.looks:
            self.iteration.watch()
        if OBSERVERS and not torch.compiler.is_compiling():
            for observer in OBSERVERS:
                observer.on_loss(self, outputs)
        scaled = self.scales.multiply(outputs, loss)
        if torch.compiler.is_compiling():
            self.unused.has_compiled_losses = True
        else:
            if self.unused.is_searching:
                self.unused.search(scaled)
            if self.unused.waiting:
                self.unused.note_loss(scaled, self.scales[loss])
        self.iteration.count_loss(loss)
        return scaled

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
        scale = self.scales.get(losses[0])
        if scale is None or scale.on_device is None:
            raise CallOrderError(
                f"{method}({name(optimizer)}) before scale(): no loss has been scaled by this "
                "GradScaler yet. Call scaler.scale(loss).backward() first"
            )
        return scale

    def _known_scale(self, params: list[Tensor]) -> LossScale | None:
        """Return what the gradients have been divided by (one scale of several), else None."""
        in_blocks = self.iteration.scales_of_blocks()
        known = [
            in_blocks.get(id(param)) or self.iteration.scale_of(param)
            for param in params
            if param.grad is not None
        ]
        return known[0] if known and all(known) else None

    # --- gradients --------------------------------------------------------------------------------

    def gather(self, method: str, record: OptimizerRecord) -> Preparation:
        """Find the gradients of an optimizer for ``unscale_``, ``clip_grad_norm_`` or ``step``."""
        return self._gather(method, record.optimizer, list(parameters(record.optimizer)), record)

    def _gather(
        self, method: str, owner: object, params: list[Tensor], record: OptimizerRecord | None
    ) -> Preparation:
        optimizer = None if record is None else record.optimizer
        self.unused.use(params)
        ranks = self.ranks_of(method, owner, params)
        if record is not None and record.looks:
            scale = record.looks[0].scale
        else:
            scale = self.scale_of_iteration(method, owner, params)
        end_blocks(self.iteration, params, ranks)
        refuse = partial(refuse_float16, optimizer=optimizer, names=self.names)
        return stepping.gather(method, params, self.iteration, record, scale, ranks, refuse)

    def ranks_of(self, method: str, owner: object, params: list[Tensor]) -> Alone | Together:
        """Return who decides what becomes of gradients: this rank or several.

        Where several do, one that has no loss has a scale all the same.
        """
        has_scale = any(scale.on_device is not None for scale in self.scales.values())
        call = f"{method}({name(owner)})"
        ranks = self.ranks.of(call, params, list(self.iteration.losses), has_scale)
        if isinstance(ranks, Together) and not has_scale:
            self.scales[None].create(ranks.group.device)
        return ranks

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
        refuse_float16(ready, optimizer, self.names)
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
        ready = self._gather("clip_grad_norm_", target, params, record)
        refuse_float16(ready, optimizer, self.names)
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

    def keep(self, ready: Preparation, record: OptimizerRecord, stage: Stage) -> None:
        """Remember what was found and done; without any gradient there is nothing to remember."""
        looks = list(ready.looks)
        if ready.look is not None:
            self.iteration.add(ready.look)
            looks.append(ready.look)
        if looks:
            record.looks, record.stage, record.outlier = looks, stage, ready.outlier
            record.num_losses = self.iteration.num_losses
            record.norms, record.norm = ready.norms, ready.norm
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
            params = list(parameters(optimizer))
            if not self.ranks_of("step", optimizer, params).is_together:
                raise nothing_checked(optimizer)
        ready = self.gather("step", record)
        try:
            result, found_inf = self.steps.take(optimizer, ready, args, kwargs, max_norm)
        except BaseException as error:
            if ready.ranks.is_together and isinstance(error, RanksError | CallOrderError):
                self.end_iteration()  # it is raised on all ranks, and they can go on
            else:
                self._note_failure(record, ready)
            raise
        self.finish(record, ready, found_inf)
        return result

    def _note_failure(self, record: OptimizerRecord, ready: Preparation) -> None:
        """Remember what a step that raised has left of the gradients."""
        if ready.scale is None:
            self.keep(ready, record, Stage.UNSCALED)
        elif ready.look is not None and not stepping.is_untouched(ready):
            self.iteration.doubt(ready.gradients)

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

    def finish(self, record: OptimizerRecord, ready: Preparation, found_inf: Tensor) -> None:
        """Remember the step and its outcome."""
        scale = ready.scale
        if ready.look is not None and scale is not None:
            is_skipped = ready.skip(found_inf)
            ready.look.left_scaled = is_skipped, scale
            if ready.norms is None:
                scale = torch.where(is_skipped > 0, scale, 1.0)
        self.keep(ready, record, Stage.STEPPED)
        ready.loss_scale.forget_later_losses()
        before = ready.loss_scale.snapshot()
        findings = Findings(before, found_inf, ready.outlier, ready.norm, ready.agreements())
        gradients = StepGradients(ready.gradients, ready.norms, scale)
        outcome = Outcome(
            record.optimizer,
            self.names,
            ready.loss_scale,
            findings,
            gradients,
            can_measure_late=_can_measure_late(record.optimizer, ready.gradients),
        )
        self.journal.add(record.optimizer, outcome)

    def check(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Look for inf and NaN and change nothing, for an optimizer that unscales by itself."""
        record = self.iteration.record(optimizer)
        gradients = collect(parameters(optimizer))
        ranks = self.ranks_of("step", optimizer, list(parameters(optimizer)))
        if not (gradients.grads or ranks.is_together):
            return {}
        scale = self.scale_of_iteration("step", optimizer, gradients.params)
        found_inf = passes.multiply_(gradients, torch.ones_like(scale.tensor))
        look = Look(scale, gradients, found_inf)
        ranks.agree_on(look, has_gradients=bool(gradients.grads))
        look.gradients = Gradients([], [], [])
        self.iteration.add(look)
        record.looks = [look]
        self.iteration.keep(record)
        return look.found_inf

    def report(self, record: OptimizerRecord, found: Mapping[torch.device, Tensor]) -> None:
        """Take what an optimizer has found that unscales by itself: for each device 1 or 0."""
        optimizer = record.optimizer
        scale = self.scale_of_iteration("step", optimizer, list(parameters(optimizer)))
        found = {device: flag.detach().reshape(()).float() for device, flag in found.items()}
        look = Look(scale, Gradients([], [], []), found)
        self.iteration.add(look)
        record.looks = [look]

    def finish_foreign(self, record: OptimizerRecord) -> None:
        """Remember the step of an optimizer that was given the scaler."""
        optimizer = record.optimizer
        if not record.looks and any(param.grad is not None for param in parameters(optimizer)):
            raise CallOrderError(
                f"step({name(optimizer)}): its step() takes the scaler (grad_scaler=...) and did "
                "not use it: nobody has looked for inf and NaN, and if it has changed parameters, "
                "it has done so with gradients that are multiplied by the scale.\n"
                "Cure: leave _step_supports_amp_scaling out of the optimizer, and the scaler "
                "unscales and checks; or call grad_scaler.unscale_(self) in its step(), and skip "
                "if one of grad_scaler._found_inf_per_device(self).values() is 1."
            )
        if not record.looks:
            raise nothing_checked(optimizer)
        scale = record.looks[0].scale
        ready = Preparation(collect(parameters(optimizer)), scale, None, record.looks, ALONE)
        self.finish(record, ready, require_found(ready, optimizer))

    # --- the end of an iteration ------------------------------------------------------------------

    def update(self) -> list[LossScale]:
        """Let every scale that was used back off, count or grow; return them. Sync: none."""
        if not self.iteration.looks:
            raise NothingCheckedError(
                "update(): no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) for at least one optimizer first, or give a scale: "
                "update(new_scale=65536.0). (torch.amp says: No inf checks were recorded prior to "
                "update.)"
            )
        looks_of: dict[LossScale, list[Look]] = defaultdict(list)
        outliers_of: dict[LossScale, list[Tensor]] = defaultdict(list)
        for look in self.iteration.looks:
            looks_of[look.scale].append(look)
        records = self.iteration.records()
        waiting = self.unused.before_change(self.iteration, records, self.scales)
        for record in records:
            if record.outlier is not None:
                outliers_of[record.looks[0].scale].append(record.outlier)
        for scale, looks in looks_of.items():
            scale.update(
                [scalar for look in looks for scalar in look.found_inf.values()],
                outliers_of[scale],
                [look.amax for look in looks if look.amax is not None],
            )
        self.unused.wait(waiting)
        self.end_iteration()
        self.ranks.count_update(self.scales)
        return list(looks_of)

    def set_scale(
        self, scale: LossScale, new_scale: object, *, iteration_ends: bool = True
    ) -> None:
        """Set a scale by hand, which ends the iteration if not told otherwise. Sync: none."""
        waiting = self._before_change()
        scale.set(new_scale)
        self.unused.wait(waiting, iteration_ends=iteration_ends)
        if iteration_ends:
            self.end_iteration()

    def load(self, saved: Saved) -> None:
        """Take over what was saved; the iteration goes on. Sync: none."""
        waiting = self._before_change()
        self.scales.load(saved.scales)
        self.steps.norm_limits = saved.norm_limits
        self.unused.wait(waiting, iteration_ends=False)

    def _before_change(self) -> dict[int, Waiting]:
        records = self.iteration.records()
        return self.unused.before_change(self.iteration, records, self.scales)

    def end_iteration(self) -> None:
        """Forget what was done to gradients."""
        self.iteration.end()
        self.iteration = Iteration()
        self.scales.forget_bad_losses()
        outcomes = self.journal.end()
        for observer in OBSERVERS:
            observer.on_iteration(self, outcomes)


def _can_measure_late(optimizer: torch.optim.Optimizer, gradients: Gradients) -> bool:
    """Say whether the gradients of a step that was taken are, unscaled, what they were."""
    if not handles_scale(optimizer):
        return True
    # What is small may be zero in float16 when it is unscaled.
    return writes_unscaled(optimizer) and torch.float16 not in gradients.dtypes()
