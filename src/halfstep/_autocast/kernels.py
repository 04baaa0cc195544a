"""Policies carried out: kernels at PyTorch's Autocast dispatch keys.

The dispatcher calls the kernel of an op at ``AutocastCPU``, ``AutocastCUDA``, ... when an argument
lives on that device and autocast is on for it. There, above autograd, casts are differentiated,
and composites written in C++ (attention, recurrent layers) are seen too.

PyTorch has kernels of its own at these keys. A :class:`Plan` names only the ops for which a policy
wants something else; kernels of ours are registered for those, the first time that a policy needs
them, and stay. A kernel of ours asks which plan is active in its thread and, when there is none or
the plan does not name its op, does what PyTorch would have done.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property, partial
from typing import Any

import torch

from halfstep._autocast import hold, scopes
from halfstep._autocast.casts import carry_out, lower_with_pytorch, pytorch_kernel
from halfstep._autocast.policy import Policy, check, meant_by, preset
from halfstep._autocast.rule import LOWER_PRECISIONS, PHASES, Action, Phase, Rule
from halfstep._common.nested import tensors_in
from halfstep._pytorch import autograd, compiler, dispatch
from halfstep._pytorch.dispatch import Kernel, Key, Keys, overload, schema_of
from halfstep.errors import CallOrderError

# What a policy does to each op, where PyTorch's autocast does something else.
Plan = dict[str, Kernel]


class PolicyOnDevice:
    """A policy on one device type: a plan for each lower precision, made when asked for.

    :func:`prepare` tells of the arguments, and :func:`prepared` finds it by ``number``.
    """

    def __init__(
        self,
        policy: Policy,
        device: str,
        *,
        native: bool,
        number: int,
        module: str,
        only_observed: bool,
    ) -> None:
        self.policy = policy
        self.device = device
        self.number = number
        self.module = module
        self.only_observed = only_observed
        self.has_phases = any(rule.phase is not None for rule in policy.rules)
        self.plan_for = cache(self._plan)  # not a method: a hit costs no call of a Python function
        # Also where PyTorch's does the same: it would not be told.
        self.observed_kernel = cache(partial(self._kernel, native=False))
        self._casts_for = cache(self._casts)
        self._native = native
        self._ruled = meant_by(policy.rules)

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is the same in every process for the same rules in force."""
        within = self.policy.rules_within(self.module)
        return self.policy.fingerprint + ("@" + "; ".join(map(str, within)) if within else "")

    def phase(self) -> Phase:
        return "eval" if self.has_phases and not torch.is_grad_enabled() else "train"

    def now(self) -> tuple[torch.dtype, Phase]:
        """Return the lower precision and the phase of this thread."""
        return torch.get_autocast_dtype(self.device), self.phase()

    def rule(self, op: str) -> Rule | None:
        """Return the rule that decides an overload in this thread, None if none does."""
        return self._rule(op, *self.now())

    def casts(self) -> Plan:
        """Return all that the policy does now, by our kernels, also where PyTorch's agree."""
        return self._casts_for(*self.now())

    def ops(self) -> set[str]:
        """Return the overloads that some plan names."""
        phases = PHASES if self.has_phases else PHASES[:1]
        return {op for dtype in LOWER_PRECISIONS for p in phases for op in self.plan_for(dtype, p)}

    def table(self) -> frozenset[str]:
        """Return the overloads that the policy rules or PyTorch casts."""
        return dispatch.overloads_with_autocast_kernel(self.device) | self._ruled

    def _rule(self, op: str, dtype: torch.dtype, phase: Phase) -> Rule | None:
        return self.policy.rule(op, self.device, dtype, phase, self.module)

    def _casts(self, dtype: torch.dtype, phase: Phase) -> Plan:
        rules = {op: self._rule(op, dtype, phase) for op in self._ruled}
        return {
            op: carry_out(rule, op, self.device, dtype)
            for op, rule in rules.items()
            if rule is not None and rule.action != "leave"
        }

    def _plan(self, dtype: torch.dtype, phase: Phase) -> Plan:
        kernels = {op: self._kernel(op, dtype, phase, self._native) for op in sorted(self.table())}
        return {op: kernel for op, kernel in kernels.items() if kernel is not None}

    def _kernel(self, op: str, dtype: torch.dtype, phase: Phase, native: bool) -> Kernel | None:
        rule = self._rule(op, dtype, phase) or _leaving(op)
        theirs = _action_of_pytorch(op, self.device, dtype)
        if (native and _is_native(rule, theirs)) or (rule.action, theirs) == ("leave", "leave"):
            return None
        if native and rule.action == theirs == "lower":
            return lower_with_pytorch(op, self.device, dtype)
        return carry_out(rule, op, self.device, dtype)


