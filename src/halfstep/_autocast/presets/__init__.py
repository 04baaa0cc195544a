"""The rules of the policies that come with halfstep, each a TOML file beside this one.

* ``standard``: one table for every device, the default.
* ``torch``: PyTorch's own lists of the running version, a different one for each device.
* ``torch-cuda``: PyTorch's list for CUDA, on every device.
* ``bf16-lean``: standard, but norms, softmax and losses stay in bfloat16.
* ``apex-o1``: the lists of NVIDIA Apex, opt level O1.
* ``fp32``: no rules, so nothing is lowered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import resources

from halfstep._autocast import policy_file
from halfstep._autocast.rule import LOWER_PRECISIONS, Rule
from halfstep._pytorch import dispatch

PRESETS = ("standard", "torch", "torch-cuda", "bf16-lean", "apex-o1", "fp32")


@cache
def rules_of(name: str) -> tuple[Rule, ...]:
    """Return the rules of a preset, one of ``PRESETS``."""
    match name:
        case "torch":
            return tuple(_registered(_read("torch")))
        case "torch-cuda":
            cuda = (rule for rule in rules_of("torch") if rule.device == "cuda")
            return tuple(replace(rule, device=None) for rule in cuda)
        case "fp32":
            return ()
    return tuple(_read(name))


def _read(name: str) -> Iterator[Rule]:
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    base, rules = policy_file.parse(text, name)
    return iter([*(rules_of(base) if base else ()), *rules])


def _registered(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Keep the rules whose op has an autocast kernel in the running version of PyTorch."""
    for rule in rules:
        assert rule.device is not None
        ops = dispatch.overloads_with_autocast_kernel(rule.device)
        if any(rule.holds(op, rule.device, dtype) for op in ops for dtype in LOWER_PRECISIONS[:2]):
            yield rule
