"""Entering and leaving autocast, with everything settled; in torch.compile's graphs too."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import torch

from halfstep import _torch
from halfstep.casting import kernels, scopes
from halfstep.casting.policy import Policy, preset


class Settings(NamedTuple):
    """What a context switches on. Constants all, so that torch.compile can carry them in a graph.

    Attributes:
        switches: what PyTorch's switches are set to.
        policy: the number of the policy (see :func:`kernels.prepare`), None where autocast is off.
        inherit: whether the policy of a context outside this one goes before it.
    """

    switches: _torch.Switches
    policy: int | None
    inherit: bool


class Region:
    """The context manager behind :class:`autocast`, with everything settled."""

    _is_users = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._traced: list[object] = []

    @_torch.do_not_compile_alone
    def __enter__(self) -> None:
        switches, policy, inherit = self._settings
        if switches.enabled and torch.compiler.is_exporting():
            raise RuntimeError(
                "torch.export cannot keep a halfstep policy in the exported program: export the "
                "model without autocast and run the program under it, or use torch.autocast there"
            )
        if torch.compiler.is_compiling():
            self._traced.append(_torch.enter_traced(switches))
            enter_scope_in_graph(self._settings)
        else:
            if _thread.change is not None and self._is_users:
                switches, policy, inherit = _thread.change(self._settings)
            _enter(switches, policy, inherit)

    @_torch.do_not_compile_alone
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling():
            leave_scope_in_graph()
            _torch.exit_traced(self._traced.pop())
        else:
            _exit()


class ModuleRegion(Region):
    """How a module runs by a rule of its own, inside of what the user has entered."""

    _is_users = False


class _Thread(threading.local):
    change: Callable[[Settings], Settings] | None = None


_thread = _Thread()


@contextmanager
def changed(change: Callable[[Settings], Settings]) -> Iterator[None]:
    """Let what the user enters meanwhile in this thread switch on something else.

    Args:
        change: Returns the settings to use, given those that were asked for.
    """
    before, _thread.change = _thread.change, change
    try:
        yield
    finally:
        _thread.change = before


def current_policy(device_type: str) -> Policy | None:
    """Return the policy that decides for ops on ``device_type`` in this thread, None for PyTorch's.

    Sync: none.
    """
    active = scopes.current().policies.get(device_type)
    return None if active is None else active.policy


@_torch.run_while_tracing
def current_settings(device_type: str) -> Settings:
    """Return what a :class:`Region` must be given to run a block as it would run now."""
    active = scopes.current().policies.get(device_type)
    switches = _torch.autocast_switches(device_type)
    if active is not None:
        return Settings(switches, active.number, inherit=False)
    number = kernels.prepare(preset("torch"), device_type) if switches.enabled else None
    return Settings(switches, number, inherit=False)


@_torch.run_while_tracing
def settings_within(module: str, device_type: str) -> Settings | None:
    """Return how a module is to run under the policy of this thread, None for as what is around it.

    Args:
        module: Its name in the model.
        device_type: That of what it computes with; autocast is on for it.
    """
    active = scopes.current().policies.get(device_type)
    if active is None:
        return None
    number = kernels.number_within(active, module, torch.get_autocast_dtype(device_type))
    if number == active.number:
        return None
    switches = _torch.autocast_switches(device_type)
    return Settings(switches._replace(enabled=number is not None), number, inherit=False)


# --- entering and leaving -------------------------------------------------------------------------


def _enter(switches: _torch.Switches, policy: int | None, inherit: bool) -> None:
    outside = _torch.autocast_switches(switches.device)
    scopes.enter(_policies(switches.device, policy, inherit), outside)
    _torch.set_autocast_switches(switches)
    torch.autocast_increment_nesting()


def _exit() -> None:
    outside = scopes.leave()
    assert outside is not None
    nesting = torch.autocast_decrement_nesting()
    # As in torch.autocast: its kernels for other devices may have kept casts of weights.
    if nesting == 0:
        torch.clear_autocast_cache()
    _torch.set_autocast_switches(outside)


def _policies(device: str, number: int | None, inherit: bool) -> scopes.Policies:
    """Return what is to be active inside: what is active outside, and the policy of ``device``."""
    outside = scopes.current().policies
    if number is None or (inherit and device in outside):
        return outside
    return {**outside, device: kernels.prepared(number)}


def enter_scope_in_graph(settings: Settings) -> None:
    """While torch.compile traces: make a graph in which the policy of ``settings`` is active."""
    _allow_in_graph()
    _enter_scope_in_graph(settings.switches.device, settings.policy, settings.inherit)


# torch.compile puts calls of these into its graphs as they are and makes them while it traces: the
# kernels that run meanwhile then see the scope.
def _enter_scope_in_graph(device: str, number: int | None, inherit: bool) -> None:
    scopes.enter(_policies(device, number, inherit), traced=True)


def leave_scope_in_graph() -> None:
    """Undo :func:`enter_scope_in_graph`."""
    scopes.leave()


@_torch.run_while_tracing
def _allow_in_graph() -> None:
    _torch.allow_in_graph(_enter_scope_in_graph, leave_scope_in_graph)