@cache
def _action_of_pytorch(op: str, device: str, dtype: torch.dtype) -> Action:
    if op not in dispatch.overloads_with_autocast_kernel(device):
        return "leave"
    return preset("torch").action(op, device, dtype)


@cache
def _leaving(op: str) -> Rule:
    return Rule(op, "leave")


def _is_native(rule: Rule, theirs: Action) -> bool:
    """Return whether PyTorch's own kernel does what a rule says."""
    match theirs:
        case "lower":  # PyTorch's cache may give an old cast of a weight
            return False
        case "promote":  # PyTorch's promotion refuses the other half precision
            return rule in preset("torch").rules
    return rule.action == theirs


# --- preparing ------------------------------------------------------------------------------------


@contextmanager
def only_our_kernels() -> Iterator[None]:
    """Let contexts made meanwhile carry out every rule with halfstep's kernels.

    For tests and for comparing: PyTorch's kernels are faster and do the same. Holds for the whole
    process.
    """
    global native
    before, native = native, False
    try:
        yield
    finally:
        native = before


native = True
"""Whether PyTorch's kernels carry out the rules that they agree with; part of what is prepared."""

_numbers: dict[tuple[Policy, str, bool, tuple[Rule, ...], bool], int] = {}
_prepared: list[PolicyOnDevice] = []
_lock = threading.Lock()


def prepare(policy: Policy, device: str, module: str = "", *, only_observed: bool = False) -> int:
    """Make ``policy`` ready on ``device``: register every kernel that it needs.

    Args:
        policy: the policy.
        device: the device type.
        module: the module in which it is to be active, empty outside of those with rules. Modules
            in which the same rules hold share a number.
        only_observed: whether it is active only while an observer is: half of the time suffices.

    Returns:
        The number by which :func:`prepared` finds it.

    Raises:
        ValueError: a rule names an op that does not exist.
    """
    key = (policy, device, native, policy.rules_within(module), only_observed)
    with _lock:
        if key not in _numbers:
            check(policy.rules)
            number = len(_prepared)
            on_device = PolicyOnDevice(
                policy,
                device,
                native=native,
                number=number,
                module=module,
                only_observed=only_observed,
            )
            for op in () if only_observed else sorted(on_device.ops()):
                _register(op, device)
            _register_in_functorch(on_device.table())
            autograd.wrap_recomputed(scopes.carry)
            hold.follow_writes()
            _prepared.append(on_device)
            _numbers[key] = number
            if _observed_kernels is not None:
                _register_observed(on_device, _observed_kernels)
        return _numbers[key]


@cache
def number_within(
    active: PolicyOnDevice, module: str, dtype: torch.dtype, phase: Phase
) -> int | None:
    """Return the number of the policy of ``active`` in a module, None if that is an island."""
    if active.policy.island(module, active.device, dtype, phase):
        return None
    return prepare(active.policy, active.device, module, only_observed=active.only_observed)


def prepared(number: int) -> PolicyOnDevice:
    return _prepared[number]


# --- observing ------------------------------------------------------------------------------------

# (op, rule, policy): a context in which the op runs by the rule.
Observer = Callable[[str, Rule, PolicyOnDevice], AbstractContextManager[object]]

