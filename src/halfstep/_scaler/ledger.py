"""The ledger of an iteration: what each checked gradient is multiplied by.

A backward pass is what makes an entry stale, not the version of a gradient: users change unscaled
gradients in place. The versions only say which gradients a step must check again. Sync: none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep._gradients import scalars
from halfstep._gradients.gradients import NONE, Gradients, version_of
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.devices import to_device
from halfstep._scaler.agreement import Agreement
from halfstep._scaler.loss_scale import LossScale


@dataclass(eq=False, slots=True)
class Check:
    """A check of gradients that share one scale; the result updates that scale.

    Attributes:
        found_here: Device to float32 scalar: 1 if a gradient on that device is inf or NaN, else 0.
        first: The unscaled norm and largest magnitude, measured if the step is one of the first.
        read: Whether a step has read inf or NaN in the flags, and their versions at that time.
        agreement: The combined result of all ranks, if several decide.
        all_param_ids: In that case, the ids of all parameters of the check. A rank may have no
            gradients for them, but must still find the check.
    """

    scale: LossScale
    found_here: dict[torch.device, Tensor]
    first: tuple[Scalar, Tensor] | None = None
    read: tuple[bool, list[int]] | None = None
    agreement: Agreement | None = None
    all_param_ids: frozenset[int] = frozenset()

    @property
    def found_inf(self) -> dict[torch.device, Tensor]:
        """Device to float32 scalar: 1 if a gradient on any rank is inf or NaN, else 0."""
        if self.agreement is None:
            return self.found_here
        found = self.agreement.found_inf()
        return {device: to_device(found, device) for device in self.found_here or [found.device]}

    def note(self, found_inf: bool) -> None:
        """Note what a step has read in the flags, which existing code may still change."""
        self.read = found_inf, [flag._version for flag in self.found_here.values()]

    def on_host(self) -> bool | None:
        """Return whether inf or NaN was found, None if only a device knows.

        Sync: none; one for flags on a device if the scale is on the CPU.
        """
        if self.read is not None:
            found_inf, versions = self.read
            if versions == [flag._version for flag in self.found_here.values()]:
                return found_inf
        is_here, found_inf = self.scale.is_here, False
        for device, flag in self.found_inf.items():
            if not is_here and device.type not in scalars.READABLE:
                return None
            found_inf |= flag.item() != 0.0
        return found_inf


@dataclass(eq=False, slots=True)
class Entry:
    """Gradients that were multiplied by one scale.

    Attributes:
        gradients: Referenced until the iteration ends, so that the ``id`` of a gradient is not
            reused.
        check: Their check, which has the scale.
        left_scaled_by: Whether the step that made the check has left them scaled, and the number by
            which they are multiplied in that case; None if they are unscaled.
        versions: Those of the gradients when the scaler has written to them last.
    """

    gradients: Gradients
    check: Check
    left_scaled_by: tuple[Scalar, Scalar] | None
    versions: list[int]

    def unscale_what_was_left(self) -> None:
        """Divide the gradients if a skipped step of another optimizer left them scaled."""
        if self.left_scaled_by is not None:
            is_left, multiplier = self.left_scaled_by
            factor = scalars.where(is_left, scalars.reciprocal(multiplier), 1.0)
            noted, before = self.versions, _versions(self.gradients)
            self.gradients.multiply_(factor)
            rows = zip(noted, before, _versions(self.gradients), strict=True)
            # Those that somebody else has written to must still be checked again.
            self.versions = [now if was == seen else seen for seen, was, now in rows]
            self.left_scaled_by = None

    def release(self) -> None:
        """Drop the references to the gradients."""
        self.gradients, self.versions = NONE, []


def _versions(gradients: Gradients) -> list[int]:
    return list(map(version_of, gradients.grads))


class Ledger:
    """What the gradients are multiplied by: by 1 if a check has unscaled them, else by the scale.

    ``hooks`` detect a backward pass that adds to checked gradients.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._hooks: list[RemovableHandle] = []
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
    ) -> Entry:
        """Record that gradients were checked, and unscaled unless ``left_scaled_by`` is given."""
        entry = Entry(gradients, check, left_scaled_by, _versions(gradients))
        self.take_over([entry])
        return entry

    def take_over(self, entries: Iterable[Entry]) -> None:
        """Record the entries of another ledger; their gradients no longer count as fresh."""
        for entry in entries:
            self.entries.append(entry)
            if self._fresh:
                for param in entry.gradients.params:
                    self._fresh.pop(id(param), None)

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
        now = zip(map(id, gradients.grads), _versions(gradients), strict=True)
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

    def close(self) -> None:
        """Remove the hooks."""
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
