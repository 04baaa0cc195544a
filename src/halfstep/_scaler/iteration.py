"""What is known of the gradients between two calls of ``update``: checks, the ledger, the steps.

The ledger says what each checked gradient is multiplied by. A backward pass is what makes an entry
stale, not the version of a gradient: users change unscaled gradients in place. The versions only
say which gradients a step must check again. Sync: none, but for :meth:`Check.on_host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle

from halfstep._common.numbers import things
from halfstep._gradients import scalars
from halfstep._gradients.gradients import NONE, Flags, Gradients, Norms, parameters
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.devices import to_device
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.ranks import ALONE, Agreement, Alone, Together
from halfstep.errors import NothingCheckedError


@dataclass(eq=False, slots=True)
class Check:
    """A check of gradients that share one scale; the result updates that scale."""

    found_here: Flags  # on this rank
    first: tuple[Scalar, Tensor] | None = None  # unscaled norm and amax, if measured as a first one
    # Whether a step has read inf or NaN in the flags, and their versions at that time.
    read: tuple[bool, list[int]] | None = None
    agreement: Agreement | None = None  # of all ranks, if several decide
    # In that case, the ids of all its parameters: a rank without gradients must find the check too.
    all_param_ids: frozenset[int] = frozenset()

    @property
    def found_inf(self) -> Flags:
        """What was found on any rank."""
        if self.agreement is None:
            return self.found_here
        found = self.agreement.found_inf()
        return {device: to_device(found, device) for device in self.found_here or [found.device]}

    def note(self, found_inf: bool) -> None:
        """Note what a step has read in the flags, which existing code may still change."""
        self.read = found_inf, [flag._version for flag in self.found_here.values()]

    def on_host(self, is_here: bool) -> bool | None:
        """Return whether inf or NaN was found, None if only a device knows.

        Sync: none; one for flags on a device if the scale is on the CPU (``is_here``).
        """
        if self.read is not None:
            found_inf, versions = self.read
            if versions == [flag._version for flag in self.found_here.values()]:
                return found_inf
        found_inf = False
        flags = self.found_here if self.agreement is None else self.found_inf
        for device, flag in flags.items():
            if not is_here and device.type not in scalars.READABLE:
                return None
            found_inf |= flag.item() != 0.0
        return found_inf


@dataclass(eq=False, slots=True)
class Entry:
    """Gradients that were multiplied by one scale, and their check."""

    gradients: Gradients  # referenced until the iteration ends, so that no id is reused
    check: Check
    # Whether the step that made the check has left them scaled, and by what; None if unscaled.
    left_scaled_by: tuple[Scalar, Scalar] | None
    versions: list[int]  # of the gradients when the scaler has written to them last

    def unscale_what_was_left(self) -> None:
        """Divide the gradients if a skipped step of another optimizer left them scaled."""
        if self.left_scaled_by is not None:
            is_left, multiplier = self.left_scaled_by
            factor = scalars.reciprocal(multiplier)
            if isinstance(is_left, Tensor):
                factor = torch.where(is_left > 0, factor, 1.0)
            elif not is_left:
                factor = 1.0
            noted, before = self.versions, self.gradients.versions()
            self.gradients.multiply_(factor)
            rows = zip(noted, before, self.gradients.versions(), strict=True)
            # Those that somebody else has written to must still be checked again.
            self.versions = [now if was == seen else seen for seen, was, now in rows]
            self.left_scaled_by = None

    def release(self) -> None:
        self.gradients, self.versions = NONE, []


class Ledger:
    """What the gradients are multiplied by: 1 if a check has unscaled them, else the scale."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._hooks: list[RemovableHandle] = []  # detect a backward pass that adds to checked ones
        self._num_watched = 0
        # Built only for a second optimizer, since it is slow for thousands of gradients.
        self._by_gradient: dict[int, Entry] = {}
        self._num_indexed = 0
        # By parameter, the id of its gradient if backward has added to it since the check.
        self._fresh: dict[int, int] = {}
        self._in_doubt: dict[int, Tensor] = {}  # referenced, so that no id is reused

    def mark(
        self,
        gradients: Gradients,
        check: Check,
        left_scaled_by: tuple[Scalar, Scalar] | None = None,
        versions: list[int] | None = None,  # at that time, if it was not now
    ) -> Entry:
        """Record that gradients were checked, and unscaled unless ``left_scaled_by`` is given."""
        entry = Entry(gradients, check, left_scaled_by, versions or gradients.versions())
        self.entries.append(entry)
        if self._fresh:
            for param in gradients.params:
                self._fresh.pop(id(param), None)
        return entry

    def of(self, param: Tensor) -> Entry | None:
        """Return the entry of a gradient, None if it is multiplied by the scale."""
        return None if self.is_fresh(param) else self._index().get(id(param.grad))

    def split(
        self, gradients: Gradients, all_param_ids: frozenset[int] = frozenset()
    ) -> tuple[Gradients, list[Entry]]:
        """Return the gradients that are still scaled, and the entries of the others, in order.

        A parameter that is in two optimizers, or in an optimizer and a wrapper of it, is unscaled
        only once. If several ranks decide, ``all_param_ids`` are the ids of all parameters: the
        entries are then the same on all of them, whichever ranks have gradients.
        """
        if not self.entries:
            return gradients, []
        index = self._index()
        seen = index.keys() & set(map(id, gradients.grads))
        if self._fresh:
            seen -= {id(param.grad) for param in gradients.params if self.is_fresh(param)}
        scaled = gradients.without(seen)
        if all_param_ids:
            entries = [each for each in self.entries if each.check.all_param_ids & all_param_ids]
            return scaled, entries
        found = {index[key] for key in seen}
        return scaled, [entry for entry in self.entries if entry in found]  # a set is unordered

    def written(self, gradients: Gradients) -> Gradients:
        """Return the gradients that were written to, replaced or added since their check.

        A write that bumps no version is not seen: through ``.data``, in NumPy, by a collective.
        """
        checked: set[tuple[int, int]] = set()
        for entry in self.entries:
            checked.update(zip(map(id, entry.gradients.grads), entry.versions, strict=True))
        now = zip(map(id, gradients.grads), gradients.versions(), strict=True)
        same = {key for key, _ in checked.intersection(now)}
        if len(same) == len(gradients.grads):
            return NONE
        return gradients.without(same) if same else gradients

    def is_fresh(self, param: Tensor) -> bool:
        """Return whether a backward pass has added to the gradient since it was checked."""
        return self._fresh.get(id(param)) == id(param.grad)

    def doubt(self, gradients: Gradients) -> None:
        """Record that it is not known what these gradients are multiplied by."""
        self._in_doubt.update(zip(map(id, gradients.grads), gradients.grads, strict=True))

    def is_in_doubt(self, params: Iterable[Tensor]) -> bool:
        """Return whether it is not known what any of the gradients is multiplied by."""
        return bool(self._in_doubt) and any(id(param.grad) in self._in_doubt for param in params)

    def forget(self, checks: Iterable[Check]) -> None:
        """Forget checks: their gradients count as scaled."""
        forgotten = set(checks)
        self.entries = [entry for entry in self.entries if entry.check not in forgotten]
        self._by_gradient, self._num_indexed, self._num_watched = {}, 0, 0

    @keep_out_of_graphs
    def watch(self) -> None:
        """Detect backward passes that add to checked gradients: what they add is still scaled.

        ``zero_grad(set_to_none=False)``, buckets and flat buffers reuse the same gradient tensor.
        """
        for entry in self.entries[self._num_watched :]:
            for param in entry.gradients.params:
                if param.is_leaf and param.requires_grad:
                    hook = param.register_post_accumulate_grad_hook(self._note_fresh)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
        self._num_watched = len(self.entries)

    def see_written(self, gradients: Gradients, versions: list[int]) -> None:
        """Take gradients as added to that were written to after a usual step and a later loss.

        Hooks would cost too much there, and no other known optimizer has these parameters.
        """
        written = gradients.written_since(versions)
        self._fresh.update(zip(map(id, written.params), map(id, written.grads), strict=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note_fresh(self, param: Tensor) -> None:
        self._fresh[id(param)] = id(param.grad)

    def _index(self) -> dict[int, Entry]:
        # Built on demand, which never happens with one optimizer.
        for entry in self.entries[self._num_indexed :]:
            self._by_gradient.update(dict.fromkeys(map(id, entry.gradients.grads), entry))
        self._num_indexed = len(self.entries)
        return self._by_gradient


# --- steps ----------------------------------------------------------------------------------------


STAGES = {
    OptState.READY: "its gradients are still multiplied by the scale",
    OptState.UNSCALED: "its gradients have already been unscaled",
    OptState.STEPPED: "step() has already been called",
}
"""The stages of an optimizer in an iteration, which are torch.amp's."""


class Step(NamedTuple):
    """What a call knows of the gradients of an optimizer, from gathering them to the end.

    Each change gives a new one. The iteration keeps the last one of an optimizer, but no gradients.
    """

    optimizer: torch.optim.Optimizer | None  # None if only its id is known
    loss_scale: LossScale
    gradients: Gradients = NONE
    scaled_by: Scalar | None = None  # of the gradients when they were gathered; None if unscaled
    multiplier: Scalar | None = None  # the same now
    earlier: tuple[Check, ...] = ()  # of any of these gradients, also for another optimizer
    own: Check | None = None  # the check of this call
    # The second check, of gradients that were unscaled already. It decides about the step, and not
    # about the scale, which the first one has shown to be usable.
    look: Check | None = None
    norms: Norms | None = None  # what this call has measured
    ranks: Alone | Together = ALONE  # who decides
    all_param_ids: frozenset[int] = frozenset()  # if several ranks decide
    is_first: bool = False  # whether norm and amax are measured, as in the first steps
    stage: OptState = OptState.READY
    num_losses: int = 0  # that had been scaled when the call ended
    skip: Scalar | None = None  # 1 if inf or NaN was found, else 0; None before the decision
    found_inf: Scalar | None = None  # the same without the second look; nonzero in place of 1

    @property
    def has_gradients(self) -> bool:
        """Whether this rank, or possibly another one, has gradients."""
        return bool(self.gradients.grads) or self.ranks.is_together

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks that move the scale: the earlier ones and the own one."""
        return self.earlier if self.own is None else (*self.earlier, self.own)

    def agreements(self) -> list[Agreement]:
        """Return the agreements of all checks; empty if this rank decides alone."""
        if self.ranks is ALONE and not self.earlier:
            return []
        checks = self.checks if self.look is None else (*self.checks, self.look)
        return [check.agreement for check in checks if check.agreement is not None]

    def decide(self) -> Step:
        """Decide whether the step must be skipped, unless that is known."""
        if self.skip is not None:
            return self
        flags = [flag for check in self.checks for flag in check.found_inf.values()]
        if not flags:
            raise nothing_checked(self.optimizer)
        if len(flags) == 1 and not self.earlier:  # a new one, which no user can have modified
            return self._replace(skip=scalars.scalar(flags[0]))
        device = self.loss_scale.device
        if self.look is None:
            return self._replace(skip=scalars.combine(flags, device))
        found_inf = (scalars.combine if self.loss_scale.is_here else scalars.any_of)(flags, device)
        later = self.look.found_inf.values()
        return self._replace(skip=scalars.combine([*flags, *later], device), found_inf=found_inf)


def found_inf_by_device(checks: Sequence[Check]) -> Flags:
    """Return, by device, 1 if a gradient there is inf or NaN, else 0."""
    if len(checks) == 1:
        return checks[0].found_inf  # no copy: users may all-reduce the flags
    found: dict[torch.device, list[Tensor]] = {}
    for check in checks:
        for device, flag in check.found_inf.items():
            found.setdefault(device, []).append(flag)
    return {
        device: scalars.as_tensor(scalars.combine(flags, device), device)
        for device, flags in found.items()
    }


def nothing_checked(optimizer: torch.optim.Optimizer | None) -> NothingCheckedError:
    """Return the error for an optimizer without any gradients."""
    num_params = 0 if optimizer is None else len(parameters(optimizer))
    return NothingCheckedError(
        f"step({name(optimizer)}): none of its {things(num_params, 'parameter')} has a gradient.\n"
        "Cause: backward() was not called on the scaled loss, or zero_grad() was called after "
        "it, or the loss does not depend on these parameters (is it the optimizer of this "
        "model?).\n"
        "Cure: call scaler.scale(loss).backward() before step() and zero_grad() after it, or "
        "leave out step() for this optimizer in this iteration. (torch.amp says: No inf checks "
        "were recorded for this optimizer.)"
    )


class Iteration:
    """The steps of all optimizers and the checks of all gradients since the last ``update``.

    A step is kept only once work has been done for its optimizer, so that a failed call leaves no
    trace.
    """

    def __init__(self) -> None:
        # The last call for each optimizer, by its id, which no other gets: the step references it.
        self.steps: dict[int, Step] = {}
        self.num_losses = 0  # scaled ones
        self.ledger = Ledger()
        self.looks: list[Check] = []  # of gradients written to after they were unscaled

    @property
    def checks(self) -> list[Check]:
        """All checks that move the scale, in order."""
        return [entry.check for entry in self.ledger.entries]

    def keep(self, step: Step, stage: OptState, versions: list[int] | None = None) -> None:
        """Record the checks and the stage of a call, if it has a check.

        ``versions``: those of the gradients after a call that was made earlier.
        """
        skip, multiplier = step.skip, step.multiplier
        if step.own is not None:
            left = None if skip is None or multiplier is None else (skip, multiplier)
            self.ledger.mark(step.gradients, step.own, left, versions)
        if step.look is not None and stage is OptState.STEPPED:
            self.looks.append(step.look)
        if step.checks and step.optimizer is not None:
            self.steps[id(step.optimizer)] = Step(
                step.optimizer,
                step.loss_scale,
                earlier=step.checks,
                ranks=step.ranks,
                stage=stage,
                num_losses=self.num_losses if versions is None else step.num_losses,
                skip=step.skip if stage is OptState.STEPPED else None,
            )

    def forget(self, key: int) -> None:
        """Forget the step of an optimizer, by its ``id``, and what was found for it."""
        step = self.steps.pop(key, None)
        if step is not None:
            self.ledger.forget(step.checks)
