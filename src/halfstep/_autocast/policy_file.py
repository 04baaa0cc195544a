"""The TOML form of a policy: a preset to start from, and tables of rules.

preset = "standard"

[[rules]]
ops = ["linear", "matmul"]
action = "fp32"
device = "cuda"      # or a list of them
dtype = "float16"
phase = "train"
module = "blocks.*"  # without ops: the module as a whole
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch

from halfstep._autocast.rule import ACTIONS, PHASES, Rule, did_you_mean

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_KEYS = ("ops", "action", "device", "dtype", "phase", "message", "module")


def parse(text: str, source: str) -> tuple[str, list[Rule]]:
    """Read a policy.

    Args:
        text: TOML.
        source: What an error message calls it: the path of the file.

    Returns:
        The name of the preset, ``""`` if there is none, and the rules to come after it.

    Raises:
        ValueError: The message names the line, what is there and what could be.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: {error}") from error
    lines = text.splitlines()
    place = _Place(lines, source, 0)
    for key in table.keys() - {"preset", "rules"}:
        raise place.error(key, f"unknown key {key!r}{did_you_mean(key, ('preset', 'rules'))}")
    tables = table.get("rules", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise place.error("rules", "rules are tables, each under a line [[rules]]")
    heads = (n for n, line in enumerate(lines) if line.strip().startswith("[["))
    rules: list[Rule] = []
    for each in tables:
        rules += _rules(each, _Place(lines, source, next(heads, 0)))
    return table.get("preset", ""), rules


def to_toml(preset: str, rules: Iterable[Rule]) -> str:
    """Return what :func:`parse` reads as the same preset and rules."""
    parts = [f'preset = "{preset}"\n']
    for limits, group in groupby(rules, _limits):
        named = [f"{key} = {_quoted(value)}" for key, value in limits.items() if value]
        for is_whole, alike in groupby(group, lambda rule: rule.is_for_whole_module):
            ops = [_quoted(rule.op) for rule in alike]
            heads: list[list[str]] = (
                [[] for _ in ops] if is_whole else [[f"ops = [{', '.join(ops)}]"]]
            )
            parts += ["\n".join(["[[rules]]", *head, *named]) + "\n" for head in heads]
    return "\n".join(parts)


def _quoted(text: str) -> str:
    # A string of JSON is one of TOML, but for pairs of escapes and for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _limits(rule: Rule) -> dict[str, str | None]:
    """Return what stands in a table beside the ops."""
    dtype = None if rule.dtype is None else str(rule.dtype).removeprefix("torch.")
    return {
        "action": rule.action,
        "device": rule.device,
        "dtype": dtype,
        "phase": rule.phase,
        "message": rule.message,
        "module": rule.module,
    }


class _Place(NamedTuple):
    """Where in the file something stands; tomllib does not tell.

    Attributes:
        lines: The file.
        source: Its name.
        first: The line that it stands in or after.
    """

    lines: list[str]
    source: str
    first: int

    def error(self, seen: object, message: str) -> ValueError:
        """Return the error for what was seen."""
        found = (n for n in range(self.first, len(self.lines)) if str(seen) in self.lines[n])
        return ValueError(f"{self.source}, line {next(found, self.first) + 1}: {message}")


def _rules(table: Mapping[str, Any], place: _Place) -> Iterator[Rule]:
    for key in table.keys() - set(_KEYS):
        raise place.error(key, f"unknown key {key!r}{did_you_mean(key, _KEYS)}")
    module, devices = table.get("module"), table.get("device")
    ops = table.get("ops", [""] if module else None)
    if not isinstance(ops, list) or not ops:
        raise place.error("ops", 'a table of rules needs ops = ["softmax", ...], or a module')
    for key, known in (("action", ACTIONS), ("dtype", tuple(_DTYPES)), ("phase", PHASES)):
        value = table.get(key)
        if value not in known and (value is not None or key == "action"):
            near = did_you_mean(str(value), known)
            choice = ", ".join(map(repr, known))
            raise place.error(value, f"{key} is {value!r}{near}; it is one of {choice}")
    dtype = _DTYPES.get(table.get("dtype", ""))
    message = str(table.get("message", "")).strip()
    for device in devices if isinstance(devices, list) else [devices]:
        for op in ops:
            try:
                yield Rule(op, table["action"], device, dtype, table.get("phase"), message, module)
            except ValueError as error:
                raise place.error(op or module, str(error)) from error
