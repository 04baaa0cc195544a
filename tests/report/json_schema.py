"""The JSON Schema of what ``halfstep report --json`` prints, made from the types of its values.

``halfstep/_report/report.schema.json`` holds it; ``python -m tests.report.json_schema`` prints it
anew after a change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from msgspec.json import schema_components

from halfstep._common.text import Severity
from halfstep._report.compare_runs import RunComparison
from halfstep._report.summary import Summary
from halfstep._report.text import SCHEMA

_NON_FINITE = {"enum": ["nan", "inf", "-inf"]}


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


def json_schema() -> dict[str, Any]:
    """Return the schema of a report and of a comparison."""
    _, parts = schema_components((Summary, RunComparison, Said), ref_template="#/$defs/{name}")
    for unused in ("Sentence", "Code"):
        del parts[unused]
    for part in parts.values():  # events of a record: of which kind, the report does not repeat
        if part["properties"].pop("event", None):
            part["required"].remove("event")
    said = {"type": "array", "items": {"$ref": "#/$defs/Said"}}
    _document(parts["Summary"], "report", sentences=said)
    verdict = {"$ref": "#/$defs/Said"}
    _document(parts["RunComparison"], "comparison", verdict=verdict)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What halfstep report --json prints",
        "oneOf": [{"$ref": "#/$defs/Summary"}, {"$ref": "#/$defs/RunComparison"}],
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
