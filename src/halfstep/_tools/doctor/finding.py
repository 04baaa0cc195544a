"""The catalog of finding ids, a finding, and the findings of a checkup."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from halfstep._common.text import SEVERITIES, Severity, one_line


def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_FINDINGS = _read("findings.toml")
CATALOG: dict[str, Severity] = {id: entry["severity"] for id, entry in _FINDINGS.items()}
"""The severities by id; explained.toml has a section on each id."""


@dataclass(frozen=True)
class Finding:
    """A mistake, or a fact worth knowing.

    Attributes:
        id: The kind of finding, a key of the catalog: ``"clip-before-unscale"``.
        text: The observation and its consequence.
        cure: The remedy.
        code: The remedy as Python code to paste; empty if it takes more than a few lines.
        file, line: The place in the source.
    """

    id: str
    text: str
    cure: str
    code: str = ""
    file: str = ""
    line: int = 0

    @property
    def severity(self) -> Severity:
        return CATALOG[self.id]

    @property
    def docs(self) -> str:
        """The command that explains it; on the site a section of the page on doctor."""
        return f"halfstep doctor --explain {self.id}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"severity": self.severity, "docs": self.docs}

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.file}:{self.line}: {one_line(self.text)} [{self.id}]"]
        lines.append(f"    cure: {one_line(self.cure)}")
        lines += [f"        {one_line(line)}" for line in self.code.splitlines()]
        return "\n".join(lines)


def explanation(id: str) -> str:
    """Return what a finding means, with a program that has it and one without."""
    entry = dict(_read("explained.toml")[id])
    meaning = f"{CATALOG[id]}: {id}\n{entry.pop('text')}"
    return "\n".join([meaning, *(f"# {kind}\n{code}" for kind, code in entry.items())]).rstrip()


def finding(id: str, line: int = 0, **values: object) -> Finding:
    """Return a finding with the text, cure and code of the catalog, and values in their braces."""
    text, cure, code = (_FINDINGS[id].get(part, "").strip() for part in ("text", "cure", "code"))
    texts = text.format(**values), cure.format(**values), code.format(**values)
    return Finding(id, *texts, line=line)


class Checkup(tuple[Finding, ...]):
    """The findings of one checkup, worst first and each once; ``str()`` is the text to read."""

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
        return {"worst": self.worst, "findings": [finding.to_json() for finding in self]}

    def __str__(self) -> str:
        ids = dict.fromkeys(f" --explain {finding.id}" for finding in self)
        return "\n".join([*map(str, self), f"more: halfstep doctor{''.join(ids)}"])


def _order(finding: Finding) -> tuple[int, str, int, str]:
    return (SEVERITIES.index(finding.severity), finding.file, finding.line, finding.id)
