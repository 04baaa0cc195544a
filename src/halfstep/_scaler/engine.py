"""The implementation behind the methods of a scaler."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.compiler import is_dynamo_compiling

from halfstep._common.nested import like, tensors_in
from halfstep._common.text import shown, warn
from halfstep._gradients.buffers import Buffers
from halfstep._gradients.optimizers import Names, name
from halfstep._gradients.scalars import READABLE
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.device_scale import DeviceScale
from halfstep._scaler.iteration import Check, Iteration, Step
from halfstep._scaler.journal import OBSERVERS, Journal, Plan
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.ranks import Alone, Ranks, Together
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.unused import UnusedGradients
from halfstep.errors import CallOrderError, NothingCheckedError

NUM_LOSSES_WITHOUT_UPDATE = 1000  # calls of scale() without update() until a warning


def scale_on(device: torch.device, before: LossScale) -> LossScale:
    """Return a scale on a device, with the state of ``before``. Sync: none."""
    if device.type not in READABLE:
        return DeviceScale(before, device)
    before.create(device)
    return before


class Engine:
    """The scale of the losses, and the state of the current iteration."""

    def __init__(self, first: ScaleState, ranks: Ranks, scaler: Any) -> None:
        self.ranks = ranks
        # Never called without one: only its methods call the engine.
        self.owner: Callable[[], Any] = weakref.ref(scaler)
        self.loss_scale = LossScale(first)
        self.current = Iteration()  # what `iteration` returns, which stays usual
        self.is_usual = True  # whether nothing but usual steps needed the iteration so far
        # By id of optimizers that share no parameters: the plan, and what the long road would keep.
        self.usual: dict[int, tuple[Plan, Step]] = {}
        self.clean: list[Check] = []  # that have found nothing, and whose flags nobody else has
        self.journal = Journal()
        self.names = Names()
        self.buffers = Buffers()
        self.unused = UnusedGradients(self.journal, self.loss_scale, self.owner)

    @property
    def iteration(self) -> Iteration:
        """What the long road has done and found since the last ``update``; it is taken now."""
        self.is_usual = False
        usual, self.usual = self.usual, {}
        for plan, step in usual.values():
            step.ranks.agree_on(step.loss_scale, {})
            self.current.keep(step, step.stage, plan.versions)
            if step.stage is OptState.STEPPED and self.current.num_losses > step.num_losses:
                self.current.ledger.see_written(step.gradients, plan.versions)
                self.current.ledger.watch()
        return self.current

    # --- losses -----------------------------------------------------------------------------------

    @keep_out_of_graphs
    def create_scale(self, device: torch.device) -> None:
        """Put the scale on the device of the first loss. Sync: none."""
        self.loss_scale = scale_on(device, self.loss_scale)
        self.unused = UnusedGradients(self.journal, self.loss_scale, self.owner)
        self.owner()._note_device(device)

    @keep_out_of_graphs
    def _create_scale_of(self, outputs: Any) -> Any:
        """Create the scale for the first losses; return these, with iterators as lists."""
        outputs = for_each(lambda loss: loss, outputs)
        first = next(iter(tensors_in([outputs])), None)
        if first is not None:
            self.owner()._lazy_init_scale_growth_tracker(first.device)
            if not self.loss_scale.is_created:  # it is overridden
                self.create_scale(first.device)
        return outputs

    def scale(self, outputs: Any) -> Any:
        """Multiply all tensors in ``outputs`` by the scale. Sync: none."""
        if not self.loss_scale.is_created:
            outputs = self._create_scale_of(outputs)
        iteration = self.current
        is_traced = is_dynamo_compiling()
        stages = [step.stage for _, step in self.usual.values()] if self.usual else ()
        if iteration.ledger.entries or OptState.UNSCALED in stages:
            self.iteration.ledger.watch()
        if OBSERVERS and not is_traced:
            for observer in OBSERVERS:
                observer.on_loss(self.owner(), outputs)
        scale = self.loss_scale
        if isinstance(outputs, Tensor):
            scaled = scale.multiply(outputs, is_traced=is_traced)
        else:
            scaled = for_each(lambda each: scale.multiply(each, is_traced=is_traced), outputs)
        if self.buffers.watched and not is_traced:
            self.buffers.see_loss()
        iteration.num_losses += 1
        if iteration.num_losses == NUM_LOSSES_WITHOUT_UPDATE:
            warn(
                f"{NUM_LOSSES_WITHOUT_UPDATE} losses have been scaled since the last update(). If "
                "this is no accumulation, scaler.step(optimizer) and scaler.update() are missing: "
                "optimizer.step() alone steps with gradients that are multiplied by the scale"
            )
        return scaled

    def scale_of_iteration(self, call: str, owner: object) -> LossScale:
        """Return the scale of the losses since the last ``update``."""
        if not self.loss_scale.is_created:
            raise CallOrderError(
                f"{call}({name(owner)}) before scale(): no loss has been scaled by this "
                "GradScaler yet. Call scaler.scale(loss).backward() first"
            )
        return self.loss_scale

    # --- gradients --------------------------------------------------------------------------------

    def ranks_of(self, call: str, owner: object, params: list[Tensor]) -> Alone | Together:
        """Return who decides about the gradients: this rank alone or several together."""
        has_scale = self.loss_scale.is_created
        call = f"{call}({name(owner)})"
        ranks = self.ranks.of(call, params, has_scale)
        if isinstance(ranks, Together) and not has_scale:  # a rank without a loss
            self.create_scale(ranks.group.device)
        return ranks

    # --- the end of an iteration ------------------------------------------------------------------

    def update(self) -> None:
        """Back off, count or grow the scale. Sync: none."""
        iteration = self.iteration
        if not iteration.ledger.entries:
            raise NothingCheckedError(
                "update(): no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) for at least one optimizer first, or give a scale: "
                "update(new_scale=65536.0). (torch.amp says: No inf checks were recorded prior to "
                "update.)"
            )
        both = iteration.checks, iteration.looks
        is_here = self.loss_scale.is_here
        known = [[check.on_host(is_here) for check in checks] for checks in both]
        found: list[bool] | list[list[Tensor]] = [any(flags) for flags in known]
        if any(None in flags for flags in known):
            found = [[f for each in checks for f in each.found_inf.values()] for checks in both]
        unused = self.unused.before_change(iteration)
        left_out = self._left_out_by_caller() if OBSERVERS else []
        self.loss_scale.update(*found)
        self.unused.after_change(unused)
        self.end_iteration(left_out)

    def end_usual(self) -> bool:
        """End an iteration of usual steps, unless the host has to do more than count."""
        if not self.usual or OBSERVERS:
            return False
        scale = self.loss_scale
        found: list[Tensor] = []  # what only the device knows
        later: list[Tensor] = []
        for plan, step in self.usual.values():
            own, look = step.own, step.look
            assert own is not None
            if isinstance(step.skip, Tensor) and len(self.journal.plans) == 1:
                found += own.found_here.values()
                later += [] if look is None else look.found_here.values()
            # Another optimizer may have unused gradients; a step with the flag may write to it.
            elif step.stage is OptState.UNSCALED or (
                plan.is_fused and own.on_host(scale.is_here) is not False
            ):
                return False
        if found:
            scale.update(found, later)
        after = scale.snapshot() if found else scale.count()
        if after is None:
            return False
        for plan, step in self.usual.values():
            plan.outcome.after = after  # type: ignore[union-attr]
            if scale.is_here:
                self.clean += filter(None, (step.own, step.look))
        self.usual, self.current.num_losses = {}, 0
        if self.buffers.watched:
            self.buffers.end()
        self.journal.open.clear()
        return True

    def set_scale(self, new_scale: object, *, iteration_ends: bool = True) -> None:
        """Set the scale by hand; this ends the iteration by default. Sync: none."""
        unused = self.unused.before_change(self.iteration, iteration_ends=iteration_ends)
        self.loss_scale.set(new_scale)
        self.unused.after_change(unused)
        if iteration_ends:
            self.end_iteration()

    def load(self, state: ScaleState) -> None:
        """Load a saved state; the iteration continues. Sync: none."""
        unused = self.unused.before_change(self.iteration, iteration_ends=False)
        self.loss_scale.load(state)
        self.unused.after_change(unused)

    def end_iteration(self, left_out: Sequence[Outcome] = ()) -> None:
        """Clear the state of the iteration, complete its outcomes and notify the observers."""
        self.iteration.ledger.close()
        if self.buffers.watched:
            for step in self.iteration.steps.values():
                if step.skip is None and (skip := step.decide().skip) is not None:
                    self.buffers.restore(skip)
            self.buffers.end()
        self.current, self.is_usual = Iteration(), True
        outcomes, self.journal.open = self.journal.open, []
        for outcome in [*outcomes, *left_out]:
            outcome.after = self.loss_scale.snapshot()
        for observer in OBSERVERS:
            observer.on_iteration(self.owner(), outcomes, left_out)

    def _left_out_by_caller(self) -> list[Outcome]:
        """Return outcomes of optimizers that were unscaled and not stepped: ``if finite: step``."""
        found = []
        for step in self.iteration.steps.values():
            if step.stage is OptState.UNSCALED and step.optimizer is not None and step.checks:
                found.append(Outcome(step.decide(), self.names))
                found[-1].is_left_out = True
        return found


# --- losses in containers -------------------------------------------------------------------------


def for_each(function: Callable[[Tensor], Tensor], outputs: Any, where: str = "outputs") -> Any:
    """Return ``outputs`` with ``function`` applied to every tensor in it; name what is none.

    The classes of lists, tuples and dicts are kept; other mappings become dicts, other iterables
    lists.
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        items = {key: for_each(function, v, f"{where}[{key!r}]") for key, v in outputs.items()}
        return like(outputs, items)
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise TypeError(
            f"{where} is {shown(outputs)}: scale() takes a tensor, or a list, tuple, mapping or "
            "other iterable of tensors"
        )
    values = [for_each(function, v, f"{where}[{index}]") for index, v in enumerate(outputs)]
    return like(outputs, values)
