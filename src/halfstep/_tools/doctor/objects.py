"""Checks of the objects of training: model, optimizers and scaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.formats import FORMATS, dtype_name
from halfstep._common.numbers import things
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import Names, members
from halfstep._master_weights.master_weights import has_master_weights
from halfstep._scaler import GradScaler, Static
from halfstep._tools.doctor.finding import Finding, finding

_IDS = {torch.float16: "half-parameters", torch.bfloat16: "bf16-parameters"}
_EPS_NAMES = ("eps", "epsilon", "variance_epsilon")


@dataclass(frozen=True)
class Training:
    """The known objects of training."""

    model: nn.Module | None = None
    optimizers: tuple[Optimizer, ...] = ()
    scaler: Any = None  # halfstep's or PyTorch's
    dtype: torch.dtype | None = None  # the lower precision of autocast, if it is known

    def names(self, params: Iterable[Tensor], optimizer: Optimizer | None = None) -> list[str]:
        """Return the names of parameters."""
        names = Names()
        if self.model is not None:
            names.watch(self.model)
        return names.of(params, optimizer)

    @property
    def apart(self) -> list[Optimizer]:
        """The optimizers, with containers replaced by their members."""
        found = [member for optimizer in self.optimizers for member in members(optimizer)]
        return [each for each in dict.fromkeys(found) if len(members(each)) == 1]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of all optimizers."""
        return [param for optimizer in self.optimizers for param in parameters(optimizer)]

    @property
    def held(self) -> list[Tensor]:
        """The parameters of the model, or of the optimizers if the model is unknown."""
        return self.trained if self.model is None else list(self.model.parameters())

    @property
    def scales(self) -> bool:
        """Whether there is an enabled scaler."""
        return self.scaler is not None and bool(self.scaler.is_enabled())


def findings(training: Training) -> Iterator[Finding]:
    """Yield problems with the objects of training."""
    yield from _scalers(training)
    yield from _low_parameters(training)
    yield from _eps_of_optimizers(training)
    yield from _eps_of_modules(training)


# --- scaler and dtype -----------------------------------------------------------------------------


def _scalers(training: Training) -> Iterator[Finding]:
    dtype = training.dtype or _only_dtype(training)
    if training.dtype == torch.float16 and not training.scales:
        seen = "no scaler" if training.scaler is None else "a scaler that is switched off"
        yield finding("fp16-without-scaler", what=f"float16 with {seen}")
    is_guard = isinstance(training.scaler, GradScaler) and isinstance(
        training.scaler._schedule, Static
    )
    if dtype == torch.bfloat16 and training.scales and not is_guard:
        yield finding("scaler-with-bf16", what="a scaler for training", scaler="scaler")
    is_torch = type(training.scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
    if is_torch and training.scales:
        yield finding("torch-scaler")


def _only_dtype(training: Training) -> torch.dtype | None:
    dtypes = {param.dtype for param in training.held}
    return dtypes.pop() if len(dtypes) == 1 else None


# --- parameters in lower precision ----------------------------------------------------------------


def _low_parameters(training: Training) -> Iterator[Finding]:
    for dtype, id in _IDS.items():
        for optimizer in training.apart:
            low = [param for param in parameters(optimizer) if param.dtype == dtype]
            if low and not has_master_weights(optimizer):
                names = training.names(low, optimizer)
                what = (
                    f"{type(optimizer).__name__} updates {things(len(low), 'parameter')} in "
                    f"{dtype_name(dtype)} ({_listed(names)})"
                )
                yield finding(id, names=names, what=what, optimizer="optimizer", model="model")


def _eps_of_optimizers(training: Training) -> Iterator[Finding]:
    for optimizer in training.apart:
        if has_master_weights(optimizer):
            continue
        for group in optimizer.param_groups:
            eps, low = group.get("eps"), [p for p in group["params"] if p.dtype == torch.float16]
            # A fused optimizer adds eps in float32.
            if not low or group.get("fused") or not _is_lost(eps):
                continue
            names = training.names(low, optimizer)
            what = (
                f"eps={eps:g} of {type(optimizer).__name__} is {_in_fp16(eps):.2g} in float16, the "
                f"dtype of {things(len(low), 'parameter')} ({_listed(names)}) and of the "
                "optimizer's state: where a gradient is 0 the update is 0 / 0 = NaN"
            )
            code = "model.float()  # or eps=1e-4"
            yield finding(
                "eps-underflow", names=names, what=what, these="the parameters", code=code
            )


def _eps_of_modules(training: Training) -> Iterator[Finding]:
    if training.model is None:
        return
    all_low = _only_dtype(training) == torch.float16
    found: dict[float, list[str]] = {}
    for name, module in training.model.named_modules():
        own = {param.dtype for param in module.parameters(recurse=False)}
        if torch.float16 not in own and not (all_low and not list(module.children())):
            continue
        for attribute in _EPS_NAMES:
            eps = vars(module).get(attribute)
            if _is_lost(eps):
                found.setdefault(eps, []).append(name or type(module).__name__)
    for eps, names in found.items():
        what = (
            f"eps={eps:g} of {things(len(names), 'module')} in float16 ({_listed(names)}) is "
            f"{_in_fp16(eps):.2g} there: where all inputs are equal, the gradient is inf or NaN"
        )
        code = "\n".join(
            f"model.get_submodule({name!r}).float()\nhalfstep.keep(model, {name!r})"
            for name in names[:3]
        )
        yield finding("eps-underflow", names=names, what=what, these="these modules", code=code)


def _is_lost(eps: object) -> TypeGuard[float]:
    return isinstance(eps, float) and 0 < eps < FORMATS["fp16"].smallest_subnormal


def _in_fp16(eps: float) -> float:
    return torch.tensor(eps, dtype=torch.float16).item()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
