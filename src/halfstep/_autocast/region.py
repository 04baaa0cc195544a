"""Entering and exiting of validated autocast contexts, also in torch.compile's graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import casts, kernels, native, scopes
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.scopes import Settings
from halfstep._pytorch import amp, compiler, modes
from halfstep.errors import CallOrderError

_NOT_IN_A_PROGRAM = (
    "{} cannot keep a halfstep policy in the program that it makes: let it have the model without "
    "autocast and run the program under it, or use torch.autocast there"
)


class Region:
    """The context manager behind :class:`autocast`, with validated settings."""

    _is_users = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._traced: list[Any] = []  # contexts that torch.compile traces

    @compiler.do_not_compile_alone
    def __enter__(self) -> Self:
        settings = self._settings
        if torch.compiler.is_compiling():
            if settings.switches.enabled and compiler.is_exporting():
                raise RuntimeError(_NOT_IN_A_PROGRAM.format("torch.export"))
            context = in_graph(settings, is_users=self._is_users)
            context.__enter__()
            self._traced.append(context)
        else:
            change = scopes.thread.state.change
            if change is not None and self._is_users:
                settings = change(settings)
            _enter(self, settings)
            if LISTENERS and self._is_users:
                for listener in [*LISTENERS]:
                    listener(settings.switches)
        return self

    @compiler.do_not_compile_alone
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Use the length for torch.compile of 2.11; test it first, since it is faster.
        if len(self._traced) and torch.compiler.is_compiling():
            self._traced.pop().__exit__(kind, error, traceback)
            return
        if isinstance(error, RuntimeError) and self._settings.policy is not None:
            native.explain(error, self._settings.switches.device)
            casts.explain_number(error)
        scope = scopes.thread.state.scope
        if scope.context is self:  # so the scope has no nesting depth
            _exit(scope)
        else:
            problem = _exit_below_others(self)
            if problem is not None and kind is None:  # the propagating error is more informative
                raise problem

    def __repr__(self) -> str:
        switches, number, inherit = self._settings
        is_on = "" if switches.enabled else ", enabled=False"
        policy = None if inherit or number is None else kernels.prepared(number).policy
        return f"autocast({switches.device!r}, {switches.dtype}{is_on}" + (
            f", policy={str(policy)!r})" if policy else ")"
        )


LISTENERS: list[Callable[[amp.Switches], object]] = []
"""Callbacks that receive the switches of user contexts, in their thread, outside of tracing."""


@contextmanager
def observe_contexts(listener: Callable[[amp.Switches], object]) -> Iterator[None]:
    """Notify a listener of the contexts that are entered in a block."""
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


class ModuleRegion(Region):
    """The region of a module with its own rules, inside of the user's context."""

    _is_users = False


def outside_of(context: Region) -> amp.Switches:
    """Return the values that PyTorch's switches had outside of ``context`` in this thread.

    Raises:
        AttributeError: The context is not entered in this thread.
    """
    _, scope = scopes.entered(context)
    if scope is None or scope.switches is None:
        raise AttributeError(f"{context!r} is not entered in this thread: nothing is outside of it")
    return scope.switches


def current_policy(device_type: str) -> Policy | None:
    """Return the policy for ops on ``device_type`` in this thread, None for PyTorch's rules.

    Sync: none.
    """
    active = scopes.policies().get(device_type)
    return None if active is None else active.policy


@compiler.run_while_tracing
def current_settings(device_type: str, *, enabled: bool | None = None) -> Settings:
    """Return the settings of a :class:`Region` that runs a block like the current context.

    ``enabled`` overrides whether autocast is on.
    """
    active = scopes.policies().get(device_type)
    switches = scopes.switches(device_type)
    if enabled is not None:
        switches = switches._replace(enabled=enabled)
    if active is not None:
        return Settings(switches, active.number, inherit=False)
    number = kernels.prepare(preset("torch"), device_type) if switches.enabled else None
    return Settings(switches, number, inherit=False)


@compiler.run_while_tracing
def settings_within(module: str, device_type: str) -> Settings | None:
    """Return the settings for a module, by name, in this thread; None if it needs no change.

    Autocast must be on for ``device_type``, the device of the module's computation.
    """
    active = scopes.policies().get(device_type)
    if active is None:
        return None
    number = kernels.number_within(active, module, active.lower_precision())
    if number == active.number:
        return None
    switches = scopes.switches(device_type)
    return Settings(switches._replace(enabled=number is not None), number, inherit=False)


# --- entering and leaving -------------------------------------------------------------------------


def _enter(context: object, settings: Settings) -> None:
    switches, number, inherit = settings
    outer = scopes.thread.state.scope
    if outer.nesting is not None:
        outer = scopes.current()
    policies = outer.policies or scopes.ambient
    if number is not None:
        if (number, inherit) in policies.within and not amp.has_function_mode():
            policies = policies.within[number, inherit]
        else:
            policies = _policies(policies, switches.device, number, inherit)
    # Compiled code is guarded by PyTorch's cache switch, so it is never on under a policy.
    device, dtype, enabled, cache = switches
    before = _get_dtype(device), _is_enabled(device), _is_cache_enabled()
    outside = tuple.__new__(amp.Switches, (device, *before))  # half the time of amp.Switches(...)
    _set_enabled(device, enabled)
    if dtype is not before[0]:
        _set_dtype(device, dtype)
    _set_cache_enabled(cache and not policies)
    if number is not None and device not in outer.policies:
        native.begin(device)
    scopes.enter(outer, policies, context, settings, outside)
    _increment_nesting()


