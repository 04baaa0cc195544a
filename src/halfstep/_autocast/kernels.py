"""Application of policies: kernels at PyTorch's Autocast dispatch keys.

The dispatcher calls the kernel of an op at ``AutocastCPU``, ``AutocastCUDA``, ... if an argument is
on that device and autocast is enabled for it. These keys are above autograd, so casts are
differentiated, and inside of composites written in C++ (attention, recurrent layers) the ops are
seen too.

PyTorch has its own kernels at these keys. A :class:`Plan` contains only the ops for which a policy
differs from them; halfstep registers kernels for those when a policy first needs them, and never
removes them. Such a kernel looks up the active plan of its thread. If there is none, or the plan
does not contain its op, it does what PyTorch would have done.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import scopes, weight_cache
from halfstep._autocast.casts import is_eligible, pytorch_kernel
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.policy import Policy, check, meant_by
from halfstep._autocast.rule import HALVES, Phase, Rule
from halfstep._common.nested import map_tensors, tensors_in
from halfstep._pytorch import autograd, compiler, dispatch
from halfstep._pytorch.dispatch import Kernel, Key, Keys, overload
from halfstep.errors import CallOrderError

# --- preparing ------------------------------------------------------------------------------------


@contextmanager
def only_our_kernels() -> Iterator[None]:
    """Make contexts created in the block apply every rule with halfstep's kernels.

    This is for tests and comparisons: PyTorch's kernels are faster and equivalent. It affects the
    whole process.
    """
    global native
    before, native = native, False
    try:
        yield
    finally:
        native = before


native = True
"""Whether PyTorch's kernels apply the rules that they agree with; part of the cache key."""

_numbers: dict[tuple[Policy, str, bool, tuple[Rule, ...], bool], int] = {}
_prepared: list[PolicyOnDevice] = []
_lock = threading.Lock()


def prepare(policy: Policy, device: str, module: str = "", *, only_observed: bool = False) -> int:
    """Prepare ``policy`` on ``device``: register every kernel that it needs.

    Args:
        policy: the policy.
        device: the device type.
        module: the module in which it will be active, empty outside of modules with rules. Modules
            with the same rules share a number.
        only_observed: whether it is active only while there is an observer, which halves the time.

    Returns:
        The number for :func:`prepared`.

    Raises:
        ValueError: a rule names an op that does not exist.
    """
    key = (policy, device, native, policy.rules_within(module), only_observed)
    with _lock:
        if key not in _numbers:
            check(policy.rules)
            number = len(_prepared)
            on_device = PolicyOnDevice(policy, device, module, native, number, only_observed)
            if not only_observed:
                _register(_permanent, on_device.ops(), _kernel, device)
            _register_in_functorch(on_device.table() | _COMPONENT_OF.keys() | _SCATTERS)
            autograd.wrap_recomputed(scopes.under_the_same_policies)
            autograd.wrap_lobpcg(_find_eigenvectors)
            weight_cache.follow_writes()
            _prepared.append(on_device)
            _numbers[key] = number
            for register in _registering:
                register(on_device)
        return _numbers[key]


def number_within(active: PolicyOnDevice, module: str) -> int | None:
    """Return the number of ``active``'s policy in a module, which is called; None on an island."""
    rule, number = _within(active, module, *active.now())
    _count(rule)
    return number


@cache
def _within(
    active: PolicyOnDevice, module: str, dtype: torch.dtype, phase: Phase
) -> tuple[Rule | None, int | None]:
    rule = active.policy.whole_module_rule(module, active.device, dtype, phase)
    if rule is not None and rule.action == "fp32":
        return rule, None
    number = prepare(active.policy, active.device, module, only_observed=active.only_observed)
    return rule, number


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

    def register(policy: PolicyOnDevice) -> None:
        _register(temporary, ops(policy), kernel, policy.device)

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
                "a trace is running already, and there is one at a time in a process; leave its "
                "block first"
            )
        _observer = observer
    try:
        with _registered(PolicyOnDevice.table, _kernel):
            yield
    finally:
        _observer = None


