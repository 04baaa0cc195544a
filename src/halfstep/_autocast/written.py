"""Text and TOML forms of policies, and the presets, which are TOML files.

The text form is ``standard; linear,matmul:fp32; softmax[cuda,fp16]:lower``: a preset, then rules,
of which later ones win; parts end with ``;``. A rule is

    op , op ... @ module [ condition , ... ] : action

The module, a glob over names, is optional; without ops the rule is for the module as a whole. The
brackets are optional and contain a device type, and ``fp16`` or ``bf16``.
The action ``refuse`` is followed by its message in double quotes, as in JSON.

A file expresses the same in tables:

    preset = "standard"

    [[rules]]
    ops = ["linear", "matmul"]
    action = "fp32"
    device = "cuda"      # or a list of them
    dtype = "float16"
    module = "blocks.*"  # without ops: the module as a whole

docs/policies.md says what each preset is for.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from halfstep._autocast.rule import (
    ACTIONS,
    DTYPE_NAMES,
    LONG_DTYPE_NAMES,
    Rule,
    unknown_action,
)
from halfstep._common.text import did_you_mean, suggestion
from halfstep._pytorch import amp, dispatch

_MEANINGS = {
    "lower": "cast to the lower precision",
    "fp32": "cast to float32",
    "fp32-out": "factors cast to the lower precision, results in float32",
    "fp32-dtype": "asked for a float32 result",
    "fp32-sums": "added in float32, results in the dtype of the inputs",
    "promote": "cast to the widest dtype among the inputs",
    "destination": "cast to the dtype of what is written to",
    "leave": "run as without a rule",
}

PRESETS = ("standard", "torch", "torch-cuda", "bf16-lean", "fp32")


@cache
def rules_of(preset: str) -> tuple[Rule, ...]:
    """Return the rules of a preset, one of ``PRESETS``."""
    match preset:
        case "torch":
            read = _read("torch")
            return tuple(rule for rule in read if rule.op in _with_autocast_kernel(rule.device))
        case "torch-cuda":
            cuda = (rule for rule in rules_of("torch") if rule.device == "cuda")
            return tuple(replace(rule, device=None) for rule in cuda)
        case "fp32":
            return ()
    return tuple(_read(preset))


def _read(preset: str) -> list[Rule]:
    file = resources.files("halfstep._autocast") / "presets" / f"{preset}.toml"
    base, rules = parse_toml(file.read_text(encoding="utf-8"), preset)
    return [*(rules_of(base) if base else ()), *rules]


@cache
def _with_autocast_kernel(device: str | None) -> frozenset[str]:
    """Return the overloads, and the ops, that the running PyTorch's autocast casts on a device."""
    assert device is not None
    overloads = dispatch.overloads_with_autocast_kernel(device)
    return overloads | {name.rpartition(".")[0] for name in overloads}


def split_preset(rules: tuple[Rule, ...]) -> tuple[str, tuple[Rule, ...]]:
    """Return the longest preset that the rules begin with, and the remaining rules."""
    begun = (name for name in PRESETS if rules[: len(rules_of(name))] == rules_of(name))
    preset = max(begun, key=lambda name: len(rules_of(name)))  # "fp32" is empty and always matches
    return preset, rules[len(rules_of(preset)) :]


_all_but_op = attrgetter(*("action", "device", "dtype", "message", "module", "is_for_whole_module"))


def _runs(rules: Iterable[Rule]) -> Iterator[list[Rule]]:
    """Yield runs of rules that differ only in their ops; a rule for a whole module stands alone."""
    for _, alike in groupby(rules, _all_but_op):
        run = list(alike)
        yield from [[rule] for rule in run] if run[0].is_for_whole_module else [run]


# --- text -----------------------------------------------------------------------------------------

_PART = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")+')
_RULE = re.compile(
    r"""(?P<ops>[^\[\]"@]*?) \s* (?:@(?P<module>[^\[\]":\s]+))? \s*
    (?:\[(?P<limits>[^\]]*)\])? \s* (?<!:):(?!:) \s*
    (?P<action>[\w-]+) \s* (?P<message>"(?:[^"\\]|\\.)*")?""",
    re.VERBOSE,
)


def parse(text: str) -> tuple[str, list[Rule]]:
    """Return the preset that a text names, and the rules after it.

    Raises:
        ValueError: The message names the invalid part and the valid choices.
    """
    preset, *parts = _parts(text) or [""]
    if preset not in PRESETS:
        near = suggestion([f"standard; {text}"]) if ":" in preset else did_you_mean(preset, PRESETS)
        raise ValueError(
            f"policy {text!r}: it must start with a preset ({', '.join(PRESETS)}); got "
            f"{preset!r}{near}"
        )
    return preset, [rule for part in parts for rule in _rules(part)]


def parse_rules(text: str) -> list[Rule]:
    """Parse rules without a preset."""
    return [rule for part in _parts(text) for rule in _rules(part)]


def by_action(rules: Sequence[Rule]) -> dict[str, list[str]]:
    """Return the ops by action and limits, keyed by title; overruled ones are left out."""
    later: set[str] = set()
    found = []
    for rule in reversed(rules):
        limits = rule.limits_and_action.partition(":")[0]
        if not later & {rule.op, rule.op + limits}:
            found.append(rule)
        later.add(rule.op + limits)
    groups: dict[str, list[str]] = {}
    for rule in reversed(found):
        title = rule.limits_and_action.removeprefix(":")
        if rule.action in _MEANINGS:
            title += f", {_MEANINGS[rule.action]}"
        groups.setdefault(title, []).append(rule.op or "the module as a whole")
    return groups


