"""Harm in a finite step: overflows that later ops absorb.

``rsqrt(inf)`` is 0, and so is the output. An op with finite inputs and an infinite result is also
computed in a wider dtype. Later ops are computed from both results until they agree again and are
finite, as after clamps, sigmoids and masks. If whole rows differ, the overflow did harm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep._autocast import Policy
from halfstep._common.nested import map_plain
from halfstep._pytorch.storages import ByMemory
from halfstep._tools.diagnose import cure_search
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis
from halfstep._tools.diagnose.inspect_op import in_wider, inspect
from halfstep._tools.replay.blame import Blame, BlameTracker, scan
from halfstep._tools.replay.observer import OpCall
from halfstep._tools.replay.replay import Replayer, StepRun
from halfstep._tools.replay.variant import Variant

MOST_OPS = 64
"""The largest number of ops that are followed after an overflow."""
MOST_OVERFLOWS = 16
"""The largest number of overflows in a step that are followed."""
_FAR = 0.5
"""The smallest error that counts as harm, as a share of the norm of the row."""
_SMALL = 0.1
"""The smallest norm of a row that counts, as a share of the median norm."""
_REPLACES_ON_PURPOSE = ("nan_to_num", "nan_to_num_")

Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Wide:
    """Values of a tensor as computed in a wider dtype, and the op that overflowed before it."""

    values: Tensor
    origin: Blame
    num_ops: int = 0


class AbsorbedTracker(BlameTracker):
    """Blame tracker that also follows overflows until they are absorbed.

    Sync: several for each op that reads values after an overflow.
    """

    def __init__(self) -> None:
        super().__init__()
        # The first overflow that did harm, and the op that absorbed it.
        self.harm: tuple[Blame, str] | None = None
        self._wide: ByMemory[dict[Geometry, Wide]] = ByMemory()
        self._origins: set[Blame] = set()
        self._computed: tuple[list[Tensor], Wide] | None = None
        self._overflowed: Blame | None = None

    def before(self, call: OpCall) -> None:
        super().before(call)
        self._computed = self._overflowed = None
        read = [wide for tensor in call.given if (wide := self._wide_of(tensor)) is not None]
        # Only the forward pass: a gradient where a function saturates is small in any dtype.
        is_forward = call.phase != "backward"
        if read and is_forward and self.harm is None and call.name not in _REPLACES_ON_PURPOSE:
            origin = min(read, key=lambda wide: wide.origin.number)
            self._computed = (self._in_wider(call), origin)

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        if blame.number == call.number and not blame.is_meant and not call.written:
            self._overflowed = blame

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        super().after(call, outputs)
        for tensor in call.written:
            self._wide.drop(tensor)
        if self._computed is not None:
            values, before = self._computed
            wide = replace(before, num_ops=before.num_ops + 1)
        elif self._overflowed is not None and len(self._origins) < MOST_OVERFLOWS:
            self._origins.add(self._overflowed)
            values, wide = self._in_wider(call), Wide(outputs[0], self._overflowed)
        else:
            return
        for output, exact in zip(outputs, values, strict=False):
            if output.is_floating_point() and output.shape == exact.shape:
                self._follow(output, replace(wide, values=exact), call)

    def _follow(self, output: Tensor, wide: Wide, call: OpCall) -> None:
        exact = wide.values
        if wide.num_ops > MOST_OPS or not bool(exact.isfinite().all()):
            return
        if bool(output.isfinite().all()):
            seen = output.to(exact.device).to(exact.dtype)
            if _is_far(seen, exact, torch.finfo(output.dtype).tiny):
                self.harm = (wide.origin, call.name)
            if torch.allclose(seen, exact, rtol=0.01):
                return
        known = self._wide.get(output) or {}
        self._wide.put(output, known | {_geometry(output): wide})

    def _wide_of(self, tensor: Tensor) -> Wide | None:
        return (self._wide.get(tensor) or {}).get(_geometry(tensor))

    def _in_wider(self, call: OpCall) -> list[Tensor]:
        """Compute an op from the wider values of its inputs; return no results if it cannot run."""

        def wide(value: Any) -> Any:
            found = self._wide_of(value) if isinstance(value, Tensor) else None
            return value if found is None else found.values

        args, kwargs = map_plain(wide, (list(call.args), call.kwargs))
        return in_wider(replace(call, args=tuple(args), kwargs=kwargs), torch.float64) or []


def _geometry(tensor: Tensor) -> Geometry:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _is_far(values: Tensor, exact: Tensor, tiny: float) -> bool:
    """Return whether a row is far from the exact one; rows that are too small do not count."""
    rows, exact_rows = (t.reshape(-1, t.shape[-1] if t.ndim else 1) for t in (values, exact))
    size, error = exact_rows.norm(dim=1), (rows - exact_rows).norm(dim=1)
    counts = size >= max(tiny, _SMALL * float(size.median()))
    return bool(((error > _FAR * size) & counts).any())


def find_absorbed(replayer: Replayer, run: StepRun) -> Diagnosis | None:
    """Replay a finite step in which ops overflowed; return a diagnosis if an overflow did harm."""
    tracker = AbsorbedTracker()
    scan(replayer, Variant(scale=run.scale), tracker=tracker)
    if tracker.harm is None:
        return None
    blame, absorber = tracker.harm
    bad = inspect(replayer, blame, run.scale).bad
    replayer.notes.append(f"{absorber} makes finite numbers of inf, and whole rows are wrong")
    return Diagnosis("absorbed", bad, scale=run.scale, cure=_cure(replayer, run, blame))


def _cure(replayer: Replayer, run: StepRun, blame: Blame) -> Cure:
    """Return a rule for the op that overflows as the cure, tested by a replay if possible."""
    rule = cure_search.narrowest_rule(blame, replayer.model)
    if not run.entered or rule is None or rule.policy is None:
        return Cure("code", f"compute {blame.op} there in float32: pass x.float()")
    variant = Variant(policy=Policy.parse(rule.policy), scale=run.scale)
    tracker = AbsorbedTracker()
    found = scan(replayer, variant, tracker=tracker)
    return replace(rule, is_finite=found.is_finite and tracker.harm is None)