def _exit(scope: scopes.Scope) -> None:
    outer, switches, settings = scope.outer, scope.switches, scope.settings
    assert outer is not None
    assert switches is not None
    scopes.leave(scope)
    has_policy = settings is not None and settings.policy is not None
    if has_policy and switches.device not in outer.policies:
        native.end(switches.device)
    # As in torch.autocast: PyTorch's kernels for other devices may have cached casts of weights.
    if _decrement_nesting() == 0:
        amp.clear_autocast_cache()
    device, dtype, enabled, cache = switches
    _set_enabled(device, enabled)
    _set_dtype(device, dtype)
    _set_cache_enabled(cache)


_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_is_cache_enabled = torch.is_autocast_cache_enabled
_set_cache_enabled = torch.set_autocast_cache_enabled
_increment_nesting = torch.autocast_increment_nesting
_decrement_nesting = torch.autocast_decrement_nesting


def _exit_below_others(context: Region) -> CallOrderError | None:
    """Exit a context that is not the innermost one; re-enter those inside it.

    Return an error, or None if the inner contexts have the same effect, so that no op was affected.
    """
    inner, scope = scopes.entered(context)
    if scope is None or any(each.context is None for each in inner):
        return CallOrderError(
            f"{context!r} is left in a thread that did not enter it (a generator, say, that "
            "was started in another one); enter and leave it in one thread"
        )
    assert scope.settings is not None
    for each in (*inner, scope):
        (scopes.leave if each.settings is None else _exit)(each)
    other: object = None
    for each in reversed(inner):
        if each.settings is None:  # of use_policy
            scopes.enter(scopes.current(), each.policies, each.context)
        else:
            _enter(each.context, each.settings)
        switches = (each.settings or scope.settings).switches
        alike = scope.policies, scope.settings.switches, scope.policies
        if (each.policies, switches, scopes.current().policies) != alike:
            other = each.context
    if other is None:
        return None
    return CallOrderError(
        f"{context!r} is left while {other!r}, entered after it, is not: asyncio tasks or "
        "generators that wait inside their contexts have taken turns. Autocast is per thread, so "
        "some ops of the one ran under the other. Keep await and yield out of the block, or run "
        "what has another dtype or policy in a thread of its own (asyncio.to_thread)"
    )


def _policies(outside: scopes.Policies, device: str, number: int, inherit: bool) -> scopes.Policies:
    """Return the outer policies, with the new one for ``device`` unless it is inherited."""
    if amp.has_function_mode() and modes.is_tracing_before_autocast():
        raise RuntimeError(_NOT_IN_A_PROGRAM.format("make_fx(pre_dispatch=True)"))
    is_outside = inherit and device in outside
    inside = outside if is_outside else outside.with_policy(kernels.prepared(number))
    outside.within[number, inherit] = inside
    return inside


@contextmanager
def in_graph(settings: Settings, *, is_users: bool = True) -> Iterator[None]:
    """Trace a graph with torch.compile whose ops run with ``settings``."""
    _prepare_graph(settings.policy, is_users)
    # Use attributes: before 2.13 torch.compile cannot unpack a named tuple.
    switches = settings.switches
    cache = switches.cache and settings.policy is None
    with torch_autocast(switches.device, switches.dtype, switches.enabled, cache):
        _enter_scope(switches.device, settings.policy, settings.inherit)
        try:
            yield
        finally:
            _leave_scope()


# torch.compile puts calls of these functions into its graphs unchanged and executes them during
# tracing, so that the kernels that run then see the scope.
def _enter_scope(device: str, number: int | None, inherit: bool) -> None:
    outer = scopes.current()
    policies = outer.policies or scopes.ambient
    if number is not None:
        policies = _policies(policies, device, number, inherit)
    scopes.enter_in_graph(outer, policies)


def _leave_scope() -> None:
    scopes.leave(scopes.current())


@compiler.run_while_tracing
def _prepare_graph(number: int | None, is_users: bool) -> None:
    compiler.allow_in_graph(_enter_scope, _leave_scope)
    is_pytorchs = number is None or kernels.prepared(number).is_pytorchs
    # The policy "torch" keeps PyTorch's gradients, too; an island has those of eager code.
    compiler.wrap_traced_graph(_restoring, backward_off=not (is_users and is_pytorchs))


def _restoring(run: Callable[..., Any], devices: list[str]) -> Callable[..., Any]:
    """Return ``run`` such that an exception in it leaves autocast as it was.

    A graph has no ``finally``: the exception skips the nodes that exit its contexts.
    """

    def restoring(*args: Any, **kwargs: Any) -> Any:
        nesting = scopes.nesting_depth()
        outside = [amp.autocast_switches(device) for device in devices]
        try:
            return run(*args, **kwargs)
        except BaseException:
            while scopes.nesting_depth() > nesting:
                _decrement_nesting()
            if nesting == 0:
                amp.clear_autocast_cache()
            for switches in outside:
                amp.set_autocast_switches(switches)
            scopes.current()  # drops the scopes of the graph
            raise

    return restoring
