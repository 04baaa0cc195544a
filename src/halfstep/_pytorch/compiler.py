"""torch.compile, torch.export and torch.jit: marks for functions, guards of compiled code."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
import torch._functorch.config
import torch.compiler.config
import torch.utils._pytree
from torch.utils._config_module import _UNSET_SENTINEL as _UNSET

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


def allow_in_graph(*functions: Callable[..., None]) -> None:
    """Make torch.compile put calls of the functions into its graphs unchanged."""
    torch.compiler.allow_in_graph(list(functions))  # type: ignore[no-untyped-call]


# (graph, device types of the autocast contexts in it) -> the function to run in place of the graph.
WrapGraph = Callable[[Callable[..., Any], list[str]], Callable[..., Any]]


def wrap_traced_graph(wrap: WrapGraph, *, backward_off: bool) -> None:
    """Make torch.compile run the graph that it is tracing in this thread inside of ``wrap``.

    ``wrap`` also applies to its compilation. ``backward_off`` compiles its backward pass outside of
    autocast.
    """
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)  # torch.export may trace without one
    output: Any = getattr(translator, "output", None)
    backend = getattr(output, "compiler_fn", None)
    if backend is None:
        return
    if hasattr(backend, "_is_backward_off"):
        backend._is_backward_off |= backward_off
        return

    @functools.wraps(backend)
    def wrapped_backend(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        devices = _autocast_devices_of(graph)
        graph.code  # noqa: B018  # generates it: torch.compile would do so in the backend's result
        was_off = _mark.backward_off
        _mark.backward_off |= wrapped_backend._is_backward_off  # type: ignore[attr-defined]
        _show_mark()
        try:
            run = wrap(backend, devices)(graph, inputs, **options)
        finally:
            _mark.backward_off = was_off
            _show_mark()
        if not devices:
            return run
        return wrap(run, devices)

    wrapped_backend._is_backward_off = backward_off  # type: ignore[attr-defined]
    output.compiler_fn = wrapped_backend


def _autocast_devices_of(graph: torch.fx.GraphModule) -> list[str]:
    """Return the device types of the autocast contexts that a graph enters."""
    entered = (
        node.args[0]
        for module in graph.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.target is torch.amp.autocast_mode._enter_autocast
    )
    return list(dict.fromkeys(entered))


def do_not_compile_alone(
    function: Callable[_Params, _Result], *, nor_below: bool = True
) -> Callable[_Params, _Result]:
    """Let torch.compile trace into ``function`` from its caller, but not start in it.

    If torch.compile gives up on a function, it runs it eagerly and compiles its callees. A graph of
    code that enables autocast would do so only during tracing, and never when it runs.

    Args:
        function: the function.
        nor_below: whether the functions that it calls are excluded too.
    """
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, skip if nor_below else default)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def keep_out_of_graphs(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Make torch.compile break the graph at ``function`` and compile nothing in it.

    Like ``torch.compiler.disable``, which would import all of torch.compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it updates Python state"  # type: ignore[attr-defined]
    return do_not_compile_alone(function)


def run_while_tracing(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Make torch.compile call ``function`` during tracing and treat the result as a constant.

    Like ``torch.compiler.assume_constant_result``, which would import all of torch.compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant_while_tracing(kind: type[_Value]) -> type[_Value]:
    """Let torch.compile of 2.11 pass values of a class to :func:`run_while_tracing` functions.

    Later versions do not need this. The class must be immutable, have ``__eq__`` and ``__hash__``,
    and not be a dataclass. Compiled code is guarded by the value.
    """
    torch.utils._pytree.register_constant(kind)
    return kind


@run_while_tracing
def is_exporting() -> bool:
    """Return whether torch.export is tracing. 2.11's own function also counts torch.compile."""
    return torch.compiler.is_exporting()


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of a module run compiled code."""
    return module._compiled_call_impl is not None or compiled_from(module) is not None


def compiled_from(module: torch.nn.Module) -> Any:
    """Return the module from which torch.compile made ``module``; None for other modules."""
    return getattr(module, "_orig_mod", None)


def script_instead(wrapper: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Make torch.jit.script, and torch.compile, compile ``original`` in place of ``wrapper``."""
    vars(wrapper).update(__script_if_tracing_wrapper=True, __original_fn=original)


# torch.compile guards on the autocast dtype of every device type with autocast on. This type
# (Graphcore's) has no backend any more, so no op depends on it, and a number encoded there as a
# dtype becomes part of the guards. It does count for torch._C._is_any_autocast_enabled().
GUARD_DEVICE = "ipu"

