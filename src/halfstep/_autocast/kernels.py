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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from halfstep._autocast import functorch, op_names, scopes
from halfstep._autocast.actions import pytorch_kernel
from halfstep._autocast.op_names import overload
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.policy import Policy
from halfstep._autocast.rule import Rule
from halfstep._pytorch import autograd, compiler, dispatch, library
from halfstep._pytorch.dispatch import Kernel
from halfstep.errors import CallOrderError


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
_numbers: dict[tuple[Policy, str, bool, tuple[Rule, ...]], int] = {}
_prepared: list[PolicyOnDevice] = []
_lock = threading.Lock()


def prepare(policy: Policy, device: str, module: str = "") -> int:
    """Make ``policy`` ready on ``device``: register every kernel that it needs.

    Args:
        policy: the policy.
        device: the device type.
        module: the name of the module in which it is to be active. Modules in which the same rules
            hold share a number.

    Returns:
        The number by which :func:`prepared` finds it.

    Raises:
        ValueError: a rule names an op that does not exist.
    """
    key = (policy, device, _native, policy.rules_within(module))
    with _lock:
        if key not in _numbers:
            op_names.check(policy.rules)
            number = len(_prepared)
            on_device = PolicyOnDevice(policy, device, native=_native, number=number, module=module)
            for op in sorted(on_device.ops()):
                _register(op, device)
            functorch.register(on_device.table())
            autograd.wrap_recomputed(scopes.carry)
            scopes.follow_weights()
            _prepared.append(on_device)
            _numbers[key] = number
            if _observed_kernels is not None:
                _register_observed(on_device, _observed_kernels)
        return _numbers[key]


def number_within(active: PolicyOnDevice, module: str, dtype: torch.dtype) -> int | None:
    """Return the number of the policy of ``active`` in a module, None if that is an island."""
    key = (module, dtype, active.phase())
    if key not in active.numbers_within:
        is_island = active.policy.island(module, active.device, dtype, active.phase())
        number = None if is_island else prepare(active.policy, active.device, module)
        active.numbers_within[key] = number
    return active.numbers_within[key]


def prepared(number: int) -> PolicyOnDevice:
    """Return what :func:`prepare` made."""
    return _prepared[number]


# --- observing ------------------------------------------------------------------------------------

# (op, rule, policy): a context in which the op runs by the rule.
Observer = Callable[[str, Rule, PolicyOnDevice], AbstractContextManager[None]]

_observer: Observer | None = None
_observed_kernels: library.TemporaryKernels | None = None


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of every op for which a rule decides, in every thread.

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
        kernels = library.TemporaryKernels()
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


def _register_observed(policy: PolicyOnDevice, kernels: library.TemporaryKernels) -> None:
    key = dispatch.autocast_key(policy.device)
    for op in sorted(policy.observed.ruled_ops()):
        kernels.register(overload(op), key, _kernel(op, policy.device))


def _run_observed(observer: Observer, policy: PolicyOnDevice, name: str, pytorch: Kernel) -> Kernel:
    kernel, rule = policy.observed.plan().get(name, pytorch), policy.rule(name)
    if rule is None:
        return kernel

    names = [argument.name for argument in overload(name)._schema.arguments]

    def run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
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
    library.register_kernel(overload(name), dispatch.autocast_key(device), _kernel(name, device))


@cache
def _kernel(name: str, device: str) -> Kernel:
    """Return our kernel for one overload; first called before any is registered for it."""
    pytorch = pytorch_kernel(name, device)

    @compiler.do_not_compile_alone
    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        policy = scopes.current().policies.get(device)
        if policy is None:
            return pytorch(keys, *args, **kwargs)
        if _observer is not None:
            return _run_observed(_observer, policy, name, pytorch)(keys, *args, **kwargs)
        return policy.plan().get(name, pytorch)(keys, *args, **kwargs)

    return kernel
