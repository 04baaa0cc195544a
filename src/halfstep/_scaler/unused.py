"""Gradients that no step has used when a scale changes, rescaled when they are used.

They will be divided by the scale at the time of use. An optimizer has such gradients if it
accumulates over the updates of another one, or if it steps after ``update(new_scale)``.

They stay unchanged until the scaler itself uses them, or a backward pass of a scaled loss adds to
them: before that, the user may have unscaled them by hand, or never scaled them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from halfstep._common.nested import tensors_in
from halfstep._gradients.gradients import Seen, collect_local, is_as_seen, parameters, seen
from halfstep._gradients.scalars import ratio
from halfstep._pytorch.autograd import after_backward, is_view, leaves_of
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.iteration import Iteration, Remembered, Stage
from halfstep._scaler.journal import Journal
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import has_its_gradients

NUM_LOSSES = 16
"""Number of losses whose graphs are searched for parameters, which takes a few milliseconds each.
Optimizers that appear later are known from their first step on."""

NUM_UPDATES = 100
"""Number of updates after which parameters that were never stepped are forgotten."""


@dataclass(frozen=True, eq=False)
class WaitingGradient:
    """A gradient that has not been used since a scale change.

    Attributes:
        earlier: The gradient at that time; None for a view. Views of a bucket or flat buffer share
            its version counter, and after the first backward pass DistributedDataParallel moves
            them to other buckets.
        scale: The scale that the gradient must be multiplied by when it is used.
        before: The scale that it is multiplied by now, a float32 scalar; None if it was unscaled.
    """

    param: weakref.ref[Tensor]
    earlier: Seen | None
    scale: LossScale
    before: Tensor | None

    def untouched(self) -> Tensor | None:
        """Return the parameter if its gradient has not been written since, else None."""
        param = self.param()
        grad = None if param is None else param.grad
        if grad is None:
            return None
        is_same = is_view(grad) if self.earlier is None else is_as_seen(self.earlier, grad)
        return param if is_same else None


class Unused:
    """The unused gradients of a scaler, and the search for them. Sync: none."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal  # contains all optimizers that have stepped
        self.is_searching = True  # whether graphs of losses are searched
        self._num_losses = 0
        # By id: parameters that losses depend on and no known optimizer has.
        self._loose: dict[int, weakref.ref[Tensor]] = {}
        self._num_updates = 0
        self.waiting: dict[int, WaitingGradient] = {}  # by the id of the parameter
        # Whether compiled code scaled losses, so that their backward passes cannot be identified.
        self.has_compiled_losses = False
        self._running: LossScale | None = None  # the scale of the loss in backward
        self._hooks: list[RemovableHandle] = []

    def see_loss(self, scaled: Any, scale: LossScale) -> None:
        """Search the graph of a scaled loss, and watch its backward pass, if necessary."""
        losses = list(tensors_in([scaled]))
        if self.is_searching:
            self._num_losses += 1
            self.is_searching = self._num_losses < NUM_LOSSES
            leaves = leaves_of(losses)
            found = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
            self._loose |= {id(leaf): weakref.ref(leaf) for leaf in found}
        if self.waiting:
            self._notice_backward_of(losses, scale)

    def _notice_backward_of(self, losses: list[Tensor], scale: LossScale) -> None:
        def begin(_: Tensor) -> None:
            self._running = scale
            after_backward(self._end_backward)

        for loss in losses:
            if loss.requires_grad:
                loss.register_hook(begin)  # type: ignore[no-untyped-call]

    def _end_backward(self) -> None:
        self._running = None

    def before_change(self, iteration: Iteration, scale: LossScale) -> dict[int, WaitingGradient]:
        """Return the gradients to rescale later if the scale changes, by id of the parameter."""
        steps = iteration.steps.values()
        stepped: list[Remembered] = []
        done: list[Remembered] = []  # steps since which no loss was scaled
        for step in steps:
            if step.stage is Stage.STEPPED:
                stepped.append(step)
                if step.num_losses == iteration.num_losses:
                    done.append(step)
        is_usual = not (self._loose or self.waiting)
        if is_usual and len(done) == len(steps) == len(self._journal.memories):
            return {}
        self._prune()
        ids_done = {id(param) for step in done for param in step.parameters()}
        # A step has used what was unscaled before or by it, but not what was unscaled afterwards.
        used = {
            (id(param), check)
            for step in stepped
            for param in step.parameters()
            for check in step.checks
        }
        before: Tensor | None = None
        found: dict[int, WaitingGradient] = {}
        for param in self._candidates(iteration):
            key, grad = id(param), param.grad
            if grad is None or key in ids_done or key in found:
                continue
            waiting = self.waiting.get(key)
            if waiting is not None and waiting.untouched() is param:
                found[key] = waiting
                continue
            entry = iteration.ledger.of(param)
            if not scale.is_created or (entry and (key, entry.check) in used):
                continue
            if entry is None and before is None:
                before = scale.tensor.clone()
            earlier = None if is_view(grad) else seen([grad])[0]
            found[key] = WaitingGradient(
                weakref.ref(param), earlier, scale, before if entry is None else None
            )
        return found

    def _candidates(self, iteration: Iteration) -> Iterator[Tensor]:
        """Yield parameters whose gradients may be unused; some more than once."""
        for step in iteration.steps.values():
            yield from step.parameters()
        seen = iteration.steps.keys()
        for memory in self._journal.memories.values():
            outcome, optimizer = memory.outcome, memory.optimizer()
            if (
                optimizer is not None
                and id(optimizer) not in seen
                and not (outcome and has_its_gradients(outcome))
            ):
                yield from parameters(optimizer)
        for ref in self._loose.values():
            if (param := ref()) is not None:
                yield param

    def _prune(self) -> None:
        """Forget parameters whose optimizers have stepped, and after NUM_UPDATES all of them."""
        self._num_updates += 1
        if self._num_updates >= NUM_UPDATES:
            self._loose = {}
        if self._loose:
            optimizers = [memory.optimizer() for memory in self._journal.memories.values()]
            known = {
                id(p)
                for optimizer in optimizers
                if optimizer is not None
                for p in parameters(optimizer)
            }
            alive = {key: ref for key, ref in self._loose.items() if ref() is not None}
            self._loose = {key: ref for key, ref in alive.items() if key not in known}

    def wait(self, found: dict[int, WaitingGradient], *, iteration_ends: bool = True) -> None:
        """Keep the gradients found by :meth:`before_change`, whose scale has now changed.

        ``iteration_ends``: the iteration's record of unscaled gradients is lost, so keep these too.
        """
        if not (found or self.waiting or self._hooks or self._running):
            return
        self.waiting = {
            key: one
            for key, one in found.items()
            if iteration_ends or one.before is not None or key in self.waiting
        }
        self._end_backward()  # a backward pass that raised did not report its end
        self._unhook()
        ref = weakref.ref(self)

        @unserializable_hook  # type: ignore[untyped-decorator]
        @keep_out_of_graphs
        def note(_: Tensor) -> None:
            unused = ref()
            if unused is not None:
                unused.before_adding()

        for one in self.waiting.values():
            param = one.param()
            if param is not None and param.requires_grad:
                self._hooks.append(param.register_hook(note))  # type: ignore[no-untyped-call]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def before_adding(self) -> None:
        """Rescale the waiting gradients of a scale before its loss adds to one of them."""
        if self.has_compiled_losses:
            self._use(self.waiting)
        elif self._running is not None:
            # All at once: views of one buffer need few kernels.
            self._use(key for key, one in self.waiting.items() if one.scale is self._running)
        self._end_backward()

    def use(self, params: Iterable[Tensor] | None = None) -> None:
        """Rescale waiting gradients, all or those of ``params``, by the change of their scale.

        2 G, except on the CPU if the scale is unchanged; elsewhere that is not known. Sync: none.
        """
        if self.waiting:
            self._use(self.waiting if params is None else map(id, params))

    @torch.no_grad()
    def _use(self, keys: Iterable[int]) -> None:
        wanted = set(keys)
        ready: dict[tuple[LossScale, Tensor | None], list[Tensor]] = defaultdict(list)
        waiting: dict[int, WaitingGradient] = {}
        for key, one in self.waiting.items():
            param = one.untouched()
            if param is None:
                continue
            if key in wanted:
                ready[one.scale, one.before].append(param)
            else:
                waiting[key] = one
        self.waiting = waiting
        if not waiting:
            self._unhook()
        for (scale, before), params in ready.items():
            now = scale.tensor
            if before is None:
                collect_local(params).multiply_(now)
            elif before.device.type != "cpu" or not torch.equal(before, now):
                collect_local(params).multiply_(ratio(now, before))
