"""Modes, transforms and tracers between a program and its ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch._functorch.apis
import torch._functorch.eager_transforms
import torch.nn.utils.stateless
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from halfstep._pytorch.amp import Switches, autocast_switches, has_function_mode
from halfstep._pytorch.dispatch import autocast_key

# (with no_torch_function(): ...) runs a block as if no tensor had its own __torch_function__.
no_torch_function = torch._C.DisableTorchFunctionSubclass

# (with no_function_modes(): ...) does the same, and also disables torch function modes.
no_function_modes = torch._C.DisableTorchFunction

# (tensor): whether it is a wrapper in torch.func.grad or vmap, where writing to outer tensors is
# forbidden.
is_inside_functorch = torch._C._functorch.is_functorch_wrapped_tensor

# (): whether torch.jit.trace, or an export based on it, is tracing in this thread.
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing

# (): whether a transform of ``torch.func`` is active in this thread.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active

# (): the number of dispatch modes that see the ops of this thread.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose ``__torch_dispatch__`` sees every op of a thread, below autocast and autograd.

    PyTorch's base class imports all of torch.compile at the first op, to stay out of its graphs.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class FunctionMode(torch.overrides.TorchFunctionMode):
    """A mode whose ``__torch_function__`` sees calls of PyTorch functions in a thread.

    It does not see calls made by these functions.
    """

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate the mode in a block, wherever in the stack of modes it is at the end."""
        _push(self)
        try:
            yield
        finally:
            depth = torch._C._len_torch_function_stack()
            at = next((i for i in range(depth) if _mode_at(i) is self), depth)
            for mode in _pop_from(at)[1:]:
                _push(mode)

    def leave(self) -> bool:
        """Deactivate the mode if it is the innermost one; return whether it was.

        An inactive mode costs nothing.
        """
        depth = torch._C._len_torch_function_stack()
        if not depth or _mode_at(depth - 1) is not self:
            return False
        self._place = depth - 1
        _pop_from(depth - 1)
        return True

    def come_back(self) -> None:
        """Reactivate the mode at its former place in the stack: a block may have begun since."""
        for mode in (self, *_pop_from(self._place)):
            _push(mode)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Deactivate the mode in a block if it is the innermost one."""
        was_left = self.leave()
        try:
            yield
        finally:
            if was_left:
                _push(self)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Deactivate the mode in a block, wherever in the stack of modes it is."""
        place = next(i for i, each in enumerate(reversed(function_modes())) if each is self)
        for mode in _pop_from(place)[1:]:
            _push(mode)
        try:
            yield
        finally:
            for mode in (self, *_pop_from(place)):
                _push(mode)


def function_modes() -> list[Any]:
    """Return the function modes of this thread, innermost first."""
    return [_mode_at(place) for place in reversed(range(torch._C._len_torch_function_stack()))]


def _mode_at(place: int) -> Any:
    return torch._C._get_function_stack_at(place)


def _push(mode: Any) -> None:
    torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def _pop_from(place: int) -> list[Any]:
    """Pop the function modes from a stack position on; return them, outermost first."""
    count = torch._C._len_torch_function_stack() - place
    return [torch.overrides._pop_mode() for _ in range(count)][::-1]  # type: ignore[no-untyped-call]


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, innermost last."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(num_dispatch_modes())]


_NOTHING = nullcontext()


def unseen_by_modes() -> AbstractContextManager[object]:
    """Return a context whose ops are hidden from all of the user's modes."""
    has_functions, has_ops = has_function_mode(), num_dispatch_modes() > 0
    if not has_ops:
        return torch._C.DisableTorchFunction() if has_functions else _NOTHING
    stack = ExitStack()
    if has_functions:
        stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
    return stack


def on_default_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for a call that no mode sees, not even that of the default device."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return function
    context = torch.utils._device.DeviceContext(device)
    return lambda *args, **kwargs: context.__torch_function__(function, (), args, kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def without_ours() -> Iterator[None]:
    """Hide ops in a block from halfstep's dispatch modes, unless they are inside other modes."""
    ours = []
    while num_dispatch_modes() and isinstance(dispatch_modes()[-1], DispatchMode):
        ours.append(torch.utils._python_dispatch._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(ours):
            torch.utils._python_dispatch._push_mode(mode)


def outside_of_transforms() -> AbstractContextManager[object]:
    """Return a context outside of the surrounding transforms of ``torch.func``."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_in_forward_mode() -> bool:
    """Return whether derivatives are computed in forward mode, along with the values."""
    return torch.autograd.forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Return whether ops are not simply executed once each.

    This includes vmap, grad and the like, forward-mode AD, fake tensors, jit.trace, make_fx, and
    dispatch modes, some of which replay ops or depend on their order. Halfstep's own modes are only
    observers.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing():
        return True
    if is_in_forward_mode():
        return True
    if not num_dispatch_modes():
        return False
    return not all(isinstance(mode, DispatchMode) for mode in dispatch_modes())


def is_tracing_before_autocast() -> bool:
    """Return whether ops are recorded, instead of run, before they reach the Autocast keys.

    ``make_fx(pre_dispatch=True)`` and its users do so. :func:`amp.has_function_mode`, which is then
    true, is faster to check.
    """
    proxy = torch._C._TorchDispatchModeKey.PROXY
    mode = torch._ops._get_dispatch_mode_pre_dispatch(proxy)  # type: ignore[no-untyped-call]
    return mode is not None


def is_making_graph() -> bool:
    """Return whether ``make_fx`` is recording; it rejects subclasses among captured tensors."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._get_dispatch_mode(proxy) is not None


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values because it belongs to a FakeTensorMode."""
    module: Any = sys.modules.get("torch._subclasses.fake_tensor")  # else there is none
    return module is not None and isinstance(tensor, module.FakeTensor)


def autocast_again(device_type: str) -> Any:
    """Return a context, for a dispatch mode, in which autocast casts as in the program."""
    return torch._C._SetExcludeDispatchKeyGuard(autocast_key(device_type), False)


def autocast_switches_of_caller(device_type: str) -> Switches:
    """Return, in a dispatch mode, the switches under which the program called the op.

    The mode runs with all keys above its own excluded, including autocast's.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return autocast_switches(device_type)


# --- torch.func -----------------------------------------------------------------------------------

FUNCTIONAL_CALL: tuple[Any, str] = (torch.nn.utils.stateless, "_functional_call")
"""Calls a module, its first argument, with other parameters in place of its own."""

# (module, name): the implementations of torch.func.grad, grad_and_value, vmap and functional_call,
# which are looked up in the module at each call.
CALLED_AS_A_WHOLE: tuple[tuple[Any, str], ...] = (
    (torch._functorch.eager_transforms, "grad_impl"),
    (torch._functorch.eager_transforms, "grad_and_value_impl"),
    (torch._functorch.apis, "vmap_impl"),
    FUNCTIONAL_CALL,
)

RETURNING_GRADIENTS = {"grad_impl", "grad_and_value_impl"}
"""The names of those that return gradients."""
