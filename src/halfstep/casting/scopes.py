"""Which policies are active in a thread.

A :class:`Scope` is made by entering a context and is never changed; leaving the context brings
back the one outside it. A plain ``torch.autocast`` inside a scope changes the dtype and switches
casting on and off as always; the policy of the scope stays.
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep import _torch
from halfstep.casting import guards
from halfstep.casting.weight_cache import ContextCasts
from halfstep.errors import CallOrderError

if TYPE_CHECKING:
    from halfstep.casting.plans import PolicyOnDevice

Policies = Mapping[str, "PolicyOnDevice"]
"""The active policy of each device type that has one."""


class Scope(NamedTuple):
    """What is active in a thread.

    Attributes:
        policies: the active policies.
        outer: the scope outside this one, None for the scope of a thread outside every context.
        switches: PyTorch's autocast switches as they were outside.
        nesting: for a scope that a compiled graph entered, the nesting depth of autocast there. A
            graph whose tracing was given up half-way leaves such a scope behind; the depth tells.
        casts: the casts of weights that end with the outermost scope that a context has made.
    """

    policies: Policies
    outer: "Scope | None"
    switches: _torch.Switches | None = None
    nesting: int | None = None
    casts: ContextCasts | None = None


class _Thread(threading.local):
    scope = Scope(policies={}, outer=None)


_thread = _Thread()


def current() -> Scope:
    """Return the innermost scope of this thread."""
    scope = _thread.scope
    if scope.nesting is not None:
        nesting = _nesting()
        while scope.nesting is not None and scope.nesting > nesting:
            scope = _outside(scope)
        _thread.scope = scope
    return scope


def enter(
    policies: Policies, switches: _torch.Switches | None = None, *, traced: bool = False
) -> None:
    """Make ``policies`` the active ones of this thread; :func:`leave` undoes it.

    Args:
        policies: all that are to be active, those of the scope outside included.
        switches: PyTorch's autocast switches as they are now; :func:`leave` returns them.
        traced: whether torch.compile is tracing the call, or runs what it traced.
    """
    outer = current()
    casts = ContextCasts() if outer.casts is None else outer.casts
    _thread.scope = Scope(policies, outer, switches, _nesting() if traced else None, casts)
    if not traced:
        guards.follow(policies)


def leave() -> _torch.Switches | None:
    """Bring back the scope outside the current one.

    Raises:
        CallOrderError: This thread is in no scope.
    """
    scope = current()
    if scope.outer is None:
        raise CallOrderError(
            "an autocast context is left in a thread that did not enter it (a generator, say, that "
            "was started in another one); enter and leave it in one thread"
        )
    _thread.scope = _outside(scope)
    if scope.nesting is None:
        guards.follow(scope.outer.policies)
    return scope.switches


def _outside(scope: Scope) -> Scope:
    """Return the scope outside of one that is left, and free the casts that end with it."""
    assert scope.outer is not None
    if scope.outer.casts is None and scope.casts:
        scope.casts.end()
    return scope.outer


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with later calls, in whichever thread, under the policies of now.

    torch.utils.checkpoint runs a function again in the backward pass. It re-enters
    ``torch.autocast`` with the switches of the forward pass, but knows of no policy.
    """
    policies = current().policies

    def under_the_same_policies(*args: Any, **kwargs: Any) -> Any:
        if current().policies == policies:
            return function(*args, **kwargs)
        enter(policies)
        try:
            return function(*args, **kwargs)
        finally:
            leave()

    return _torch.do_not_compile_alone(under_the_same_policies, nor_below=False)


def _nesting() -> int:
    """Return how many autocast contexts of any kind this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
