"""The active policies of a thread, and their marks for torch.compile.

Entering a context creates an immutable :class:`Scope`; exiting it restores the outer one. A plain
``torch.autocast`` inside a scope changes the dtype and enables or disables casting as usual; the
policy of the scope stays.

Code compiled by torch.compile under one policy must not run under another. But the guards and the
keys of the on-disk caches only depend on the autocast switches, not on halfstep's policies. So a
thread that activates policies also writes a number for them where the guards look, and
fingerprints of their rules and of halfstep's code into the tag that is part of every key.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep._autocast import native, weight_cache
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._pytorch import amp, compiler
from halfstep._version import __version__


class Policies(dict[str, PolicyOnDevice]):
    """The active policy of each device type that has one. Immutable and interned."""

    def __init__(self, policies: Mapping[str, PolicyOnDevice]) -> None:
        super().__init__(policies)
        self.key = frozenset(map(id, policies.values()))  # policies on devices are never freed
        # The resulting policies inside a context, by its policy's number and whether it inherits.
        self.within: dict[tuple[int, bool], Policies] = {}
        self.mark: compiler.CompileMark | None = None

    def with_policy(self, policy: PolicyOnDevice) -> "Policies":
        made = Policies({**self, policy.device: policy})
        return _all_policies.setdefault(made.key, made)


NO_POLICIES = Policies({})
_all_policies = {NO_POLICIES.key: NO_POLICIES}

ambient = NO_POLICIES
"""The policies of threads without their own; see :class:`halfstep.use_policy`."""


class Settings(NamedTuple):
    """The settings of a context, all constants, so that torch.compile can put them into a graph."""

    switches: amp.Switches
    policy: int | None  # the number that ``kernels.prepare`` gave it; None if autocast is off
    inherit: bool  # whether the policy of an outer context takes precedence


class Scope(NamedTuple):
    """The active policies and switches of a thread."""

    policies: Policies
    outer: "Scope | None" = None  # None outside of all contexts
    context: object = None  # the autocast, or use_policy, that was entered; None for other scopes
    settings: Settings | None = None  # of an autocast
    switches: amp.Switches | None = None  # PyTorch's outside of it
    # The autocast nesting depth if a compiled graph entered it. If tracing is aborted, such a scope
    # is left behind; the depth reveals it.
    nesting: int | None = None


class _State:
    """The state of a thread, in one object, because attributes of thread-locals are slow."""

    __slots__ = ("change", "followed", "scope")

    def __init__(self) -> None:
        self.scope = Scope(NO_POLICIES)  # current(), unless it has a nesting depth
        self.change: Callable[[Settings], Settings] | None = None  # of the user's contexts
        self.followed = NO_POLICIES  # the policies that torch.compile's mark stands for


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


thread = _Thread()


def current() -> Scope:
    """Return the innermost scope of this thread."""
    state = thread.state
    scope = state.scope
    if scope.nesting is not None:
        nesting = nesting_depth()
        while scope.nesting is not None and scope.outer is not None and scope.nesting > nesting:
            scope = scope.outer
        if scope is not state.scope:
            state.scope = scope
            weight_cache.clear()
    return scope


def switches(device: str) -> amp.Switches:
    """Return the switches of this thread, as for a new context that is to be like this one."""
    return amp.autocast_switches(device)._replace(cache=weight_cache.is_on())


def policies() -> Policies:
    return current().policies or ambient


def enter(
    outer: Scope,
    policies: Policies,
    context: object = None,
    settings: Settings | None = None,
    switches: amp.Switches | None = None,
) -> None:
    """Make a :class:`Scope` inside of ``outer`` the current one; :func:`leave` undoes it."""
    state = thread.state
    # Takes half the time of Scope(...).
    state.scope = tuple.__new__(Scope, (policies, outer, context, settings, switches, None))
    if policies is not state.followed:
        compiler.set_compile_mark(policies.mark or (_mark(policies) if policies else None))
        state.followed = policies
    if settings is not None:
        weight_cache.used.is_on = settings.switches.cache


def enter_in_graph(outer: Scope, policies: Policies) -> None:
    """Enter a scope while torch.compile traces the call, or when the compiled graph runs it."""
    thread.state.scope = Scope(policies, outer, nesting=nesting_depth())


def leave(scope: Scope) -> None:
    """Restore the scope outside of ``scope``, the current one."""
    state, outer = thread.state, scope.outer
    assert outer is not None
    state.scope = outer
    policies = outer.policies
    if scope.nesting is None and policies is not state.followed:
        compiler.set_compile_mark(policies.mark or (_mark(policies) if policies else None))
        state.followed = policies
    used = weight_cache.used
    used.is_on = outer.settings is not None and outer.settings.switches.cache
    # Outside of all autocasts and graphs, or at the end of a recomputation: drop the casts of
    # weights.
    if used.casts and outer.settings is None and outer.nesting is None:
        weight_cache.clear()


def entered(context: object) -> tuple[list[Scope], Scope | None]:
    """Return the scopes inside of that of ``context``, innermost first, and that scope.

    It is None for a context that is not entered in this thread.
    """
    inner: list[Scope] = []
    scope: Scope | None = current()
    while scope is not None and scope.context is not context:
        inner.append(scope)
        scope = scope.outer
    return inner, scope


def leave_below(context: object) -> bool:
    """Leave a context that is not the innermost; return whether it was entered in this thread."""
    inner, scope = entered(context)
    if scope is None or scope.outer is None:
        return False
    rest = scope.outer
    for each in reversed(inner):
        rest = each._replace(outer=rest)
    thread.state.scope = rest
    return True


# --- torch.compile --------------------------------------------------------------------------------


_marked: list[Policies] = []
_lock = threading.Lock()


def _mark(policies: Policies) -> compiler.CompileMark:
    rules = ",".join(f"{d}:{policies[d].fingerprint}" for d in sorted(policies))
    tag = f"{_kernels()};{rules}"
    backward_off = not all(policy.is_pytorchs for policy in policies.values())
    with _lock:
        if len(_marked) == compiler.NUM_GUARD_VALUES:
            compiler.forget_compiled_code()
            while _marked:
                _marked.pop().mark = None
        if policies.mark is None:
            guard = compiler.numbered_guard(len(_marked))
            policies.mark = compiler.CompileMark(guard, tag, backward_off)
            _marked.append(policies)
        return policies.mark


@cache
def _kernels() -> str:
    """Return a hash of the code of all kernels: another version compiles its graphs anew."""
    package = Path(__file__).parents[1]
    files = sorted(
        file for room in ("_autocast", "_pytorch") for file in package.glob(f"{room}/*.py")
    )
    code = hashlib.sha256(__version__.encode())
    for file in files:
        code.update(file.read_bytes())
    return code.hexdigest()[:16]


# --- recomputation -------------------------------------------------------------------------------


def under_the_same_policies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that later calls, in any thread, use the current policies.

    torch.utils.checkpoint runs a function again in the backward pass. It re-enters
    ``torch.autocast`` with the switches of the forward pass, but without the policy.
    """
    then = policies()

    def running(*args: Any, **kwargs: Any) -> Any:
        outer = current()
        if outer.policies is then:
            return function(*args, **kwargs)
        enter(outer, then)
        try:
            with native.recomputing():
                return function(*args, **kwargs)
        finally:
            leave(current())

    return compiler.do_not_compile_alone(running, nor_below=False)


def nesting_depth() -> int:
    """Return the number of autocast contexts of any kind that this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
