"""Capture of the calls that a training loop makes, for a replay.

Calls of models and of PyTorch functions are kept if the loop itself makes them. Calls inside these
calls are not kept separately.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, is_grad_enabled, nn

from halfstep._common.nested import tensors_reached
from halfstep._pytorch import autograd, compiler, modes, modules, optim
from halfstep._scaler import GradScaler
from halfstep._tools.measure import is_finite
from halfstep._tools.patches import Patches, TopLevelCalls, not_compiled
from halfstep._tools.replay.kept_calls import (
    VIEWS,
    KeptCall,
    Made,
    found_bad,
    is_model,
    name_of,
    scale,
)
from halfstep._tools.user_code import is_called_by_a_scaler
from halfstep._tools.watch.bad_steps import are_finite
from halfstep._tools.watch.call_log import OF_LISTS, CallLog, LoggedCall, unseen

MOST_READ = 1024  # the largest number of entries of a tensor that is checked when the loop reads it
_LEFT_OUT = ("_fused_", "_amp_", "_record_function_")
"""Prefixes of functions that optimizers, scalers and profilers call."""
_READS = {"item", "tolist", "numpy", "__float__", "__bool__", "__array__"}
"""Functions that convert a tensor to Python or NumPy values."""
_NO_TENSORS = {
    *("size", "dim", "numel", "nelement", "stride", "ndimension", "element_size", "is_contiguous"),
    *("is_floating_point", "is_complex", "data_ptr", "storage_offset", "__len__", "__repr__"),
    *("__format__", "__set__", "get_device", "untyped_storage", "_set_grad_enabled"),
}
"""Functions without tensor results; a name lookup is cheaper than inspecting the result."""
_WRITES = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"),
    *("__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__", "register_hook"),
    *("retain_grad", ".data", ".data="),
}
"""Functions that change a tensor, besides those that end in an underscore."""
_UPDATES = {
    *("add_", "sub_", "subtract_", "mul_", "div_", "copy_", "lerp_", "addcmul_", "addcdiv_"),
    *("__iadd__", "__isub__", "__imul__", ".data", ".data="),
}
"""Functions that a loop uses to step by hand. A loop that reads ``data`` will write to it."""
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "log_normal_", "cauchy_", "geometric_", "binomial", "rrelu", "rrelu_"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("gumbel_softmax", "scaled_dot_product_attention", "multi_head_attention_forward"),
    *("native_dropout", "dropout_", "_standard_gamma", "_sample_dirichlet"),
}
"""Functions that draw random numbers."""
Kind = Literal["left out", "reads", "writes", "other"]


@cache
def kind_of(name: str) -> Kind:
    is_property = name.startswith(".")
    if name in _WRITES:
        return "writes"
    if name in _NO_TENSORS or name.startswith(_LEFT_OUT) or (is_property and name not in VIEWS):
        return "left out"
    if name in _READS:
        return "reads"
    if name.startswith(OF_LISTS) and name.endswith("_"):
        return "left out"
    if name.endswith("_") and not name.endswith("__"):
        return "writes"
    return "other"


class _CallsOfFunctions(modes.FunctionMode):
    """Function mode that passes calls to a :class:`Capture`."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    @compiler.do_not_compile_alone
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        kind = kind_of(name_of(func))
        if kind == "left out" or self._capture.is_left_out():
            return func(*args, **kwargs)
        return self._capture.call_function(func, kind, args, kwargs)