_get_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled

_USUAL = _get_dtype(GUARD_DEVICE)  # the first number, so that most programs need no write
_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_GUARD_VALUES = [_USUAL, *sorted(_DTYPES - {_USUAL}, key=str)]
NUM_GUARD_VALUES = len(_GUARD_VALUES)

# Whether autocast is on for that device type, and its dtype there.
CompileGuard = tuple[bool, torch.dtype]


def numbered_guard(number: int) -> CompileGuard:
    """Return the guard for a number below :data:`NUM_GUARD_VALUES`; all guards differ."""
    return True, _GUARD_VALUES[number]


def guard_now() -> CompileGuard:
    """Return the guard of code that is compiled in this thread now."""
    return _is_enabled(GUARD_DEVICE), _get_dtype(GUARD_DEVICE)


class _Mark(threading.local):
    """What the code that this thread compiles depends on, beside the guard."""

    tag, backward_off = "", False


_mark = _Mark()


class _Marked:
    """The variable of a configuration's entry, read with the mark of the thread in its value.

    So entering a context, which is frequent, writes nothing there. PyTorch caches configurations
    that it has read as a whole; the tag, in every key of its caches, is read by itself.
    """

    def __init__(self, entry: Any, marked: Callable[[Any], Any]) -> None:
        variable = entry.user_override
        self.set, self._get, self._marked = variable.set, variable.get, marked
        entry.user_override = self

    def get(self) -> Any:
        return self._marked(self._get())


def set_compile_mark(was: CompileGuard, guard: CompileGuard, tag: str, backward_off: bool) -> None:
    """Set the guard and the tag for code that this thread compiles from now on.

    ``was`` is the current guard. The code runs only under the same guard; ``tag`` distinguishes it
    in the on-disk caches. ``backward_off`` compiles its backward pass outside of autocast; it
    depends on the tag.
    """
    enabled, dtype = guard
    _set_enabled(GUARD_DEVICE, enabled)  # always: PyTorch itself switches all of them off and on
    if dtype is not was[1]:
        _set_dtype(GUARD_DEVICE, dtype)
    _mark.tag, _mark.backward_off = tag, backward_off
    if type(_tag.user_override) is not _Marked:
        _show_mark()


def _show_mark() -> None:
    """Have configurations show the mark: in what is read there, before 2.13 in what is set."""
    if not _has_variables:
        torch.compiler.config.cache_key_tag = _tagged(torch.compiler.config.cache_key_tag)
        users = _functorch.backward_pass_autocast
        _functorch.backward_pass_autocast = _differentiated(_SAME if users is _OFF else users)
    elif type(_tag.user_override) is not _Marked:
        _Marked(_tag, _tagged)
        _Marked(_backward, _differentiated)


_TAG_MARK = "|halfstep:"
_tag: Any = torch.compiler.config._config["cache_key_tag"]  # type: ignore[attr-defined]
_has_variables = isinstance(_tag.user_override, ContextVar)  # from 2.13 on


def _tagged(users: Any) -> Any:
    if users is _UNSET and _mark.tag:
        users = _tag.default if _tag.env_value_default is _UNSET else _tag.env_value_default
    tag = _TAG_MARK + _mark.tag if _mark.tag else ""
    return users if users is _UNSET else users.partition(_TAG_MARK)[0] + tag


# By default PyTorch traces the backward pass of compiled code under the autocast around the call.
# That would lower what a policy or an island keeps in float32. In eager code the backward pass runs
# outside of autocast; the forward pass has recorded all casts. A user's list of contexts stays.
_functorch: Any = torch._functorch.config
_backward: Any = _functorch._config["backward_pass_autocast"]
_SAME, _OFF = "same_as_forward", "".join(("of", "f"))  # its identity differs from a user's "off"


def _differentiated(users: Any) -> Any:
    return _OFF if _mark.backward_off and (users is _UNSET or users == _SAME) else users


def is_loaded() -> bool:
    """Return whether torch.compile is imported in this process; otherwise nothing is compiled."""
    return "torch._dynamo" in sys.modules


# The module that stores the autocast classes which exist when it is imported.
MODULE_OF_CONTEXTS = "torch._dynamo.variables.torch"


def forget_compiled_code() -> None:
    """Drop everything that torch.compile has compiled in this process."""
    if is_loaded():
        torch.compiler.reset()


def eager() -> AbstractContextManager[object]:
    """Return a context in which compiled code runs eagerly."""
    return torch.compiler.set_stance("force_eager") if is_loaded() else nullcontext()
