"""Inspection of bad ops while the op to blame is searched for."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from halfstep._diagnose.blame import OUTSIDE, Blame, BlameTracker
from halfstep._diagnose.inspect_op import OpInspection, names_in
from halfstep._diagnose.observer import OpCall
from halfstep._diagnose.user_code import Place, user_place

MOST_INSPECTED = 64
"""The most bad ops that are inspected; the one to blame is among the first."""


class InspectingTracker(BlameTracker):
    """Blame tracker that inspects ops at once if they may be to blame.

    Args:
        model: The model, for the names of its tensors.
        is_replay: Whether ops can be inspected in another replay. Those that write to what they
            read are left for it, and ops of the backward pass that read a bad tensor from outside:
            what handed that over has returned.

    Attributes:
        inspected: The inspections, by the number of the op.
    """

    def __init__(self, model: nn.Module | None, *, is_replay: bool) -> None:
        super().__init__()
        self.inspected: dict[int, OpInspection] = {}
        self._is_replay = is_replay
        self._places: dict[int, tuple[str, Place | None]] = {}
        self._name_of = names_in(model)

    def before(self, call: OpCall) -> None:
        """Note the place of an op, for its backward pass."""
        super().before(call)
        if call.phase != "backward":
            self._places[call.number] = (call.name, user_place())

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Inspect an op that may be to blame."""
        is_from_before = blame.number == OUTSIDE and blame.of is not None
        is_left = self._is_replay and (bool(call.written) or is_from_before)
        if is_left or len(self.inspected) >= MOST_INSPECTED:
            return
        inspection = OpInspection(blame, self._name_of)
        inspection.before(call)
        inspection.after(call, bad)
        if call.written:  # what it has read is gone
            inspection.bad = replace(inspection.bad, needs=None)
        if blame.of is not None:
            op, place = self._places.get(call.place.number, (None, None))
            line = None if place is None else place.line
            inspection.bad = replace(inspection.bad, forward_op=op, forward_line=line)
        self.inspected[call.number] = inspection