_observer: Observer | None = None
_observed_kernels: dispatch.TemporaryKernels | None = None


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Run every op for which a rule decides inside of ``observer``, in every thread.

    Meanwhile our kernels carry out every rule, also in contexts that were made before. The kernels
    that this takes are gone afterwards: the ops are as fast as they were.

    Raises:
        CallOrderError: There is an observer already.
    """
    global _observer, _observed_kernels
    with _lock:
        if _observer is not None:
            raise CallOrderError(
                "a trace is running already, and there is one at a time in a process; leave its "
                "block first"
            )
        kernels = dispatch.TemporaryKernels()
        _observer, _observed_kernels = observer, kernels
    try:
        with _lock:
            for policy in _prepared:
                _register_observed(policy, kernels)
        yield
    finally:
        with _lock:
            kernels.remove()
            _observer = _observed_kernels = None


def _register_observed(policy: PolicyOnDevice, kernels: dispatch.TemporaryKernels) -> None:
    key = dispatch.autocast_key(policy.device)
    for op in sorted(policy.table()):
        kernels.register(overload(op), key, _kernel(op, policy.device))


def _run_observed(observer: Observer, policy: PolicyOnDevice, name: str, pytorch: Kernel) -> Kernel:
    kernel = policy.observed_kernel(name, *policy.now()) or pytorch
    rule = policy.rule(name)
    if rule is None:
        return kernel
    names = [argument.name for argument in schema_of(overload(name)).arguments]

    def run(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        # Such a rule stands aside where the caller asked for a dtype, as cross_entropy does.
        asked = (dict(zip(names, args, strict=False)) | kwargs).get("dtype")
        if rule.action == "fp32-dtype" and asked is not None:
            return kernel(keys, *args, **kwargs)
        with observer(name, rule, policy):
            return kernel(keys, *args, **kwargs)

    return run


# --- kernels --------------------------------------------------------------------------------------


@cache
def _register(name: str, device: str) -> None:
    """Register our kernel for one overload at the Autocast key of ``device``, once."""
    dispatch.register_kernel(overload(name), dispatch.autocast_key(device), _kernel(name, device))


@cache
def _kernel(name: str, device: str) -> Kernel:
    """Return our kernel for one overload; first called before any is registered for it."""
    pytorch, thread = pytorch_kernel(name, device), scopes.thread
    lower_precision = torch.get_autocast_dtype

    @compiler.do_not_compile_alone
    def kernel(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        scope = thread.state.scope
        if scope.nesting is not None:
            scope = scopes.current()
        policy = (scope.policies or scopes.ambient).get(device)
        if policy is None:
            return pytorch(keys, *args, **kwargs)
        if _observer is not None:
            return _run_observed(_observer, policy, name, pytorch)(keys, *args, **kwargs)
        phase = policy.phase() if policy.has_phases else "train"
        plan = policy.plan_for(lower_precision(device), phase)
        return plan.get(name, pytorch)(keys, *args, **kwargs)

    return kernel


# --- inside torch.func ----------------------------------------------------------------------------

# vmap, grad, jvp and what is made of them: there the dispatcher comes to the keys of functorch
# before the Autocast keys. vmap takes a composite such as linear apart, or replaces an op by its
# batched form, before autocast can see which op was called; and what autocast has switched off
# inside an op is on again in the next transform. So each op of a policy's table gets a kernel of
# ours at the keys of functorch too. It does to the op what the policy says, with autocast off for
# every transform below, and goes on to the kernel that was there.
#
# Not so mul, add and their like, to whose kernels PyTorch gives x * 2 in a form that none can pass
# on. They are no composites: below vmap they come to the Autocast keys as they are.


def _register_in_functorch(ops: Iterable[str]) -> None:
    """Register our kernels for overloads at the keys of functorch, each once and for good."""
    for op in sorted(ops):
        if not dispatch.takes_numbers(overload(op)):
            for key in dispatch.FUNCTORCH_KEYS:
                _register_at(op, key)


@cache
def _register_at(name: str, key: Key) -> None:
    op = overload(name)
    pytorch = torch.library.get_kernel(op, key).call_boxed
    is_composite = dispatch.is_composite(op)

    @compiler.do_not_compile_alone
    def kernel(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None:
            return pytorch(keys, *args, **kwargs)
        cast = scopes.policies()[device].casts().get(name)
        if cast is not None:
            return cast(keys, *args, **kwargs)
        if is_composite:  # the ops it is made of have rules of their own
            return pytorch(keys, *args, **kwargs)
        # Its batched form has none: matmul in the place of a mm that is left alone.
        with dispatch.exclude_keys(dispatch.key_set(dispatch.autocast_key(device))):
            return pytorch(keys, *args, **kwargs)

    dispatch.register_kernel(op, key, kernel)


def _device_of(args: Iterable[Any]) -> str | None:
    """Return the device type of a tensor for which a policy is active and autocast is on."""
    for device in filter(torch.is_autocast_enabled, scopes.policies()):
        if any(tensor.device.type == device for tensor in tensors_in(args)):
            return device
    return None
