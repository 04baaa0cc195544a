"""Inspection of bad ops while the op to blame is searched for, which saves a replay."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from halfstep._diagnose.blame import Blame, BlameTracker
from halfstep._diagnose.diagnosis import BadOp, Line
from halfstep._diagnose.inspect_op import (
    described,
    name_of_bad,
    names_in,
    needs,
    operand,
    with_inputs,
    with_output,
)
from halfstep._diagnose.observer import OpCall
from halfstep._diagnose.user_code import user_line

MOST_INSPECTED = 16
"""The most bad ops of a replay that are inspected; the one to blame is among the first."""


class InspectingTracker(BlameTracker):
    """Blame tracker that inspects ops at once if they may be to blame, and do not write to inputs.

    Attributes:
        inspected: By the number of an op, its description and the name of a tensor from outside.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inspected: dict[int, tuple[BadOp, str | None]] = {}
        self._lines: dict[int, tuple[str, Line | None]] = {}
        self._name_of = names_in(model)

    def before(self, call: OpCall) -> None:
        """Note the line of an op, for its backward pass."""
        super().before(call)
        if call.phase != "backward":
            self._lines[call.number] = (call.name, user_line())

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Inspect an op that may be to blame."""
        if call.written or len(self.inspected) >= MOST_INSPECTED:
            return
        described_op = with_inputs(described(blame), call, self._name_of)
        found = replace(described_op, needs=needs(call))
        if blame.of is not None:
            op, line = self._lines.get(call.place.number, (None, None))
            found = replace(found, forward_op=op, forward_line=line)
        floats = [tensor for tensor in bad if tensor.is_floating_point()]
        if floats:
            found = with_output(found, operand(floats[0], self._name_of(floats[0])))
        tensor = None if blame.tensor is None else name_of_bad(call, found.inputs, blame.tensor)
        self.inspected[call.number] = (found, tensor)