class Capture(TopLevelCalls):
    """Capture of the calls of a training loop."""

    def __init__(
        self,
        is_here: Callable[[], bool],
        before_model: Callable[[bool], object],
        before_backward: Callable[[Any], object],
        before_update: Callable[[], object],
        after_read: Callable[[Made], object],
    ) -> None:
        super().__init__()
        self._is_here = is_here
        self._before_model, self._before_backward = before_model, before_backward
        self._before_update, self._after_read = before_update, after_read
        self._mode = _CallsOfFunctions(self)
        self.log = CallLog()
        self._is_paused = self._has_left = False
        # Those of batches that workers load ahead.
        self._indices: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self._called: set[int] = set()  # the models of this step
        self.ends: list[KeptCall] = []  # calls of backward and of functions that return gradients

    @property
    def is_on(self) -> bool:
        """Whether calls are kept."""
        if not self._is_here():  # another thread must not resume it while the watched one steps
            return False
        if self._is_paused and not optim.optimizer_step_depth():
            self.pause(is_paused=False)  # the optimizer step raised an error
        return not self._is_paused

    def pause(self, *, is_paused: bool) -> None:
        """Pause the capture while an optimizer steps, or resume it."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        if not is_paused and self._has_left:
            self._mode.come_back()
        self._has_left = is_paused and self._mode.leave()

    def install(self, patches: Patches) -> None:
        """Patch modules, transforms, ``scale`` and others; functions also need :meth:`keeping`."""
        super().install(patches)
        for owner, name in modes.CALLED_AS_A_WHOLE:
            patches.wrap(owner, name, self._around_transform)
        patches.wrap(GradScaler, "scale", self._around_scale)
        patches.wrap(modules.LOADER_ITERATOR, "__next__", self._around_batch)
        patches.wrap(modules.LOADER_ITERATOR, modules.NEXT_INDICES, self._around_indices)
        patches.put(autograd.FUNCTION_BASE, "apply", classmethod(self._apply()))

    def keeping(self) -> AbstractContextManager[None]:
        """Return a context that also keeps the calls of functions."""
        return self._mode.active()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Keep no calls that this thread makes inside the block."""
        with super().inside(), self._mode.aside():
            yield

    def begin(self) -> None:
        self.ends, self._called = [], set()
        self.log.begin()

    def take_running(self) -> list[KeptCall]:
        """Remove the call of ``backward`` that runs now, if any, which is of the next step."""
        running = None if self.log.raised is None else self.log.raised.call
        return [self.ends.pop()] if running in self.ends[-1:] else []

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if not _counts():
            return original(module, *args, **kwargs)
        if is_grad_enabled() and is_model(module):
            self._before_model(id(module) in self._called)
            self._called.add(id(module))
        kept = self.log.call(module, args, kwargs)
        with self.inside():
            return self._done(kept, partial(original, module), args, kwargs)

    def call_function(
        self, function: Callable[..., Any], kind: Kind, args: Any, kwargs: Any
    ) -> Any:
        """Call a PyTorch function, and keep the call if it returns or writes to a tensor."""
        if is_called_by_a_scaler():
            return function(*args, **kwargs)
        if kind == "reads":
            result = function(*args, **kwargs)
            with unseen():
                self._note_read(args[0], result)
            return result
        if self.ends and name_of(function) in _UPDATES and _is_weight(args[0]):
            self._before_update()
        if kind == "writes" or "out" in kwargs:
            with unseen():
                self.log.keep_values(args[:1] if kind == "writes" else [kwargs["out"]])
        if kind == "writes" and self.log.writes_to_older(function, args, kwargs):
            return function(*args, **kwargs)
        kept = self.log.call(function, args, kwargs, is_drawing=name_of(function) in _DRAWS)
        if kept is not None and autograd.goes_backward(function):
            self.ends.append(kept.call)
            self._before_backward(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
        is_effect = kind == "writes" and function.__name__ != "__get__"
        return self._done(kept, function, args, kwargs, is_effect=is_effect)

    def _around_transform(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.is_left_out():
            return original(*args, **kwargs)
        if is_grad_enabled():
            self._before_model(True)
        kept = self.log.call(original, args, kwargs, is_drawing=True)
        is_end = kept is not None and original.__name__ in modes.RETURNING_GRADIENTS
        if kept is not None and is_end:
            self.ends.append(kept.call)
        with self.inside():
            result = self._done(kept, original, args, kwargs)
        if kept is not None and is_end and not are_finite(tensors_reached(result)):
            self._after_read(Made(kept.call, 0))  # the loop may use them without an optimizer
        return result

    def _around_scale(
        self, original: Callable[..., Any], scaler: GradScaler, /, outputs: Any
    ) -> Any:
        if torch.compiler.is_compiling() or self.is_left_out():
            return original(scaler, outputs)
        kept = self.log.call(scale, (outputs,), {})
        with self.inside():
            return self._done(kept, partial(original, scaler), (outputs,), {})

    def _around_batch(self, original: Callable[..., Any], loader: Any) -> Any:
        with self.inside():
            batch = original(loader)
        with unseen():
            waiting = self._indices.get(loader)
            indices = waiting.popleft() if waiting else None
            if self._is_here():
                self.log.note_batch(batch, *modules.makers_of_batches(loader), indices)
        return batch

    def _around_indices(self, original: Callable[..., Any], loader: Any) -> Any:
        indices = original(loader)
        self._indices.setdefault(loader, deque()).append(indices)
        return indices

    def _apply(self) -> Callable[..., Any]:
        """Return the replacement of ``torch.autograd.Function.apply``."""
        base = autograd.FUNCTION_BASE

        def apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
            original = getattr(super(base, cls), "apply")  # noqa: B009 - defined in C++
            is_compiled = autograd.is_compiled_function(cls)
            if torch.compiler.is_compiling() or self.is_left_out() or is_compiled:
                return original(*args, **kwargs)
            kept = self.log.call(cls.apply, args, kwargs)
            with self.inside():
                return self._done(kept, original, args, kwargs)

        return apply

    def is_left_out(self) -> bool:
        """Return whether calls in this thread are not kept at the moment."""
        return self.is_inside or not self.is_on or not _counts()

    @compiler.do_not_compile_alone
    def _done(
        self,
        kept: LoggedCall | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_effect: bool = False,
    ) -> Any:
        """Make a call, note the tensors that it makes, and return its result."""
        self.log.raised = kept
        result = function(*args, **kwargs)
        if kept is not None:
            with unseen():
                self.log.note_made(kept, result, is_effect=is_effect)
        return result

    def _note_read(self, tensor: Any, value: Any) -> None:
        """Report a value that the loop has read if it is bad, or the tensor that it calls bad."""
        made = self.log.made_by(tensor) if isinstance(tensor, Tensor) else None
        if made is None:
            return
        if isinstance(value, bool):
            self.log.asked = made
            bad = found_bad(made, is_true=value)
            if bad is not None:
                self._after_read(bad)
        elif tensor.is_floating_point() and tensor.numel() <= MOST_READ and not is_finite(tensor):
            self._after_read(made)


@compiler.do_not_compile_alone
def _counts() -> bool:
    """Return whether a call is outside of backward passes, JIT tracing and transforms."""
    is_elsewhere = autograd.backward_number() >= 0 or modes.is_jit_tracing()
    return not is_elsewhere and not modes.has_transforms()


def _is_weight(tensor: Tensor) -> bool:
    with modes.unseen_by_modes():
        return tensor.is_leaf and tensor.grad is not None
