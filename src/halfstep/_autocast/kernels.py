"""Application of policies: kernels at PyTorch's Autocast dispatch keys.

The dispatcher calls the kernel of an op at ``AutocastCPU``, ``AutocastCUDA``, ... if an argument is
on that device and autocast is enabled for it. These keys are above autograd, so casts are
differentiated, and inside of composites written in C++ (attention, recurrent layers) the ops are
seen too.

PyTorch has its own kernels at these keys. A :class:`Plan` contains only the ops for which a policy
differs from them; halfstep registers kernels for those when a policy first needs them, and never
removes them, but for those of products (:mod:`halfstep._autocast.native`). Such a kernel looks up
the active plan of its thread. If there is none, or the plan does not contain its op, it does what
PyTorch would have done.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from halfstep._autocast import scopes, weight_cache
from halfstep._autocast.casts import WITH_NUMBERS, pytorch_kernel, pytorchs, with_fitting_numbers
from halfstep._autocast.native import Products
from halfstep._autocast.native import products as native_products
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.policy import Policy, check, rules_within
from halfstep._autocast.rule import Rule
from halfstep._pytorch import autograd, compiler, dispatch
from halfstep._pytorch.dispatch import Kernel, Keys, overload
from halfstep.errors import CallOrderError

# --- preparing ------------------------------------------------------------------------------------

_numbers: dict[tuple[Policy, str, tuple[Rule, ...], bool], int] = {}
_prepared: list[PolicyOnDevice] = []
_lock = threading.Lock()


def prepare(policy: Policy, device: str, module: str = "", *, only_observed: bool = False) -> int:
    """Register every kernel that a policy needs; return its number, for :func:`prepared`.

    ``module`` is the one in which the policy will be active, empty outside of modules with rules;
    modules with the same rules share a number. ``only_observed``: whether it is active only while
    there is an observer, which halves the time.

    Raises:
        ValueError: a rule names an op that does not exist.
    """
    key = (policy, device, rules_within(policy, module), only_observed)
    with _lock:
        if key not in _numbers:
            check(policy.rules)
            number = len(_prepared)
            on_device = PolicyOnDevice(policy, device, module, number, only_observed)
            here = native_products.setdefault(device, Products(device))
            if not only_observed:
                _register(_permanent, on_device.ops(), _kernel, device)
                products = {op: _kernel(op, device) for op in on_device.products()}
                here.add(products, on_device.ops())
            autograd.wrap_recomputed(scopes.under_the_same_policies)
            weight_cache.follow_writes()
            _prepared.append(on_device)
            _numbers[key] = number
            for register in _registering:
                register(on_device)
        return _numbers[key]


@cache
def number_within(active: PolicyOnDevice, module: str, dtype: torch.dtype) -> int | None:
    """Return the number of a policy in a module, for a lower precision; None on an island."""
    if active.policy.island(module, active.device, dtype) is not None:
        return None
    return prepare(active.policy, active.device, module, only_observed=active.only_observed)


def prepared(number: int) -> PolicyOnDevice:
    return _prepared[number]


_permanent = dispatch.PythonKernels()
_registering: list[Callable[[PolicyOnDevice], None]] = []
"""What registers the kernels of the blocks that are running."""


def _register(
    kernels: dispatch.PythonKernels,
    ops: Iterable[str],
    kernel: Callable[[str, str], Kernel],
    device: str,
) -> None:
    """Register kernels for overloads at the Autocast key of ``device``."""
    key = dispatch.autocast_key(device)
    for op in sorted(ops):
        kernels.register(overload(op), key, kernel(op, device))


@contextmanager
def _registered(
    ops: Callable[[PolicyOnDevice], Iterable[str]], kernel: Callable[[str, str], Kernel]
) -> Iterator[None]:
    """Register kernels for ops of every policy in a block, and remove them afterwards."""
    temporary = dispatch.PythonKernels()
    registered: dict[str, frozenset[str]] = {}  # by device, since a process may have many policies

    def register(policy: PolicyOnDevice) -> None:
        before = registered.get(policy.device, frozenset())
        registered[policy.device] = before.union(ops(policy))
        _register(temporary, registered[policy.device] - before, kernel, policy.device)

    _registering.append(register)
    try:
        with _lock:
            for policy in _prepared:
                register(policy)
        yield
    finally:
        with _lock:
            _registering.remove(register)
            temporary.remove()


def fitting_numbers() -> AbstractContextManager[None]:
    """Run ops in autocast whatever their number is: see :func:`with_fitting_numbers`."""
    return _registered(
        lambda policy: WITH_NUMBERS,
        lambda name, device: with_fitting_numbers(name, _kernel(name, device)),
    )


# --- observing ------------------------------------------------------------------------------------

# (op, rule, policy) -> a context in which the op runs by the rule.
OpObserver = Callable[[str, Rule, PolicyOnDevice], AbstractContextManager[object]]

_observer: OpObserver | None = None


@contextmanager
def observe_ops(observer: OpObserver) -> Iterator[None]:
    """Run every op with a deciding rule inside of ``observer``, in every thread.

    In the block halfstep's kernels apply every rule, also in contexts made earlier. The kernels
    that this requires are removed afterwards, which restores the speed of the ops.

    Raises:
        CallOrderError: There already is an observer.
    """
    global _observer
    with _lock:
        if _observer is not None:
            raise CallOrderError(
                "another trace is running, and a process can have only one; leave its block first"
            )
        _observer = observer
    try:
        with _registered(PolicyOnDevice.table, _kernel):
            yield
    finally:
        _observer = None


def _run_observed(observer: OpObserver, policy: PolicyOnDevice, name: str) -> Kernel:
    kernel = policy.observed_kernel(name, policy.lower_precision())
    rule = policy.rule(name)
    if rule is None:
        return kernel

    def run(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        if not _applies(rule, name, args, kwargs):
            return kernel(keys, *args, **kwargs)
        with observer(name, rule, policy):
            return kernel(keys, *args, **kwargs)

    return run


def _applies(rule: Rule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the rule for an op applies to a call of it.

    An fp32-dtype rule does not if the caller passes a dtype, as cross_entropy does.
    """
    if rule.action != "fp32-dtype":
        return True
    names = [argument.name for argument in dispatch.arguments_of(name)]
    return (dict(zip(names, args, strict=False)) | kwargs).get("dtype") is None


# --- kernels --------------------------------------------------------------------------------------


@cache
def _kernel(name: str, device: str) -> Kernel:
    """Return halfstep's kernel for one overload; call it before one is registered."""
    pytorch, thread = pytorch_kernel(name, device), scopes.thread
    lower_precision, here = torch.get_autocast_dtype, native_products[device]

    @compiler.do_not_compile_alone
    def kernel(keys: Keys, /, *args: Any, **kwargs: Any) -> Any:
        scope = thread.state.scope
        if scope.nesting is not None:
            scope = scopes.current()
        policy = (scope.policies or scopes.ambient).get(device)
        if policy is None:
            return pytorch(keys, *args, **kwargs)
        if _observer is not None:
            return _run_observed(_observer, policy, name)(keys, *args, **kwargs)
        plan = policy.plan_for(lower_precision(device))
        found = plan.get(name, pytorch)
        if found in pytorchs and here.registered is None and name not in here.pinned:
            found = pytorch  # registered for another dtype alone
        return found(keys, *args, **kwargs)

    return kernel
