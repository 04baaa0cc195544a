"""The text form of a policy: ``standard; linear,matmul:fp32; softmax[cuda,fp16]:lower``.

A preset to start from, then rules, later ones win; parts end with ``;``. A rule is

    op , op ... @ module [ condition , ... ] : action

where the module, a glob over names, may be left out, or the ops for the module as a whole, and the
brackets, which may be left out, hold a device type, ``fp16`` or ``bf16``, and ``train``
or ``eval``. The action ``refuse`` is followed by its message in double quotes, as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch

from halfstep._autocast.presets import PRESETS, rules_of
from halfstep._autocast.rule import ACTIONS, DTYPE_NAMES, PHASES, Phase, Rule, did_you_mean
from halfstep._pytorch import amp

_PART = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")+')
_RULE = re.compile(
    r"""(?P<ops>[^\[\]"@]*?) \s* (?:@(?P<module>[^\[\]":\s]+))? \s*
    (?:\[(?P<limits>[^\]]*)\])? \s* (?<!:):(?!:) \s*
    (?P<action>[\w-]+) \s* (?P<message>"(?:[^"\\]|\\.)*")?""",
    re.VERBOSE,
)


def parse(text: str) -> tuple[str, list[Rule]]:
    """Read a policy.

    Returns:
        The name of the preset and the rules to come after it.

    Raises:
        ValueError: The message names the part that is wrong, and what could be there.
    """
    preset, *parts = _parts(text) or [""]
    if preset not in PRESETS:
        raise ValueError(
            f"policy {text!r}: it starts with a preset, one of {', '.join(PRESETS)}, and not with "
            f"{preset!r}{did_you_mean(preset, PRESETS)}"
        )
    return preset, [rule for part in parts for rule in _rules(part)]


def parse_rules(text: str) -> list[Rule]:
    """Read rules without a preset before them."""
    return [rule for part in _parts(text) for rule in _rules(part)]


def to_text(rules: tuple[Rule, ...]) -> str:
    """Return what :func:`parse` reads as these rules."""
    name = base(rules)
    parts = [name]
    for rest, group in groupby(rules[len(rules_of(name)) :], lambda rule: rule.limits_and_action):
        for is_whole, alike in groupby(group, lambda rule: rule.is_for_whole_module):
            ops = [rule.op for rule in alike]
            parts += [rest for _ in ops] if is_whole else [",".join(ops) + rest]
    return "; ".join(parts)


def base(rules: tuple[Rule, ...]) -> str:
    """Return the preset with most rules that these begin with; ``"fp32"`` has none."""
    begun = (n for n in PRESETS if rules[: len(rules_of(n))] == rules_of(n))
    return max(begun, key=lambda name: len(rules_of(name)))


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
        raise ValueError(
            f"policy rule {part!r}: unknown action {action!r}{did_you_mean(action, ACTIONS)}; it "
            f"is one of {', '.join(ACTIONS)}"
        )
    device, dtype, phase = _limits(part, [limit.strip() for limit in limits if limit.strip()])
    module = found["module"]
    for op in found["ops"].split(","):
        try:
            message = json.loads(found["message"], strict=False) if found["message"] else ""
            yield Rule(op.strip(), action, device, dtype, phase, message, module)
        except ValueError as error:
            raise ValueError(f"policy rule {part!r}: {error}") from error


def _limits(
    part: str, limits: Iterable[str]
) -> tuple[str | None, torch.dtype | None, Phase | None]:
    device: str | None = None
    dtype: torch.dtype | None = None
    phase: Phase | None = None
    devices = amp.autocast_devices()
    for limit in limits:
        if limit in DTYPE_NAMES and dtype is None:
            dtype = DTYPE_NAMES[limit]
        elif limit in PHASES and phase is None:
            phase = limit
        elif limit in devices and device is None:
            device = limit
        else:
            known = (*devices, *DTYPE_NAMES, *PHASES)
            raise ValueError(
                f"policy rule {part!r}: {limit!r} in the brackets{did_you_mean(limit, known)}; "
                "there may be one device type, one of fp16 and bf16, and train or eval"
            )
    return device, dtype, phase
