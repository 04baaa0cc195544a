"""The text form of policies, and the presets, which are files of it.

It is ``standard; linear,matmul:fp32; softmax[cuda,fp16]:lower``: a preset, then rules, of which
later ones win; parts end with ``;`` or a line, unless that ends with a comma, and a comment begins
with ``#``. A rule is

    op , op ... @ module [ condition , ... ] : action

The module, a glob over names, is optional; without ops the rule is for the module as a whole. The
brackets are optional and contain device types, and ``fp16`` or ``bf16``.
The action ``refuse`` is followed by its message in double quotes, as in JSON.

docs/policies.md says what each preset is for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import groupby, product
from operator import attrgetter

import torch

from halfstep._autocast.rule import ACTIONS, DTYPE_NAMES, Rule, unknown_action
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
    file = resources.files("halfstep._autocast") / "presets" / f"{preset}.policy"
    base, rules = parse(file.read_text(encoding="utf-8"))
    return [*rules_of(base), *rules]


@cache
def _with_autocast_kernel(device: str | None) -> frozenset[str]:
    """Return the overloads, and the ops, that the running PyTorch's autocast casts on a device."""
    assert device is not None
    overloads = dispatch.overloads_with_autocast_kernel(device)
    return overloads | {name.rpartition(".")[0] for name in overloads}


# --- text -----------------------------------------------------------------------------------------

_PART = re.compile(r'(?:[^;\n"]|"(?:[^"\\]|\\.)*")+')
# A comment, and the end of a line after a comma; what is in double quotes stays.
_IGNORED = re.compile(r'("(?:[^"\\]|\\.)*")|(,)(?:\s|#.*)+|#.*')
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
        near = (
            suggestion([f"standard; {preset}"]) if ":" in preset else did_you_mean(preset, PRESETS)
        )
        raise ValueError(
            f"a policy must start with a preset ({', '.join(PRESETS)}); got {preset!r}{near}"
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


def to_text(rules: tuple[Rule, ...], separator: str = "; ") -> str:
    """Return the text from which :func:`parse` gets these rules."""
    begun = (name for name in PRESETS if rules[: len(rules_of(name))] == rules_of(name))
    preset = max(begun, key=lambda name: len(rules_of(name)))  # "fp32" is empty and always matches
    parts = [preset]
    for (is_whole, ending), alike in groupby(rules[len(rules_of(preset)) :], _all_but_op):
        ops = [rule.op for rule in alike]
        parts += [ending for _ in ops] if is_whole else [",".join(ops) + ending]
    return separator.join(parts)


_all_but_op = attrgetter("is_for_whole_module", "limits_and_action")


def _parts(text: str) -> list[str]:
    text = _IGNORED.sub(r"\1\2", text)
    if '"' in _PART.sub("", text):
        raise ValueError(f"policy {text!r}: a double quote is not closed")
    return [part for each in _PART.findall(text) if (part := each.strip())]


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
    devices, dtype = _limits(part, [limit.strip() for limit in limits if limit.strip()])
    for device, op in product(devices, found["ops"].split(",")):
        try:
            message = json.loads(found["message"], strict=False) if found["message"] else ""
            yield Rule(op.strip(), action, device, dtype, message, found["module"])
        except ValueError as error:
            raise ValueError(f"policy rule {part!r}: {error}") from error


def _limits(part: str, limits: Iterable[str]) -> tuple[list[str | None], torch.dtype | None]:
    devices: list[str | None] = []
    dtype: torch.dtype | None = None
    known = amp.autocast_devices()
    for limit in limits:
        if limit in DTYPE_NAMES and dtype is None:
            dtype = DTYPE_NAMES[limit]
        elif limit in known:
            devices.append(limit)
        else:
            near = did_you_mean(limit, (*known, *DTYPE_NAMES))
            if limit in ("train", "eval"):
                near = ": for training and for evaluation, enter contexts with a policy each"
            raise ValueError(
                f"policy rule {part!r}: {limit!r} in the brackets{near}; "
                "there may be device types, and one of fp16 and bf16"
            )
    return devices or [None], dtype
