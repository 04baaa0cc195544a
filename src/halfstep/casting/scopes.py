"""Which policy is active: per thread, per device type, and in the backward pass.

A :class:`Scope` is made by entering a context and is never changed; leaving the context brings
back the one outside it. A plain ``torch.autocast`` inside a scope changes the dtype and switches
casting on and off as always; the policy of the scope stays.

In a backward pass there is one more question. ``torch.utils.checkpoint`` runs a part of the forward
pass again, and it re-enters ``torch.autocast`` with the dtype it saw then, but knows of no policy.
Autograd numbers its nodes in the order in which a thread makes them, so a thread that notes the
number at which each policy began (:class:`_History`) can tell from the node that asks for the
recomputation which policy was active when that node was made.
"""

import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from halfstep import _torch
from halfstep.casting.casts import WeightCache

if TYPE_CHECKING:
    from halfstep.casting.kernels import Plans

_INHERITED = "halfstep.casting.history"
_LONGEST_HISTORY = 100_000  # changes of policy; a graph that lives through so many is not seen


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """What is active in a thread.

    Attributes:
        plans: for each device type with a policy, its plans.
        outer: the scope outside this one, None for the scope of a thread outside every context.
        cache: the casts of weights that this context and those inside it share.
        switches: PyTorch's autocast switches as they were outside.
        guard: the number that torch.compile knows these plans by.
        backward: the backward pass in which the scope was entered, -1 for none.
        nesting: for a scope that a compiled graph entered, the nesting depth of autocast there. A
            graph whose tracing was given up half-way leaves such a scope behind; the depth tells.
    """

    plans: Mapping[str, "Plans"]
    outer: "Scope | None"
    cache: WeightCache | None
    switches: _torch.Switches | None = None
    guard: int | None = None
    backward: int = -1
    nesting: int | None = None


class _History:
    """The policies of one thread as a step function of the autograd node number."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, Mapping[str, Plans]]] = []

    def note(self, plans: "Mapping[str, Plans]") -> None:
        change = (_torch.next_node_number(), plans)
        if self._changes and self._changes[-1][0] == change[0]:  # no node was made in between
            self._changes[-1] = change
            return
        self._changes.append(change)
        if len(self._changes) > _LONGEST_HISTORY:
            self._changes = self._changes[_LONGEST_HISTORY // 2 :]

    def at(self, node: torch.autograd.graph.Node) -> "Mapping[str, Plans] | None":
        changes = self._changes
        position = bisect_right(changes, _torch.node_number(node), key=itemgetter(0))
        return changes[position - 1][1] if position else None


class _Thread(threading.local):
    """The state of a thread; ``__init__`` runs in each thread that looks."""

    def __init__(self) -> None:
        self.scope = Scope(plans={}, outer=None, cache=None)
        self.history: _History | None = None


_thread = _Thread()


def current() -> Scope:
    """Return the innermost scope of this thread."""
    scope = _thread.scope
    if scope.nesting is not None:
        nesting = _nesting()
        while scope.nesting is not None and scope.nesting > nesting:
            assert scope.outer is not None
            scope = scope.outer
        _thread.scope = scope
    return scope


def enter(
    plans: "Plans | None", switches: _torch.Switches | None = None, *, traced: bool = False
) -> None:
    """Make ``plans`` active for their device in this thread; :func:`leave` undoes it.

    Args:
        plans: the plans, or None to leave the active ones as they are.
        switches: PyTorch's autocast switches as they are now; :func:`leave` returns them.
        traced: whether torch.compile is tracing the call, or runs what it traced.
    """
    outer = current()
    active = outer.plans if plans is None else {**outer.plans, plans.device: plans}
    scope = Scope(
        plans=active,
        outer=outer,
        cache=outer.cache or WeightCache(),
        switches=switches,
        guard=outer.guard if traced else _guard(active),
        backward=_torch.backward_id(),
        nesting=_nesting() if traced else None,
    )
    _activate(scope)


def leave() -> _torch.Switches | None:
    """Bring back the scope outside the current one."""
    scope = current()
    assert scope.outer is not None, "leave() without enter()"
    _activate(scope.outer)
    return scope.switches


def active_plans(device: str) -> "Plans | None":
    """Return the plans that decide for ops on ``device`` now, None if PyTorch decides."""
    scope = current()
    backward = _torch.backward_id()
    if backward != -1 and scope.backward != backward:
        plans = _plans_of_node()
        if plans is not None:
            return plans.get(device)
    return scope.plans.get(device)


def _plans_of_node() -> "Mapping[str, Plans] | None":
    node = _torch.current_node()
    if node is None or not _torch.has_inherited(_INHERITED):
        return None
    history: _History = _torch.get_inherited(_INHERITED)
    return history.at(node)


def _activate(scope: Scope) -> None:
    _thread.scope = scope
    if _thread.history is None:
        _thread.history = _History()
        _torch.set_inherited(_INHERITED, _thread.history)
    _thread.history.note(scope.plans)
    _torch.set_compile_guard(scope.guard)


# Code that was compiled under one policy must not run under another: torch.compile's own guards
# know the dtype only. Each set of plans gets a number that they do know.
_guards: dict[frozenset[int], int] = {}


def _guard(plans: "Mapping[str, Plans]") -> int | None:
    if not plans:
        return None
    key = frozenset(map(id, plans.values()))  # plans are kept for good, so are their ids
    guard = _guards.get(key)
    if guard is None:
        if len(_guards) == _torch.NUM_GUARD_VALUES:
            _torch.forget_compiled_code()
            _guards.clear()
        guard = _guards[key] = len(_guards)
    return guard


def _nesting() -> int:
    """Return how many autocast contexts of any kind this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