def to_text(rules: tuple[Rule, ...]) -> str:
    """Return the text from which :func:`parse` gets these rules."""
    preset, rest = split_preset(rules)
    runs = (",".join(rule.op for rule in run) + run[0].limits_and_action for run in _runs(rest))
    return "; ".join([preset, *runs])


def _parts(text: str) -> list[str]:
    parts: list[str] = _PART.findall(text)
    if len("".join(parts)) + text.count(";") < len(text) + sum(p.count(";") for p in parts):
        raise ValueError(f"policy {text!r}: a double quote is not closed")
    return [stripped for part in parts if (stripped := part.strip())]


def _rules(part: str) -> Iterator[Rule]:
    found = _RULE.fullmatch(part)
    if found is None:
        raise ValueError(
            f"policy rule {part!r} is not of the form op,op@module[condition,...]:action, such "
            "as 'softmax:fp32', 'conv*,linear[cuda,fp16]:lower' or '@blocks.*.norm:fp32'"
        )
    action, limits = found["action"], (found["limits"] or "").split(",")
    if action not in ACTIONS:
        raise ValueError(f"policy rule {part!r}: {unknown_action(action)}")
    device, dtype = _limits(part, [limit.strip() for limit in limits if limit.strip()])
    for op in found["ops"].split(","):
        try:
            message = json.loads(found["message"], strict=False) if found["message"] else ""
            yield Rule(op.strip(), action, device, dtype, message, found["module"])
        except ValueError as error:
            raise ValueError(f"policy rule {part!r}: {error}") from error


def _limits(part: str, limits: Iterable[str]) -> tuple[str | None, torch.dtype | None]:
    device: str | None = None
    dtype: torch.dtype | None = None
    devices = amp.autocast_devices()
    for limit in limits:
        if limit in DTYPE_NAMES and dtype is None:
            dtype = DTYPE_NAMES[limit]
        elif limit in devices and device is None:
            device = limit
        else:
            near = did_you_mean(limit, (*devices, *DTYPE_NAMES))
            if limit in ("train", "eval"):
                near = ": for training and for evaluation, enter contexts with a policy each"
            raise ValueError(
                f"policy rule {part!r}: {limit!r} in the brackets{near}; "
                "there may be one device type, and one of fp16 and bf16"
            )
    return device, dtype


# --- TOML -----------------------------------------------------------------------------------------

_KEYS = ("ops", "action", "device", "dtype", "message", "module")


def parse_toml(text: str, source: str) -> tuple[str, list[Rule]]:
    """Return the preset that a file (``source``) names, ``""`` for none, and its own rules.

    Raises:
        ValueError: The message names the line, the value and the valid choices.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not TOML: {error}") from error
    lines = text.splitlines()
    place = _Position(lines, source, 0)
    for key in table.keys() - {"preset", "rules"}:
        raise place.error(key, f"unknown key {key!r}{did_you_mean(key, ('preset', 'rules'))}")
    tables = table.get("rules", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise place.error("rules", "rules are tables, each under a line [[rules]]")
    heads = (n for n, line in enumerate(lines) if line.strip().startswith("[["))
    rules: list[Rule] = []
    for each in tables:
        rules += _rules_of_table(each, _Position(lines, source, next(heads, 0)))
    return table.get("preset", ""), rules


def to_toml(rules: tuple[Rule, ...]) -> str:
    """Return the TOML from which :func:`parse_toml` gets these rules."""
    preset, rest = split_preset(rules)
    tables = [f'preset = "{preset}"\n']
    for run in _runs(rest):
        rule, ops = run[0], ", ".join(_quoted(rule.op) for rule in run)
        fields = {
            "action": rule.action,
            "device": rule.device,
            "dtype": str(rule.dtype or "").removeprefix("torch."),
            "message": rule.message,
            "module": rule.module,
        }
        lines = ["[[rules]]"] if rule.is_for_whole_module else ["[[rules]]", f"ops = [{ops}]"]
        lines += [f"{key} = {_quoted(value)}" for key, value in fields.items() if value]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _quoted(text: str) -> str:
    # JSON strings are TOML strings, except for surrogate pairs and DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Position(NamedTuple):
    """A position in a file: the line ``first`` or below, since tomllib does not report lines."""

    lines: list[str]
    source: str
    first: int

    def error(self, seen: object, message: str) -> ValueError:
        """Return an error with the line of a value."""
        found = (n for n in range(self.first, len(self.lines)) if str(seen) in self.lines[n])
        return ValueError(f"{self.source}, line {next(found, self.first) + 1}: {message}")


def _rules_of_table(table: Mapping[str, Any], place: _Position) -> Iterator[Rule]:
    for key in table.keys() - set(_KEYS):
        raise place.error(key, f"unknown key {key!r}{did_you_mean(key, _KEYS)}")
    module, devices = table.get("module"), table.get("device")
    ops = table.get("ops", [""] if module else None)
    if not isinstance(ops, list) or not ops:
        raise place.error("ops", 'a table of rules needs ops = ["softmax", ...], or a module')
    action = table.get("action")
    if action not in ACTIONS:
        raise place.error(action, unknown_action(action))
    name = table.get("dtype")
    if name not in (None, *LONG_DTYPE_NAMES):
        near, choice = did_you_mean(str(name), LONG_DTYPE_NAMES), ", ".join(LONG_DTYPE_NAMES)
        raise place.error(name, f"dtype is {name!r}{near}; it is one of {choice}")
    dtype = LONG_DTYPE_NAMES.get(name or "")
    message = str(table.get("message", "")).strip()
    for device in devices if isinstance(devices, list) else [devices]:
        for op in ops:
            try:
                yield Rule(op, action, device, dtype, message, module)
            except ValueError as error:
                raise place.error(op or module, str(error)) from error
