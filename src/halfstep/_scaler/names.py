"""Names of parameters in messages and outcomes: that in a module, else the place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep._scaler.optimizers import members


class Names:
    """Names of parameters, from the modules that a scaler watches.

    The modules are held weakly and asked when a name is wanted, so that it costs nothing before,
    and parameters that were replaced meanwhile are found.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Take names from this module too."""
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"watch({type(module).__name__}): pass the torch.nn.Module whose parameters are "
                "trained"
            )
        if module not in self.modules():
            self._modules.append(weakref.ref(module))

    def modules(self) -> list[torch.nn.Module]:
        """Return the watched modules that still exist."""
        return [module for ref in self._modules if (module := ref()) is not None]

    def of(self, params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Return a name for each parameter.

        In this order: the qualified name in a watched module; the name that the optimizer was given
        (``named_parameters()`` instead of ``parameters()``); the place in its groups.
        """
        known = _places(optimizer) | self._qualified(optimizer)
        return [
            known.get(id(param), f"parameter {index} of shape {list(param.shape)}")
            for index, param in enumerate(params)
        ]

    def layers_of(
        self, params: Iterable[Tensor], optimizer: torch.optim.Optimizer | None
    ) -> list[str]:
        """Return for each parameter the name of its module: ``blocks.0.fc`` for its weight."""
        known = self._qualified(optimizer)
        params = list(params)
        unknown = [index for index, param in enumerate(params) if id(param) not in known]
        if unknown:
            raise ValueError(
                f"per='layer' needs the names of the parameters, and {len(unknown)} of "
                f"{len(params)} have none (the first is number {unknown[0]}, of shape "
                f"{list(params[unknown[0]].shape)}): call scaler.watch(model), or make the "
                "optimizer with model.named_parameters()"
            )
        return [known[id(param)].rpartition(".")[0] for param in params]

    def _qualified(self, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
        known: dict[int, str] = {}
        for each in [] if optimizer is None else members(optimizer):
            for group in each.param_groups:
                names = group.get("param_names", [])
                known.update(zip(map(id, group["params"]), names, strict=False))
        modules, qualified = self.modules(), dict[int, str]()
        for number, module in enumerate(modules):
            # Two modules may have parameters of the same name.
            prefix = f"{type(module).__name__}[{number}]." if len(modules) > 1 else ""
            for name, param in module.named_parameters():
                # Without what torch.compile's wrapper adds.
                qualified.setdefault(id(param), prefix + name.replace("_orig_mod.", ""))
        return known | qualified


def _places(optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    found: dict[int, str] = {}
    for number, each in enumerate([] if optimizer is None else members(optimizer)):
        # Those of a container without groups of its own are told apart by their class.
        where = "" if each is optimizer else f"{type(each).__name__}[{number}]."
        for group_index, group in enumerate(each.param_groups):
            for index, param in enumerate(group["params"]):
                place = f"{where}param_groups[{group_index}]['params'][{index}]"
                found.setdefault(id(param), place)
    return found
