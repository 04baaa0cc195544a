"""The catalog of finding ids, a finding, and the findings of a checkup."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from halfstep._common.text import SEVERITIES, Severity, one_line

_FINDINGS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("findings.toml").read_text(encoding="utf-8")
)
CATALOG: dict[str, Severity] = {id: entry["severity"] for id, entry in _FINDINGS.items()}
"""The severities by id; docs/doctor.toml has a section on each id."""


@dataclass(frozen=True)
class Finding:
    """A mistake, or a fact worth knowing.

    Attributes:
        id: The kind of finding, a key of the catalog: ``"clip-before-unscale"``.
        text: The observation and its consequence.
        cure: The remedy.
        code: The remedy as Python code to paste; empty if it takes more than a few lines.
        names: The names of the parameters, modules or variables concerned.
        file, line: The place in the source.
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
        """The part of the docs that explains it, on the site a section of the page on doctor."""
        return f"docs/doctor.toml [{self.id}]"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, including severity and docs."""
        own = asdict(self) | {"names": list(self.names)}
        return {**own, "severity": self.severity, "docs": self.docs}

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.file}:{self.line}: {one_line(self.text)} [{self.id}]"]
        lines.append(f"    cure: {one_line(self.cure)}")
        lines += [f"        {one_line(line)}" for line in self.code.splitlines()]
        return "\n".join(lines)


def finding(id: str, line: int = 0, names: Iterable[str] = (), **values: object) -> Finding:
    """Return a finding with the text, cure and code of the catalog, and values in their braces."""
    text, cure, code = (_FINDINGS[id].get(part, "").strip() for part in ("text", "cure", "code"))
    texts = text.format(**values), cure.format(**values), code.format(**values)
    return Finding(id, *texts, tuple(names), line=line)


class Checkup(tuple[Finding, ...]):
    """The findings of one checkup, worst first; ``str()`` is the text to read.

    Args:
        findings: The findings in any order; duplicates are dropped.
    """

    def __new__(cls, findings: Iterable[Finding] = ()) -> Self:
        return super().__new__(cls, sorted(dict.fromkeys(findings), key=_order))

    @property
    def worst(self) -> Severity:
        """The severity of the first finding; ``"good"`` if there is none."""
        return self[0].severity if self else "good"

    @property
    def is_well(self) -> bool:
        """Whether there are no bad findings and no warnings."""
        return self.worst in ("notice", "good")

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"worst": self.worst, "findings": [finding.to_json() for finding in self]}

    def __str__(self) -> str:
        places = dict.fromkeys(finding.docs for finding in self)
        return "\n".join([*map(str, self), f"see {', '.join(places)}"])


def _order(finding: Finding) -> tuple[int, str, int, str]:
    return (SEVERITIES.index(finding.severity), finding.file, finding.line, finding.id)
