"""The JSON Schema of what the commands print with ``--json``, made from the types of its values.

``halfstep/_tools/cli/json.schema.json`` holds it; ``python -m tests.cli.json_schema`` prints it
anew after a change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, get_args

from msgspec import UNSET, UnsetType
from msgspec.json import schema_components

from halfstep._common.text import Severity
from halfstep._tools.doctor.finding import Finding
from halfstep._tools.doctor.hardware import MachineReport
from halfstep._tools.report.compare_runs import RunComparison
from halfstep._tools.report.summary import Summary
from halfstep._tools.report.text import SCHEMA

_NON_FINITE = {"enum": ["nan", "inf", "-inf"]}
SEVERITY = {"enum": sorted(get_args(Severity))}


@dataclass(frozen=True)
class Said:
    """A sentence as text; names and code in it stand in backticks.

    Attributes:
        severity: How bad it is.
        text: The sentence.
        follows: Whether it is a consequence of a problem that stands before it.
    """

    severity: Severity
    text: str
    follows: bool = False


@dataclass(frozen=True)
class Checkup:
    """What the doctor found.

    Attributes:
        worst: The severity of the first finding; ``"good"`` if there is none.
        findings: The worst first.
        machine: Left out with ``--no-machine``.
    """

    worst: Severity
    findings: tuple[Finding, ...]
    machine: MachineReport | UnsetType = UNSET


DOCUMENTS = {"report": Summary, "comparison": RunComparison, "doctor": Checkup}
"""What is printed, by its ``kind``."""


def json_schema() -> dict[str, Any]:
    """Return the schema of all documents."""
    _, parts = schema_components(
        (*DOCUMENTS.values(), Said),
        ref_template="#/$defs/{name}",
    )
    for unused in ("Sentence", "Code"):
        del parts[unused]
    for part in parts.values():  # events of a record: of which kind, the report does not repeat
        if part["properties"].pop("event", None):
            part["required"].remove("event")
    parts["Finding"]["properties"] |= {"severity": SEVERITY, "docs": {"type": "string"}}
    # Values that may be left out in Python.
    parts["Finding"]["required"] = [*parts["Finding"]["properties"]]
    own = {
        "report": {
            "sentences": {"type": "array", "items": {"$ref": "#/$defs/Said"}},
            "processes": {"type": "array", "items": {"$ref": "#/$defs/Summary"}},
        },
        "comparison": {"verdict": {"$ref": "#/$defs/Said"}},
    }
    for kind, document in DOCUMENTS.items():
        _document(parts[document.__name__], kind, **own.get(kind, {}))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What halfstep prints with --json",
        "oneOf": [{"$ref": f"#/$defs/{document.__name__}"} for document in DOCUMENTS.values()],
        "$defs": _with_strings(parts),
    }


def _document(part: dict[str, Any], kind: str, **properties: Any) -> None:
    """Add to the fields of a type what the document has besides."""
    head = {"schema": {"const": SCHEMA}, "kind": {"const": kind}}
    part["properties"] = head | part["properties"] | properties
    part["required"] = sorted({*part["required"], *head, *properties})
    part["additionalProperties"] = False


def _with_strings(part: Any) -> Any:
    """Return a schema whose numbers may be "nan", "inf" and "-inf", as JSON has none of them."""
    if isinstance(part, list):
        return [_with_strings(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "number":
        return {"anyOf": [part, _NON_FINITE]}
    changed = {key: _with_strings(value) for key, value in part.items()}
    if isinstance(changed.get("description"), str):
        changed["description"] = cleandoc(changed["description"])
    return changed


def _with_a_line_for_each_type(schema: dict[str, Any]) -> str:
    types = (f'"{name}": {json.dumps(part)}' for name, part in schema.pop("$defs").items())
    return f'{json.dumps(schema)[:-1]}, "$defs": {{\n' + ",\n".join(types) + "\n}}"


if __name__ == "__main__":
    print(_with_a_line_for_each_type(json_schema()))
