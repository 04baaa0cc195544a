"""Telling modules their names, by which a policy has rules for them."""

import torch
from torch import nn

from halfstep._autocast.module_names import matching
from halfstep._autocast.policy import Policy
from halfstep._autocast.wrapping import require_parameters, wrap


def name_modules(model: nn.Module | None, policy: Policy) -> None:
    """Let the modules of ``model`` that ``policy`` has rules for look these up when they run.

    Raises:
        ValueError: There is no model, a rule is for no module of it, or the parameters of a module
            that is to be an island have another dtype.
        TypeError: ``model`` is something else.
    """
    if model is None:
        rules = "; ".join(map(str, policy.module_rules))
        raise ValueError(
            f"the policy has rules for modules ({rules}): pass the model that has them, "
            "autocast(..., module=model)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"autocast(module={type(model).__name__}): pass the model")
    for rule in policy.module_rules:
        for name, module in matching(model, rule.module or "", f"policy rule {rule}").items():
            if rule.is_for_whole_module and rule.action == "fp32":
                require_parameters(name, module, torch.float32)
            wrap(module)._path = name