def _run_observed(
    observer: OpObserver, policy: PolicyOnDevice, name: str, pytorch: Kernel
) -> Kernel:
    kernel = policy.observed_kernel(name, *policy.now()) or pytorch
    rule = policy.rule(name)
    if rule is None:
        return kernel

    def run(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        if not _applies(rule, name, args, kwargs):
            return kernel(keys, *args, **kwargs)
        _count(rule)
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


# --- counting -------------------------------------------------------------------------------------

_counters: list[Callable[[Rule], object]] = []


@contextmanager
def count_rules(counter: Callable[[Rule], object]) -> Iterator[None]:
    """Pass each rule to ``counter`` when it decides for an op, or for a module as a whole.

    Only rules that a policy has beyond its preset are certain to be passed. Ops run as they do
    without a counter. Outside of the block nothing is counted, and nothing costs time.
    """
    _counters.append(counter)
    try:
        with _registered(lambda policy: meant_by(policy.added), _counting_kernel):
            yield
    finally:
        _counters.remove(counter)


@cache
def _counting_kernel(name: str, device: str) -> Kernel:
    """Return the kernel of an overload that also counts the rule that decides."""
    kernel = _kernel(name, device)

    @compiler.do_not_compile_alone
    def counting(keys: Keys, *args: Any, **kwargs: Any) -> Any:
        policy = scopes.policies().get(device)
        if policy is not None and _observer is None:  # an observed op is counted where it runs
            _count_op(policy, name, args, kwargs)
        return kernel(keys, *args, **kwargs)

    return counting


def _count_op(policy: PolicyOnDevice, name: str, args: Any, kwargs: Any) -> None:
    rule = policy.rule(name) if _counters else None
    if rule is not None and _applies(rule, name, args, kwargs):
        _count(rule)


def _count(rule: Rule | None) -> None:
    if rule is not None:
        for counter in _counters:
            counter(rule)


# --- kernels --------------------------------------------------------------------------------------


@cache
def _kernel(name: str, device: str) -> Kernel:
    """Return halfstep's kernel for one overload; call it before one is registered."""
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


# --- inside torch.lobpcg --------------------------------------------------------------------------


def _find_eigenvectors(function: Callable[..., Any], *args: Any) -> Any:
    """Run a part of ``torch.lobpcg`` as one op, by the rule for ``torch.linalg.eigh``."""
    tensors = list(tensors_in(args))
    device = tensors[0].device.type
    policy = scopes.policies().get(device) if torch.is_autocast_enabled(device) else None
    rule = None if policy is None or policy.is_pytorchs else policy.rule("linalg_eigh.default")
    # The backward pass may run without the policy. Its matrix then has another dtype than the
    # results of such a rule.
    is_backward = len({tensor.dtype for tensor in tensors}) > 1
    if not is_backward and (rule is None or rule.action != "fp32"):
        return function(*args)
    with torch_autocast(device, enabled=False):
        return function(*map_tensors(lambda t: t.float() if is_eligible(t, device) else t, args))


# --- inside torch.func ----------------------------------------------------------------------------

# In vmap, grad, jvp and their compositions the dispatcher reaches the keys of functorch before the
# Autocast keys. vmap decomposes a composite such as linear, or replaces an op by its batched form,
# before autocast can see which op was called; and what autocast disables inside an op is enabled
# again in the next transform. So each op in a policy's table also gets a halfstep kernel at the
# keys of functorch. It applies the policy to the op, with autocast off for every transform below,
# and then calls the previous kernel.
#
# mul, add and similar ops are exceptions: PyTorch passes x * 2 to their kernels in a form that a
# Python kernel cannot pass on. They are not composites, so below vmap they reach the Autocast keys
# unchanged.


# Ops that run in one call with inputs in lower precision beside weights, statistics or values in
# float32, and whose batched forms do not, nor those of their gradients (jacrev is a vmap of these).
_COMPONENT_OF = {
    f"{norm}.default": f"native_{component}.default"
    for norm, component in [
        ("batch_norm", "batch_norm"),
        ("instance_norm", "batch_norm"),
        ("layer_norm", "layer_norm"),
        ("group_norm", "group_norm"),
    ]
}
"""The norms, with the component that may have a rule of its own."""

_SCATTERS = frozenset(
    {"diagonal_scatter.default", "select_scatter.default", "slice_scatter.default"}
)
"""They cast what they write to the dtype of their first input."""


def _register_in_functorch(ops: Iterable[str]) -> None:
    """Register halfstep's kernels for overloads at the keys of functorch, each once."""
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
        device = _device_with_policy((*args, *kwargs.values()))
        if device is None:
            return pytorch(keys, *args, **kwargs)
        policy = scopes.policies()[device]
        _count_op(policy, name, args, kwargs)
        now = policy.now()
        cast = policy.cast_for(name, *now)
        if cast is not None:
            return cast(keys, *args, **kwargs)
        if name in _SCATTERS:
            args = (args[0], args[1].to(args[0].dtype), *args[2:])
        component = _COMPONENT_OF.get(name)
        if component and not policy.cast_for(component, *now) and _is_first_narrower(args):
            # What the kernel does inside: it computes in float32 and rounds the result.
            return pytorch(keys, args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        if is_composite:  # its component ops have their own rules
            return pytorch(keys, *args, **kwargs)
        # Its batched form has none: matmul replaces an mm that must be left alone.
        with dispatch.exclude_keys(dispatch.autocast_keys(device)):
            return pytorch(keys, *args, **kwargs)

    _permanent.register(op, key, kernel)


def _is_first_narrower(args: tuple[Any, ...]) -> bool:
    """Return whether an op's first input is in lower precision, and the others in float32."""
    dtypes = {tensor.dtype for tensor in tensors_in(args[1:])}
    return args[0].dtype in HALVES and dtypes == {torch.float32}


def _device_with_policy(args: Iterable[Any]) -> str | None:
    """Return the device type of a tensor with an active policy and autocast on."""
    for device in filter(torch.is_autocast_enabled, scopes.policies()):
        if any(tensor.device.type == device for tensor in tensors_in(args)):
            return device
    return None
