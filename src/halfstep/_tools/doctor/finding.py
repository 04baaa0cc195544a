"""The catalog of finding ids, a finding, and the findings of a checkup."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from halfstep._common.text import SEVERITIES, Severity, one_line

CATALOG: dict[str, Severity] = {
    # precision and scaler
    "fp16-without-scaler": "bad",
    "scaler-with-bf16": "warning",
    "torch-scaler": "notice",
    "deprecated-amp": "notice",
    # the calls of an iteration
    "loss-not-scaled": "bad",
    "scaled-twice": "bad",
    "clip-before-unscale": "bad",
    "unscale-twice": "bad",
    "unscale-of-another": "bad",
    "gradients-dropped": "bad",
    "scaler-bypassed": "bad",
    "step-unchecked": "bad",
    "step-twice": "bad",
    "update-before-step": "bad",
    "update-twice": "bad",
    "update-missing": "bad",
    "scaler-in-loop": "bad",
    "gradients-never-zeroed": "warning",
    "closure-not-unscaled": "bad",
    "scaler-not-saved": "notice",
    "scheduler-ungated": "notice",
    # where autocast is
    "backward-in-autocast": "warning",
    "autocast-around-backward": "warning",
    "autocast-without-forward": "warning",
    "context-not-entered": "warning",
    "device-differs": "warning",
    "weights-cast-in-loop": "notice",
    # parameters and optimizers
    "half-parameters": "bad",
    "bf16-parameters": "notice",
    "eps-underflow": "bad",
    "shared-parameter": "warning",
    "optimizer-before-move": "warning",
    "replaced-parameters": "bad",
    "untrained-parameters": "notice",
    "scheduler-of-another": "warning",
    # the process
    "reduced-precision-sums": "notice",
    "tf32-off": "notice",
    "onednn-off": "warning",
    "bf16-emulated": "warning",
    "fp16-convolutions": "bad",
    "source-not-read": "notice",
}
"""The severities by id; docs/doctor.md has a section on each id.

``bad`` ruins training, ``warning`` may ruin it, ``notice`` is good to know.
"""


@dataclass(frozen=True)
class Finding:
    """A mistake, or a fact worth knowing.

    Attributes:
        id: The kind of finding, a key of the catalog: ``"clip-before-unscale"``.
        text: The observation and its consequence.
        cure: The remedy.
        code: The remedy as Python code to paste; empty if it takes more than a few lines.
        names: The names of the parameters, modules or variables concerned.
        file, line: The place in the source; empty and 0 for objects.
    """

    id: str
    text: str
    cure: str
    code: str = ""
    names: tuple[str, ...] = ()
    file: str = ""
    line: int = 0

    def __post_init__(self) -> None:
        assert self.id in CATALOG, self.id

    @property
    def severity(self) -> Severity:
        """The severity of its id."""
        return CATALOG[self.id]

    @property
    def docs(self) -> str:
        """The section of the docs that explains it."""
        return f"docs/doctor.md#{self.id}"

    @property
    def place(self) -> str:
        """File and line; empty for objects."""
        return f"{self.file}:{self.line}" if self.file else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, including severity and docs."""
        own = asdict(self) | {"names": list(self.names)}
        return {**own, "severity": self.severity, "docs": self.docs}

    def __str__(self) -> str:
        place = f"{self.place}: " if self.file else ""
        lines = [f"{self.severity}: {place}{one_line(self.text)} [{self.id}]"]
        lines.append(f"    cure: {one_line(self.cure)}")
        lines += [f"        {one_line(line)}" for line in self.code.splitlines()]
        return "\n".join(lines)


class Checkup(Sequence[Finding]):
    """The findings of one checkup, worst first; ``str()`` is the text to read.

    Args:
        findings: The findings in any order; duplicates are dropped.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._findings = sorted(dict.fromkeys(findings), key=_order)

    @property
    def worst(self) -> Severity:
        """The severity of the first finding; ``"good"`` if there is none."""
        return self._findings[0].severity if self._findings else "good"

    @property
    def is_well(self) -> bool:
        """Whether there are no bad findings and no warnings."""
        return self.worst in ("notice", "good")

    def to_json(self) -> str:
        """Return everything as JSON."""
        findings = [finding.to_json() for finding in self]
        return json.dumps({"worst": self.worst, "findings": findings}, indent=1)

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Checkup: ...

    def __getitem__(self, index: int | slice) -> Finding | Checkup:
        if isinstance(index, slice):
            return Checkup(self._findings[index])
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def __str__(self) -> str:
        if not self._findings:
            return "good: nothing found"
        ids = list(dict.fromkeys(finding.docs for finding in self))
        return "\n".join([*map(str, self), f"see {', '.join(ids)}"])

    def __repr__(self) -> str:
        return f"Checkup({', '.join(finding.id for finding in self)})"


def _order(finding: Finding) -> tuple[int, str, int, str]:
    return (SEVERITIES.index(finding.severity), finding.file, finding.line, finding.id)
