"""The policies that come with halfstep, each a TOML file beside this one.

* ``standard``: one table for every device, the default.
* ``torch``: PyTorch's own lists of the running version, a different one for each device.
* ``torch-cuda``: PyTorch's list for CUDA, on every device.
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import torch

from halfstep import _torch
from halfstep.casting.policy import Policy, Rule

PRESETS = ("standard", "torch", "torch-cuda")


@cache
def preset(name: str) -> Policy:
    """Return a policy that comes with halfstep.

    Args:
        name: ``"standard"``, ``"torch"`` or ``"torch-cuda"``.

    Raises:
        ValueError: there is no preset of that name.

    Example:
        >>> preset("standard").action("softmax.int", "cpu", torch.float16)
        'fp32-dtype'
        >>> preset("torch").action("softmax.int", "cpu", torch.float16)
        'leave'
    """
    match name:
        case "standard":
            return Policy(_read("standard"), name)
        case "torch":
            return Policy(_registered(_read("torch")), name)
        case "torch-cuda":
            cuda = (rule for rule in _registered(_read("torch")) if rule.device == "cuda")
            return Policy((Rule(r.op, r.action, message=r.message) for r in cuda), name)
        case _:
            names = ", ".join(map(repr, PRESETS))
            raise ValueError(f"there is no policy preset {name!r}; the presets are {names}")


def _read(name: str) -> Iterator[Rule]:
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    for table in tomllib.loads(text)["rules"]:
        devices: Any = table.get("device")
        dtype = getattr(torch, table["dtype"]) if "dtype" in table else None
        for device in devices if isinstance(devices, list) else [devices]:
            for op in table["ops"]:
                message = table.get("message", "").strip()
                yield Rule(op, table["action"], device, dtype, message)


def _registered(rules: Iterator[Rule]) -> Iterator[Rule]:
    """Keep the rules whose op has an autocast kernel in the running version of PyTorch."""
    for rule in rules:
        assert rule.device is not None
        ops = _torch.overloads_with_autocast_kernel(rule.device)
        if any(rule.holds(op, rule.device, torch.bfloat16) for op in ops):
            yield rule
