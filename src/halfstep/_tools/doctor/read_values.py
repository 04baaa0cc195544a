"""The values of expressions in source: literals, dtypes, autocasts, scalers and optimizers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from halfstep._common.formats import dtype_name
from halfstep._tools.doctor.read_names import FileNames, NameScope, Written, dotted

_Seen: TypeAlias = frozenset[tuple[str, NameScope]]
_MISSING: Any = object()
_OPTIMIZERS = ("torch.optim.", "apex.optimizers.", "bitsandbytes.optim.")
_OF_OPTIMIZERS = re.compile(r".*optim|opt$|opt_|.*_opt$")  # and not "options"


@dataclass(frozen=True)
class SourceAutocast:
    """An autocast, as far as the source shows it."""

    dtype: str  # "float16", "bfloat16"; empty if uncertain
    enabled: bool | None  # None if uncertain
    device: str = ""  # "cuda", "cpu"; empty if uncertain
    switch: str = ""  # the source of ``enabled``


@dataclass(frozen=True)
class SourceScaler:
    """A GradScaler, as far as the source shows it."""

    enabled: bool | None  # None if uncertain
    is_guard: bool = False  # it only skips steps: GradScaler(1.0, schedule=Static())
    line: int = 0  # where it is created; 0 if elsewhere
    switch: str = ""  # the source of ``enabled``


_AUTOCASTS = re.compile(r"^(?!.*(disabl|no_|without|enabled|get_)).*auto_?cast(?!\w*dtype)", re.I)
"""A pattern for functions that return an autocast, such as ``smart_amp_autocast``."""

_T = TypeVar("_T")
_Context = TypeVar("_Context", SourceAutocast, SourceScaler)


class Meaning:
    """The possible values of the expressions of a file, and the training objects among them."""

    def __init__(self, tree: ast.Module) -> None:
        self.names = FileNames(tree)

    def candidates(self, node: ast.expr, scope: NameScope) -> list[Written | None]:
        """Return the expressions that ``node`` may stand for, None for unknown ones."""
        return list(self._follow(node, scope, frozenset()))

    def _follow(self, node: ast.expr, scope: NameScope, seen: _Seen) -> Iterator[Written | None]:
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                yield from self._follow(body, scope, seen)
                yield from self._follow(orelse, scope, seen)
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self._follow(value, scope, seen)
            case ast.NamedExpr(value=value):
                yield from self._follow(value, scope, seen)
            case ast.Name() | ast.Attribute():
                yield from self._follow_name(node, scope, seen)
            case ast.Call(func=ast.Name() | ast.Attribute()):
                yield self._filled(node, scope, seen) or (node, scope)
            case _:
                yield node, scope

    def _filled(self, node: ast.Call, scope: NameScope, seen: _Seen) -> Written | None:
        """Return the call that a call of a ``functools.partial`` makes, None for other calls."""
        for made in self._follow(node.func, scope, seen):
            match made:
                case (ast.Call(func=called, args=[first, *args], keywords=keywords), where):
                    if self._qualified_as_written(called) == "functools.partial":
                        given = {keyword.arg for keyword in node.keywords}
                        kept = [keyword for keyword in keywords if keyword.arg not in given]
                        call = ast.Call(first, [*args, *node.args], [*kept, *node.keywords])
                        return ast.copy_location(call, node), where
        return None

    def _follow_name(
        self, node: ast.Name | ast.Attribute, scope: NameScope, seen: _Seen
    ) -> Iterator[Written | None]:
        text = dotted(node)
        bound = scope.lookup(text) or self.names.attributes.get(text, [])
        if not bound:
            yield node, scope
        elif (text, scope) not in seen:
            for each in bound:
                if each is None:
                    yield None
                else:
                    yield from self._follow(*each, seen | {(text, scope)})

    def qualified(self, node: ast.expr, scope: NameScope) -> str:
        """Return the full name of an expression, ``torch.cuda.amp.autocast``; empty if unknown."""
        return _only(self._qualified_as_written(e[0]) for e in self.candidates(node, scope) if e)

    def _qualified_as_written(self, node: ast.expr) -> str:
        first, *rest = dotted(node).split(".")
        if first in self.names.imports:
            return ".".join([self.names.imports[first], *rest])
        is_from_star = first == "torch" and "*" in self.names.imports
        return dotted(node) if is_from_star else ""

    def dtype(self, node: ast.expr, scope: NameScope) -> str:
        """Return the name of a dtype, ``"float16"``; empty if uncertain."""
        candidates = self.candidates(node, scope)
        return _only(self._dtype_as_written(each[0]) if each else "" for each in candidates)

    def _dtype_as_written(self, node: ast.expr) -> str:
        found = getattr(torch, self._qualified_as_written(node).removeprefix("torch."), None)
        return dtype_name(found) if isinstance(found, torch.dtype) else ""

    def constant(self, node: ast.expr, scope: NameScope) -> Any:
        """Return the value of a literal; None if uncertain."""
        first, *others = [
            _literal(candidate[0]) if candidate else _MISSING
            for candidate in self.candidates(node, scope)
        ] or [_MISSING]
        is_certain = first is not _MISSING and all(value == first for value in others)
        return first if is_certain else None

    # --- autocasts, scalers, optimizers and schedules ---------------------------------------------

    def autocast(self, node: ast.expr, scope: NameScope) -> SourceAutocast | None:
        """Return the autocast that ``node`` may stand for, None if there is none."""
        return _certain(self._each(node, scope, self._autocast_as_written), dtype="", device="")

    def scaler(self, node: ast.expr, scope: NameScope) -> SourceScaler | None:
        """Return the scaler that ``node`` stands for, None if it is not known to be one."""
        found = self._each(node, scope, self._scaler_as_written)
        return _certain(found, is_guard=True)

    def is_scaler(self, node: ast.expr, scope: NameScope, key: str = "") -> bool:
        """Return whether ``node`` is a scaler, or ``node`` or its key is named like one.

        Scalers of other libraries do not count, since their methods differ.
        """
        is_named = any(name.endswith("scaler") for name in (_last_name(node), key.lower()))

        def makes_other(call: ast.Call, scope: NameScope) -> bool:
            name = self.qualified(call.func, scope)
            return name.rpartition(".")[2][:1].isupper() and not name.endswith("GradScaler")

        if is_named and not self._is_made_by(makes_other, node, scope):
            return True
        return self.scaler(node, scope) is not None

    def may_be_on(self, scaler: ast.expr, scope: NameScope) -> bool:
        """Return whether a scaler is not known to be switched off."""
        found = self.scaler(scaler, scope)
        return found is None or found.enabled is not False

    def is_optimizer(self, node: ast.expr, scope: NameScope, key: str = "") -> bool:
        """Return whether ``node`` is an optimizer, or ``node`` or its key is named like one."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            return False  # such as the schedule in `optimizers[parameter][1]`
        last = re.split(r"[./]", re.sub(r"\[.*?\]$", "", key))[-1].lower()
        if any(map(_OF_OPTIMIZERS.match, (_last_name(node), last))):
            return True
        return self._is_made_by(self.makes_optimizer, node, scope)

    def makes_optimizer(self, call: ast.Call, scope: NameScope) -> bool:
        """Return whether a call creates an optimizer without master weights."""
        name = self.qualified(call.func, scope)
        is_class = name.rpartition(".")[2][:1].isupper()
        return name.startswith(_OPTIMIZERS) and "lr_scheduler" not in name and is_class

    def makes_scaler(self, call: ast.Call, scope: NameScope) -> bool:
        """Return whether a call creates a scaler that is not switched off."""
        made = self._scaler_as_written(call, scope)
        return made is not None and made.enabled is not False

    def is_scheduler(self, node: ast.expr, scope: NameScope) -> bool:
        """Return whether ``node`` is a learning rate schedule, or is named like one."""

        def makes_scheduler(call: ast.Call, scope: NameScope) -> bool:
            return self.qualified(call.func, scope).startswith("torch.optim.lr_scheduler.")

        return "sched" in _last_name(node) or self._is_made_by(makes_scheduler, node, scope)

    def switches_grad(self, node: ast.expr, scope: NameScope) -> bool | None:
        """Return whether a context or decorator records gradients, None if unchanged or unknown."""
        called = node.func if isinstance(node, ast.Call) else node
        name = self.qualified(called, scope).rpartition(".")[2]
        if name == "set_grad_enabled" and isinstance(node, ast.Call) and node.args:
            return self._flag(node.args[0], scope)
        return {"no_grad": False, "inference_mode": False, "enable_grad": True}.get(name)

    # --- as written -------------------------------------------------------------------------------

    def _each(
        self, node: ast.expr, scope: NameScope, look: Callable[[ast.expr, NameScope], _T | None]
    ) -> list[_T | None]:
        return [
            look(*candidate) if candidate else None for candidate in self.candidates(node, scope)
        ]

    def _is_made_by(
        self, makes: Callable[[ast.Call, NameScope], bool], node: ast.expr, scope: NameScope
    ) -> bool:
        candidates = filter(None, self.candidates(node, scope))
        return any(
            isinstance(each, ast.Call) and makes(each, within) for each, within in candidates
        )

    def _autocast_as_written(self, node: ast.expr, scope: NameScope) -> SourceAutocast | None:
        name = self._maker(node, scope)
        if not isinstance(node, ast.Call):
            return None
        if name.rpartition(".")[2] != "autocast":
            uses_torch = any(each.startswith("torch") for each in self.names.imports.values())
            is_wrapper = uses_torch and bool(_AUTOCASTS.search(dotted(node.func)))
            switch = argument(node, "enabled")
            is_on = None if switch is None else self._flag(switch, scope)
            return SourceAutocast("", is_on) if is_wrapper else None
        device = _device_in(name)
        # torch.cuda.amp.autocast(enabled, dtype), or autocast(device_type, dtype, enabled)
        enabled, dtype = argument(node, "enabled", 0 if device else 2), argument(node, "dtype", 1)
        device_type = None if device else argument(node, "device_type", 0)
        if device_type is not None:
            device = str(self.constant(device_type, scope)).partition(":")[0]
        if dtype is None or (isinstance(dtype, ast.Constant) and dtype.value is None):
            lower = {"cuda": "float16", "cpu": "bfloat16"}.get(device, "")
        else:
            lower = self.dtype(dtype, scope)
        return SourceAutocast(
            lower,
            self._flag(enabled, scope),
            device if device in ("cuda", "cpu") else "",
            self.switch("" if enabled is None else ast.unparse(enabled), scope),
        )

    def _scaler_as_written(self, node: ast.expr, scope: NameScope) -> SourceScaler | None:
        name = self._maker(node, scope)
        if not isinstance(node, ast.Call) or not name.endswith("GradScaler"):
            return None
        first = 0 if _device_in(name) else 1  # after the device
        schedule = argument(node, "schedule")
        is_static = isinstance(schedule, ast.Call) and dotted(schedule.func).endswith("Static")
        given = argument(node, "enabled", first + 4)
        return SourceScaler(
            self._flag(given, scope),
            is_static,
            node.lineno,
            self.switch("" if given is None else ast.unparse(given), scope),
        )

    def switch(self, text: str, scope: NameScope) -> str:
        """Return the source of a switch, resolved through names that are bound once."""
        seen = [""]
        while text not in seen:
            seen.append(text)
            bound = scope.lookup(text) or self.names.attributes.get(text, [])
            if len(bound) == 1 and bound[0]:
                text, scope = ast.unparse(bound[0][0]), bound[0][1]
        return seen[-1]

    def _maker(self, node: ast.expr, scope: NameScope) -> str:
        """Return the full name of the function of halfstep or PyTorch that a call may call.

        Other alternatives are ignored, as in ``(autocast if amp else nullcontext)()``.
        """
        called = self.candidates(node.func, scope) if isinstance(node, ast.Call) else []
        names = (self._qualified_as_written(each[0]) for each in called if each)
        return _only(name for name in names if name.startswith(("torch.", "halfstep.")))

    def _flag(self, node: ast.expr | None, scope: NameScope) -> bool | None:
        if node is None:
            return True
        value = self.constant(node, scope)
        return bool(value) if isinstance(value, bool | int) else None


def _only(names: Iterable[str]) -> str:
    found = set(names)
    return found.pop() if len(found) == 1 else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return _MISSING


def argument(call: ast.Call, name: str, position: int = -1) -> ast.expr | None:
    """Return the argument of a call by name or position (-1: by name only)."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    before = call.args[: position + 1]
    is_given = 0 <= position < len(call.args)
    is_certain = not any(isinstance(arg, ast.Starred) for arg in before)
    return before[-1] if is_given and is_certain else None


def _device_in(name: str) -> str:
    """Return the device type in ``torch.cuda.amp.autocast``, empty for other names."""
    return next((part for part in ("cuda", "cpu") if f".{part}.amp." in name), "")


def _last_name(node: ast.expr) -> str:
    return dotted(node).rpartition(".")[2].lower()


def _certain(found: Sequence[_Context | None], **uncertain: Any) -> _Context | None:
    """Return the first known alternative, with the given values for what alternatives differ in."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    differing = [name for name in uncertain if len({getattr(one, name) for one in known}) > 1]
    changes = {name: uncertain[name] for name in differing}
    enabled = {None if one is None else one.enabled for one in found}
    return replace(known[0], enabled=enabled.pop() if len(enabled) == 1 else None, **changes)
