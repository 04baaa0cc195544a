"""The policies that are active in a thread, and what torch.compile knows of them.

A :class:`Scope` is made by entering a context and is never changed; leaving the context brings
back the one outside it. A plain ``torch.autocast`` inside a scope changes the dtype and switches
casting on and off as always; the policy of the scope stays.

Code that torch.compile made under one policy must not run under another. Its guards and the keys of
its on-disk caches know the switches of autocast, not our policies. So a thread that activates
policies also writes a number for them where the guards look, and a fingerprint into the tag that is
part of every key.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep._autocast import weight_cache
from halfstep._pytorch import amp, compiler

if TYPE_CHECKING:
    from halfstep._autocast.ambient import use_policy
    from halfstep._autocast.kernels import PolicyOnDevice
    from halfstep._autocast.region import Region, Settings


class Policies(dict[str, "PolicyOnDevice"]):
    """The active policy of each device type that has one. Never changed; equal ones are one."""

    def __init__(self, policies: Mapping[str, "PolicyOnDevice"]) -> None:
        super().__init__(policies)
        self.key = frozenset(map(id, policies.values()))  # policies on devices are kept for good
        # Those inside of a context, by the number of its policy and whether it inherits.
        self.within: dict[tuple[int, bool], Policies] = {}

    def with_policy(self, policy: "PolicyOnDevice") -> "Policies":
        """Return these, but on the device of ``policy`` that one."""
        made = Policies({**self, policy.device: policy})
        return _all_policies.setdefault(made.key, made)


NO_POLICIES = Policies({})
_all_policies = {NO_POLICIES.key: NO_POLICIES}

ambient = NO_POLICIES
"""The policies of threads that have none of their own; see :class:`halfstep.use_policy`."""


class Scope(NamedTuple):
    """The policies and switches that are active in a thread.

    Attributes:
        outer: the scope outside this one, None for the scope of a thread outside every context.
        context: the autocast that was entered, None for all else.
        settings: what it has switched on.
        switches: PyTorch's autocast switches as they were outside.
        nesting: for a scope that a compiled graph entered, the nesting depth of autocast there. A
            graph whose tracing was given up half-way leaves such a scope behind; the depth tells.
        block: the use_policy that was entered.
    """

    policies: Policies
    outer: "Scope | None" = None
    context: "Region | None" = None
    settings: "Settings | None" = None
    switches: amp.Switches | None = None
    nesting: int | None = None
    block: "use_policy | None" = None


class _State:
    """The state of a thread, in one object: attributes of thread-locals take long to look up."""

    __slots__ = ("followed", "guard", "guard_outside", "scope")

    def __init__(self) -> None:
        self.scope = Scope(NO_POLICIES)  # current(), unless it has a nesting depth
        self.followed = NO_POLICIES  # what torch.compile knows of
        self.guard = compiler.compile_guard()  # what it knows them by
        self.guard_outside = self.guard  # what was there before there were any


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


thread = _Thread()


def current() -> Scope:
    """Return the innermost scope of this thread."""
    state = thread.state
    scope = state.scope
    if scope.nesting is not None:
        nesting = _nesting()
        while scope.nesting is not None and scope.nesting > nesting:
            assert scope.outer is not None
            scope = scope.outer
        if scope is not state.scope:
            state.scope = scope
            weight_cache.clear()
    return scope


def policies() -> Policies:
    """Return the policies that are active in this thread."""
    return current().policies or ambient


def enter(
    outer: Scope,
    policies: Policies,
    context: "Region | None" = None,
    settings: "Settings | None" = None,
    switches: amp.Switches | None = None,
    block: "use_policy | None" = None,
) -> Scope:
    """Make a :class:`Scope` inside of ``outer`` the current one; :func:`leave` undoes it."""
    state = thread.state
    # In half the time of Scope(...).
    scope = tuple.__new__(Scope, (policies, outer, context, settings, switches, None, block))
    state.scope = scope
    if policies is not state.followed:
        _follow(state, policies)
    return scope


def enter_in_graph(outer: Scope, policies: Policies) -> None:
    """Do it where torch.compile is tracing the call, or runs what it traced."""
    thread.state.scope = Scope(policies, outer, nesting=_nesting())


def leave(scope: Scope) -> None:
    """Bring back the scope outside the current one, which is ``scope``."""
    state, outer = thread.state, scope.outer
    assert outer is not None
    state.scope = outer
    if scope.nesting is None and outer.policies is not state.followed:
        _follow(state, outer.policies)
    # No context and no graph is entered, but in recomputation: here casts of weights end.
    if outer.context is None and outer.nesting is None:
        weight_cache.clear()


def leave_below(block: "use_policy") -> bool:
    """Leave a block that is not the innermost; return whether it was entered in this thread."""
    inner: list[Scope] = []
    each: Scope | None = current()
    while each is not None and each.block is not block:
        inner.append(each)
        each = each.outer
    if each is None:
        return False
    rest = each.outer
    for each in reversed(inner):
        rest = each._replace(outer=rest)
    assert rest is not None
    thread.state.scope = rest
    return True


# --- torch.compile --------------------------------------------------------------------------------


class _Mark(NamedTuple):
    """The mark by which torch.compile knows a set of policies."""

    guard: compiler.CompileGuard  # unique in this process
    tag: str  # in the keys of caches; the same in every process


_marks: dict[frozenset[int], _Mark] = {}
_lock = threading.Lock()


def _follow(state: _State, policies: Policies) -> None:
    """Let torch.compile know, in this thread, that these policies are active now.

    The tag holds for the whole process: compiling in two threads under different policies at the
    same time can miss a cache that would have been right.
    """
    if not state.followed:
        state.guard = state.guard_outside = compiler.compile_guard()
    guard, tag = state.guard_outside, ""
    if policies:
        guard, tag = _marks.get(policies.key) or _mark(policies)
    compiler.set_compile_mark(state.guard, guard, tag)
    state.followed, state.guard = policies, guard


def _mark(policies: Policies) -> _Mark:
    tag = ",".join(f"{d}:{policies[d].fingerprint}" for d in sorted(policies))
    with _lock:
        if len(_marks) == compiler.NUM_GUARD_VALUES:
            compiler.forget_compiled_code()
            _marks.clear()
        return _marks.setdefault(policies.key, _Mark(compiler.numbered_guard(len(_marks)), tag))


# --- recomputation -------------------------------------------------------------------------------


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with later calls, in whichever thread, under the policies of now.

    torch.utils.checkpoint runs a function again in the backward pass. It re-enters
    ``torch.autocast`` with the switches of the forward pass, but knows of no policy.
    """
    then = policies()

    def under_the_same_policies(*args: Any, **kwargs: Any) -> Any:
        outer = current()
        if outer.policies is then:
            return function(*args, **kwargs)
        enter(outer, then)
        try:
            return function(*args, **kwargs)
        finally:
            leave(current())

    return compiler.do_not_compile_alone(under_the_same_policies, nor_below=False)


def _nesting() -> int:
    """Return how many autocast contexts of any kind this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
