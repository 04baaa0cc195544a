"""The meaning of expressions in source: an autocast, a scaler, an optimizer, a schedule."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from halfstep._autocast import autocast
from halfstep._doctor.read_names import NameScope, Values, argument, dotted
from halfstep._scaler import GradScaler

_T = TypeVar("_T")

_OPTIMIZERS = ("torch.optim.", "apex.optimizers.", "bitsandbytes.optim.")


@dataclass(frozen=True)
class SourceAutocast:
    """An autocast, as far as the source shows it.

    Attributes:
        dtype: ``"float16"``, ``"bfloat16"``; empty if it is not certain.
        enabled: None if it is not certain.
        is_torch: Whether it is PyTorch's, whose casts of weights end with it.
    """

    dtype: str
    enabled: bool | None
    is_torch: bool


@dataclass(frozen=True)
class SourceScaler:
    """A GradScaler, as far as the source shows it.

    Attributes:
        is_torch: Whether it is PyTorch's.
        enabled: None if it is not certain.
        is_guard: Whether it only skips steps: ``GradScaler(1.0, rule=Static())``.
        line: The line that makes it; 0 if it is made elsewhere.
    """

    is_torch: bool
    enabled: bool | None
    is_guard: bool = False
    line: int = 0


class Meaning:
    """Recognizes expressions of a file.

    Args:
        values: Follows names.
    """

    def __init__(self, values: Values) -> None:
        self.values = values

    def autocast(self, node: ast.expr, scope: NameScope) -> SourceAutocast | None:
        """Return the autocast that ``node`` may be; None if it is none."""
        found = self._each(node, scope, self._autocast_as_written)
        each = [one for one in found if one is not None]
        if not each:
            return None
        alike = {one.dtype for one in each}
        dtype = alike.pop() if len(alike) == 1 else ""
        certain = {one.enabled for one in each}
        enabled = certain.pop() if len(certain) == 1 and len(each) == len(found) else None
        return replace(each[0], dtype=dtype, enabled=enabled)

    def scaler(self, node: ast.expr, scope: NameScope) -> SourceScaler | None:
        """Return the scaler that ``node`` is; None if it is not known to be one."""
        found = self._each(node, scope, self._scaler_as_written)
        each = [scaler for scaler in found if scaler is not None]
        if not each:
            return None
        certain = {scaler.enabled for scaler in each}
        enabled = certain.pop() if len(certain) == 1 and len(each) == len(found) else None
        return replace(each[0], enabled=enabled)

    def is_scaler(self, node: ast.expr, scope: NameScope) -> bool:
        """Return whether ``node`` is a scaler, or has the name of one."""
        last = dotted(node).rpartition(".")[2].lower()
        return last.endswith("scaler") or self.scaler(node, scope) is not None

    def is_optimizer(self, node: ast.expr, scope: NameScope) -> bool:
        """Return whether ``node`` is an optimizer, or has the name of one."""
        last = dotted(node).rpartition(".")[2].lower()
        if "optim" in last or last == "opt" or last.startswith("opt_") or last.endswith("_opt"):
            return True
        return self._is(node, scope, torch.optim.Optimizer, self.makes_optimizer)

    def makes_optimizer(self, call: ast.Call, scope: NameScope) -> bool:
        """Return whether a call makes an optimizer without master weights."""
        name = self.values.qualified(call.func, scope)
        is_class = name.rpartition(".")[2][:1].isupper()
        return name.startswith(_OPTIMIZERS) and "lr_scheduler" not in name and is_class

    def is_scheduler(self, node: ast.expr, scope: NameScope) -> bool:
        """Return whether ``node`` is a schedule of learning rates, or has the name of one."""
        if "sched" in dotted(node).rpartition(".")[2].lower():
            return True
        return self._is(node, scope, torch.optim.lr_scheduler.LRScheduler, self._makes_scheduler)

    def switches_grad(self, node: ast.expr, scope: NameScope) -> bool | None:
        """Return whether a context or decorator records gradients; None if it changes nothing."""
        called = node.func if isinstance(node, ast.Call) else node
        name = self.values.qualified(called, scope).rpartition(".")[2]
        if name == "set_grad_enabled" and isinstance(node, ast.Call) and node.args:
            return self._flag(node.args[0], scope)
        return {"no_grad": False, "inference_mode": False, "enable_grad": True}.get(name)

    # --- as written -------------------------------------------------------------------------------

    def _each(
        self, node: ast.expr, scope: NameScope, look: Callable[[ast.expr, NameScope], _T | None]
    ) -> list[_T | None]:
        return [look(*each) if each else None for each in self.values.candidates(node, scope)]

    def _is(
        self,
        node: ast.expr,
        scope: NameScope,
        kind: type,
        is_made_by: Callable[[ast.Call, NameScope], bool],
    ) -> bool:
        def look(node: ast.expr, scope: NameScope) -> bool:
            if isinstance(node, ast.Call):
                return is_made_by(node, scope)
            return isinstance(self.values.object(node), kind)

        return any(self._each(node, scope, look))

    def _makes_scheduler(self, call: ast.Call, scope: NameScope) -> bool:
        return self.values.qualified(call.func, scope).startswith("torch.optim.lr_scheduler.")

    def _autocast_as_written(self, node: ast.expr, scope: NameScope) -> SourceAutocast | None:
        known = self.values.object(node)
        if isinstance(known, torch.autocast):
            return SourceAutocast(str(known.fast_dtype).removeprefix("torch."), None, True)
        if isinstance(known, autocast):
            switches = known._settings.switches
            return SourceAutocast(
                str(switches.dtype).removeprefix("torch."), switches.enabled, False
            )
        if not isinstance(node, ast.Call):
            return None
        name = self.values.qualified(node.func, scope)
        root, last = name.partition(".")[0], name.rpartition(".")[2]
        if last != "autocast" or root not in ("torch", "halfstep"):
            return None
        device = next((part for part in ("cuda", "cpu") if f".{part}.amp." in name), "")
        if device:  # torch.cuda.amp.autocast(enabled, dtype)
            enabled, dtype = argument(node, "enabled", 0), argument(node, "dtype", 1)
        else:
            enabled, dtype = argument(node, "enabled", 2), argument(node, "dtype", 1)
            device_type = argument(node, "device_type", 0)
            if device_type is not None:
                device = str(self.values.constant(device_type, scope))
        is_none = isinstance(dtype, ast.Constant) and dtype.value is None
        if dtype is None or is_none:
            lower = {"cuda": "float16", "cpu": "bfloat16"}.get(device, "")
        else:
            lower = self.values.dtype(dtype, scope)
        return SourceAutocast(lower, self._flag(enabled, scope), root == "torch")

    def _scaler_as_written(self, node: ast.expr, scope: NameScope) -> SourceScaler | None:
        known = self.values.object(node)
        if isinstance(known, GradScaler | torch.amp.GradScaler):
            is_torch = isinstance(known, torch.amp.GradScaler)
            return SourceScaler(is_torch, known.is_enabled())
        if not isinstance(node, ast.Call):
            return None
        name = self.values.qualified(node.func, scope)
        root, last = name.partition(".")[0], name.rpartition(".")[2]
        if not last.endswith("GradScaler") or root not in ("torch", "halfstep"):
            return None
        position = 4 if ".cuda.amp." in name or ".cpu.amp." in name else 5
        rule = argument(node, "rule", -1)
        is_static = isinstance(rule, ast.Call) and dotted(rule.func).endswith("Static")
        enabled = self._flag(argument(node, "enabled", position), scope)
        return SourceScaler(root == "torch", enabled, is_static, node.lineno)

    def _flag(self, node: ast.expr | None, scope: NameScope) -> bool | None:
        if node is None:
            return True
        value = self.values.constant(node, scope)
        return bool(value) if isinstance(value, bool | int) else None
