"""Events of training, for the tools that stand on halfstep: losses, iterations, contexts, ops.

Not an interface for users, who read outcomes, records and diagnoses, and it changes with the tools.
A recorder, a watch, a trace and a runner observe training by this module, and use nothing else of
the inside of scalers and autocast. What replays or changes a step drives them by the functions of
``_scaler/access.py`` and ``_autocast/access.py``.

Cost without observers: one test of an empty list for each loss, iteration and context; nothing for
an op, since the kernels that report ops are registered only while there is somebody to report to.

Sync: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from halfstep._autocast import scopes
from halfstep._autocast.kernels import OpObserver, observe_ops
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.region import ModuleRegion, observe_contexts
from halfstep._scaler.journal import OBSERVERS, THIS_THREAD, Observer

__all__ = [
    "Observer",
    "OpObserver",
    "PolicyOnDevice",
    "active_policies",
    "has_own_policies",
    "is_observing",
    "is_on_island",
    "is_stepping",
    "observe",
    "observe_contexts",
    "observe_ops",
    "observers",
    "unobserved",
]

# --- losses and iterations ------------------------------------------------------------------------


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Notify an observer of the losses and iterations of all scalers while the block runs."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        with suppress(ValueError):  # a replay removes all observers
            OBSERVERS.remove(observer)


@contextmanager
def unobserved() -> Iterator[None]:
    """Suspend all observers of losses and iterations while the block runs, as a replay does."""
    observers = OBSERVERS[:]
    OBSERVERS.clear()
    try:
        yield
    finally:
        OBSERVERS[:] = observers


def observers() -> Sequence[Observer]:
    """Return the active observers of losses and iterations, oldest first."""
    return tuple(OBSERVERS)


def is_observing(observer: Observer) -> bool:
    """Return whether an observer is active: not before or after its block, nor in a replay."""
    return observer in OBSERVERS


def is_stepping() -> bool:
    """Return whether a scaler or guard is stepping an optimizer in this thread.

    Its outcome follows with the iteration, so hooks of optimizers leave such a step out. A pipeline
    stage scales no loss, so nothing else distinguishes its steps from plain ones.
    """
    return THIS_THREAD.stepping is not None


# --- contexts and ops -----------------------------------------------------------------------------


def active_policies() -> Mapping[str, PolicyOnDevice]:
    """Return the policies that are active in this thread, by device type.

    A device type without one has PyTorch's rules. Equal policies in different modules with rules
    are different objects, which are never freed.
    """
    return scopes.policies()


def has_own_policies() -> bool:
    """Return whether a context with a policy is entered in this thread.

    Those that :class:`halfstep.use_policy` gives to other threads do not count there.
    """
    return bool(scopes.current().policies)


def is_on_island() -> bool:
    """Return whether a rule for a module has switched autocast off here."""
    scope = scopes.current()
    is_off = scope.settings is not None and not scope.settings.switches.enabled
    return is_off and isinstance(scope.context, ModuleRegion)
