"""Carrying out a policy: kernels at PyTorch's Autocast dispatch keys.

The dispatcher calls the kernel of an op at ``AutocastCPU``, ``AutocastCUDA``, ... when an argument
lives on that device and autocast is on for it. There, above autograd, casts are differentiated,
and composites written in C++ (attention, recurrent layers) are seen too.

PyTorch has kernels of its own at these keys. A :class:`Plan` names only the ops for which a policy
wants something else; kernels of ours are registered for those, the first time that a policy needs
them, and stay. A kernel of ours asks which plan is active in its thread and, when there is none or
the plan does not name its op, does what PyTorch would have done.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from halfstep import _torch
from halfstep._torch import Kernel
from halfstep.casting import functorch, op_names, scopes
from halfstep.casting.casts import Float64Met, cast, cast_any, cast_weights, is_eligible, widest
from halfstep.casting.op_names import WITH_DTYPE, overload
from halfstep.casting.policy import Policy, preset
from halfstep.casting.rule import LOWER_PRECISIONS, PHASES, Action, Phase, Rule

# What a policy does to each op, where PyTorch's autocast does something else.
Plan = dict[str, Kernel]


class PolicyOnDevice:
    """What a policy does on one device type: a plan for each lower precision, made when asked for.

    Args:
        policy: the policy.
        device: the device type.
        native: whether PyTorch's own kernels carry out the rules that they agree with.
        number: what :func:`prepared` finds it by.
    """

    def __init__(self, policy: Policy, device: str, *, native: bool, number: int) -> None:
        self.policy = policy
        self.device = device
        self.number = number
        self._native = native
        self._ruled = op_names.meant_by(policy.rules)
        self._has_phases = any(rule.phase is not None for rule in policy.rules)
        self._plans: dict[Phase, dict[torch.dtype, Plan]] = {phase: {} for phase in PHASES}
        self._casts: dict[tuple[torch.dtype, Phase], Plan] = {}

    def plan(self) -> Plan:
        """Return the plan for the lower precision and the phase of this thread."""
        dtype = torch.get_autocast_dtype(self.device)
        if self._has_phases and not torch.is_grad_enabled():
            return self.plan_for(dtype, "eval")
        return self._plans["train"].get(dtype) or self.plan_for(dtype, "train")

    def casts(self) -> Plan:
        """Return all that the policy does now, by our kernels, also where PyTorch's agree."""
        is_eval = self._has_phases and not torch.is_grad_enabled()
        now: tuple[torch.dtype, Phase]
        now = torch.get_autocast_dtype(self.device), "eval" if is_eval else "train"
        casts = self._casts.get(now)
        if casts is None:
            casts = self._casts[now] = self._all_casts(*now)
        return casts

    def plan_for(self, dtype: torch.dtype, phase: Phase) -> Plan:
        """Return the plan for a lower precision and a phase."""
        plan = self._plans[phase].get(dtype)
        if plan is None:
            plan = self._plans[phase][dtype] = self._plan(dtype, phase)
        return plan

    def ops(self) -> set[str]:
        """Return the overloads that some plan names."""
        phases = PHASES if self._has_phases else PHASES[:1]
        return {op for dtype in LOWER_PRECISIONS for p in phases for op in self.plan_for(dtype, p)}

    def table(self) -> frozenset[str]:
        """Return the overloads that the policy rules or PyTorch casts."""
        return _torch.overloads_with_autocast_kernel(self.device) | self._ruled

    def _all_casts(self, dtype: torch.dtype, phase: Phase) -> Plan:
        rules = {op: self.policy.rule(op, self.device, dtype, phase) for op in self._ruled}
        return {
            op: _carry_out(rule, op, self.device, dtype)
            for op, rule in rules.items()
            if rule is not None and rule.action != "leave"
        }

    def _plan(self, dtype: torch.dtype, phase: Phase) -> Plan:
        plan: Plan = {}
        by_pytorch = _torch.overloads_with_autocast_kernel(self.device)
        for op in sorted(self.table()):
            rule = self.policy.rule(op, self.device, dtype, phase) or Rule(op, "leave")
            theirs = _pytorchs_action(op, self.device, dtype) if op in by_pytorch else "leave"
            is_native = self._native and _is_native(rule, theirs)
            if not is_native and (rule.action, theirs) != ("leave", "leave"):
                lowers = self._native and rule.action == theirs == "lower"
                carry_out = _lower if lowers else partial(_carry_out, rule)
                plan[op] = carry_out(op, self.device, dtype)
        return plan


@contextmanager
def only_our_kernels() -> Iterator[None]:
    """Let contexts made meanwhile carry out every rule with halfstep's kernels.

    For tests and for comparing: PyTorch's kernels are faster and do the same. Holds for the whole
    process.
    """
    global _native
    before, _native = _native, False
    try:
        yield
    finally:
        _native = before


_native = True
_numbers: dict[tuple[Policy, str, bool], int] = {}
_prepared: list[PolicyOnDevice] = []
_lock = threading.Lock()


def prepare(policy: Policy, device: str) -> int:
    """Make ``policy`` ready on ``device``: register every kernel that it needs.

    Returns:
        The number by which :func:`prepared` finds it.

    Raises:
        ValueError: a rule names an op that does not exist.
    """
    key = (policy, device, _native)
    with _lock:
        if key not in _numbers:
            op_names.check(policy.rules)
            on_device = PolicyOnDevice(policy, device, native=_native, number=len(_prepared))
            for op in sorted(on_device.ops()):
                _register(op, device)
            functorch.register(on_device.table())
            _torch.wrap_recomputed(scopes.carry)
            _prepared.append(on_device)
            _numbers[key] = on_device.number
        return _numbers[key]


