"""Export of islands as code that needs only PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from halfstep._autocast.rule import Rule, Rules
from halfstep._common.module_names import around, matching, without_wrappers

CODE = '''\
import torch


def run_in_float32(module):
    """Run a module in float32, under autocast or in a model of lower precision."""
    module.float()
    forward = module.forward

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value] if value.is_floating_point() else []
        items = value.values() if isinstance(value, dict) else value
        is_container = isinstance(value, (list, tuple, dict))
        return [tensor for item in items for tensor in tensors(item)] if is_container else []

    def cast(value, dtype):
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            items = {key: cast(item, dtype) for key, item in value.items()}
            return items if type(value) is dict else type(value)(**items)
        if isinstance(value, (list, tuple)):
            items = [cast(item, dtype) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def run(*args, **kwargs):
        given = tensors((args, kwargs))
        if not given:
            return forward(*args, **kwargs)
        device, dtype = given[0].device.type, given[0].dtype
        is_on = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False):
            result = forward(*cast(args, torch.float32), **cast(kwargs, torch.float32))
        return result if is_on else cast(result, dtype)

    module.forward = run


'''
"""The effect of a policy on an island; without autocast the result has the input dtype."""


def exported(policy: Rules, model: nn.Module, dtype: torch.dtype) -> str:
    """Return code that keeps the modules with rules in float32.

    Raises:
        ValueError: A rule cannot be applied to whole modules.
    """
    for rule in policy.module_rules:
        matching(model, rule.module or "", f"policy rule {rule}")
        if rule.action not in ("fp32", "fp32-dtype", "leave"):
            raise ValueError(f"rule {str(rule)!r} cannot be exported: {_ONLY_MODULES}")
    islands = dict(_outermost_islands(policy, model, dtype))
    if not islands:
        raise ValueError(f"the policy {policy} keeps no module in float32: {_ONLY_MODULES}")
    lines = [f"run_in_float32(model.get_submodule({name!r}))" for name in islands]
    notes = [f"  # instead of {rule}" if rule.op else "" for rule in islands.values()]
    return CODE + "\n".join(map(str.__add__, lines, notes)) + "\n"


_ONLY_MODULES = (
    "without halfstep only whole modules can be kept in float32 ('@head:fp32'), and ops of modules "
    "as the whole module ('softmax@blocks.*.attn:fp32')"
)


def _outermost_islands(
    policy: Rules, model: nn.Module, dtype: torch.dtype
) -> Iterator[tuple[str, Rule]]:
    """Yield the names of the outermost modules to keep in float32, with their rules."""
    param = next(model.parameters(), None)
    device = "cpu" if param is None else param.device.type
    found: set[str] = set()
    for path, _ in model.named_modules():
        name = without_wrappers(path)
        if not name or found & set(around(name)):
            continue
        of_ops = (
            rule
            for rule in policy.module_rules
            if rule.op and rule.is_about(name) and rule.holds_where(device, dtype, "train")
        )
        rule = policy.island(name, device, dtype) or next(of_ops, None)
        if rule is not None and rule.action != "leave":
            found.add(name)
            yield path, rule