def prepared(number: int) -> PolicyOnDevice:
    """Return what :func:`prepare` made."""
    return _prepared[number]


def _is_native(rule: Rule, theirs: Action) -> bool:
    """Say whether PyTorch's own kernel does what a rule says."""
    match theirs:
        case "lower":  # PyTorch's cache may give an old cast of a weight
            return False
        case "promote":  # PyTorch's promotion refuses the other half precision
            return rule in preset("torch").rules
    return rule.action == theirs


def _pytorchs_action(op: str, device: str, dtype: torch.dtype) -> Action:
    return preset("torch").action(op, device, dtype)


# --- kernels --------------------------------------------------------------------------------------


@cache
def _register(name: str, device: str) -> None:
    """Register our kernel for one overload at the Autocast key of ``device``, once."""
    key = _torch.autocast_key(device)
    op = overload(name)
    pytorch = _pytorch_kernel(name, device)

    @_torch.do_not_compile_alone
    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        policy = scopes.current().policies.get(device)
        if policy is None:
            return pytorch(keys, *args, **kwargs)
        return policy.plan().get(name, pytorch)(keys, *args, **kwargs)

    _torch.register_kernel(op, key, kernel)


@cache  # once our kernel is registered, it would be the answer
def _pytorch_kernel(name: str, device: str) -> Kernel:
    """Return what PyTorch does at the Autocast key of ``device``: cast, or nothing."""
    op, key = overload(name), _torch.autocast_key(device)
    if _torch.has_kernel(op, key):
        kernel: Kernel = torch.library.get_kernel(op, key).call_boxed
        return kernel
    return _leave(name, device)


def _leave(name: str, device: str) -> Kernel:
    """Go on to the next key. Autocast stays on: a composite's inner ops have their own rules."""
    op = overload(name)
    below = _torch.keys_below(_torch.autocast_key(device))

    def leave(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys & below, *args, **kwargs)

    return leave


def _carry_out(rule: Rule, name: str, device: str, dtype: torch.dtype) -> Kernel:
    """Return the kernel that carries out ``rule`` for the overload ``name``."""
    match rule.action:
        case "lower":
            return _cast_to(name, device, dtype)
        case "fp32":
            return _cast_to(name, device, torch.float32)
        case "fp32-dtype":
            return _ask_for_fp32(name, device)
        case "promote":
            return _promote(name, device)
        case "destination":
            return _cast_to_destination(name, device)
        case "refuse":
            return _refuse(rule)
        case "leave":
            return _leave(name, device)


def _lower(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """As ``_cast_to``: weights from our cache, the rest by PyTorch's kernel, which is faster."""
    pytorch = _pytorch_kernel(name, device)
    in_float64 = _promote(name, device)

    def lower(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        is_cache_on = torch.is_autocast_cache_enabled()
        try:
            casts = [cast_weights(arg, device, dtype) for arg in args]
            torch.set_autocast_cache_enabled(False)  # PyTorch's, for the rest
            return pytorch(keys, *casts, **kwargs)
        except Float64Met:
            return in_float64(keys, *args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(is_cache_on)

    return lower


def _cast_to(name: str, device: str, dtype: torch.dtype) -> Kernel:
    op = _torch.callable_of(overload(name))
    autocast = _torch.key_set(_torch.autocast_key(device))
    in_float64 = _promote(name, device)

    def cast_to(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with _torch.exclude_keys(autocast):
            try:
                casts = [cast(arg, device, dtype) for arg in args]
                named = {key: cast(arg, device, dtype) for key, arg in kwargs.items()}
            except Float64Met:
                return in_float64(keys, *args, **kwargs)
            return op(*casts, **named)

    return cast_to


def _promote(name: str, device: str) -> Kernel:
    op = _torch.callable_of(overload(name))
    autocast = _torch.key_set(_torch.autocast_key(device))

    def promote(_: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # None means that there is nothing to cast.
        dtype = widest((*args, *kwargs.values()), device) or torch.float32
        with _torch.exclude_keys(autocast):
            return op(
                *(cast(arg, device, dtype) for arg in args),
                **{key: cast(arg, device, dtype) for key, arg in kwargs.items()},
            )

    return promote


def _cast_to_destination(name: str, device: str) -> Kernel:
    op = _torch.callable_of(overload(name))
    autocast = _torch.key_set(_torch.autocast_key(device))

    def cast_to_destination(
        _: torch._C.DispatchKeySet, destination: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _torch.exclude_keys(autocast):
            if not destination.is_floating_point():
                return op(destination, *args, **kwargs)
            dtype = destination.dtype
            return op(
                destination,
                *(cast_any(arg, device, dtype) for arg in args),
                **{key: cast_any(arg, device, dtype) for key, arg in kwargs.items()},
            )

    return cast_to_destination


def _ask_for_fp32(name: str, device: str) -> Kernel:
    op = overload(name)
    with_dtype = overload(WITH_DTYPE.get(name, name))
    names = [argument.name for argument in with_dtype._schema.arguments][1:]
    # The dispatcher leaves out arguments that have their default; with_dtype may have none.
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    autocast = _torch.key_set(_torch.autocast_key(device))

    def ask_for_fp32(_: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with _torch.exclude_keys(autocast):
            if not is_eligible(args[0], device):
                return op(*args, **kwargs)
            named = defaults | dict(zip(names, args[1:], strict=False)) | kwargs
            named["dtype"] = named.get("dtype") or torch.float32
            return with_dtype(args[0], **named)

    return ask_for_fp32


def _refuse(rule: Rule) -> Kernel:
    def refuse(_: torch._C.DispatchKeySet, *__: Any, **___: Any) -> Any:
        raise RuntimeError(rule.message)

    return refuse
