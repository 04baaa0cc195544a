"""What a training loop calls in an iteration, kept so that it can be called again.

A loop is no function that could be run once more. What it calls outside of any module can: models
and loss functions. Their arguments are kept by reference, and what an argument was made from: the
output of an earlier call, or another view of it. Nothing is computed for it, and nothing copied but
buffers and the states of random generators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.casts import tensors_in
from halfstep._autocast.region import current_settings
from halfstep._common.patches import Patches
from halfstep._common.random_states import RandomStates, accelerators
from halfstep._common.top_level_calls import Outermost, not_compiled
from halfstep._diagnose.calls import Call, Output, Seed, call_again, is_model, same_entries
from halfstep._diagnose.finite import is_finite
from halfstep._diagnose.lines import user_line
from halfstep._pytorch import autograd, compiler, modes

MOST_CALLS = 256
"""More calls in an iteration are not kept."""


class Capture:
    """Keeps the calls of an iteration.

    Args:
        is_here: Says whether what is called now is part of the training that is watched.

    Attributes:
        gap: What of the iteration is not replayed, None for nothing.
    """

    def __init__(self, is_here: Callable[[], bool]) -> None:
        self._is_here = is_here
        self.gap: str | None = None
        self._calls: list[Call] = []
        self._roots: list[tuple[int, int]] = []
        self._buffers: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._owners: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Module, str]]] = (
            weakref.WeakKeyDictionary()
        )
        self._outermost = Outermost(self)

    def install(self, patches: Patches) -> None:
        """Keep calls until ``patches`` are undone."""
        self._outermost.install(patches)

    @property
    def is_on(self) -> bool:
        """Whether calls are kept."""
        return self._is_here()

    def begin(self) -> None:
        """Forget the calls; another iteration begins."""
        self._calls, self._roots, self.gap = [], [], None

    @property
    def model(self) -> nn.Module | None:
        """The first module with parameters that was called."""
        models = (call.function for call in self._calls if is_model(call.function))
        return next(models, None)

    # --- keeping ----------------------------------------------------------------------------------

    @not_compiled
    def call_module(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module, and keep the call."""
        if not _counts():
            return original(module, *args, **kwargs)
        call = self._before(module, args, kwargs)
        call.random = RandomStates(accelerators())
        call.is_training = module.training
        call.buffers = [(buffer, self._kept(buffer)) for buffer in self._buffers_of(module)]
        with self._outermost.inside():
            return self._after(call, original(module, *args, **kwargs))

    @not_compiled
    def call_loss(
        self,
        name: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a loss function, and keep the call."""
        if not _counts():
            return original(*args, **kwargs)
        call = self._before(original, args, kwargs)
        with self._outermost.inside():
            return self._after(call, original(*args, **kwargs))

    @compiler.do_not_compile_alone
    def _before(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        given: list[tuple[Tensor, int]] = []
        kept_args, kept_kwargs = self._linked((args, kwargs), given)
        devices = dict.fromkeys(tensor.device.type for tensor in tensors_in((args, kwargs)))
        settings = [current_settings(device) for device in devices if _has_autocast(device)]
        call = Call(function, kept_args, kept_kwargs, given, settings, user_line())
        if len(self._calls) < MOST_CALLS:
            self._calls.append(call)
        else:
            self.gap = f"of its calls of models and losses the first {MOST_CALLS} are replayed"
        return call

    @compiler.do_not_compile_alone
    def _after(self, call: Call, result: Any) -> Any:
        for index, tensor in enumerate(tensors_in((result,))):
            call.links.append(autograd.made_as(tensor))
            if tensor.requires_grad and tensor.ndim == 0:
                tensor.register_hook(Seed(call, index))  # type: ignore[no-untyped-call]
        return result

    def _buffers_of(self, model: nn.Module) -> list[Tensor]:
        """Return the buffers that a model has now; where it has some is looked up once."""
        if model not in self._owners:
            # Not `_buffers`, which in a module of torch.jit is no dictionary.
            self._owners[model] = [
                (module, name)
                for module in model.modules()
                for name, _ in module.named_buffers(recurse=False)
            ]
        found = (getattr(module, name, None) for module, name in self._owners[model])
        return [buffer for buffer in found if isinstance(buffer, Tensor)]

    def _kept(self, buffer: Tensor) -> Tensor:
        """Return the values of a buffer, copied anew only if it was written to."""
        known = self._buffers.get(id(buffer))
        if known is None or known[0]() is not buffer or known[1] != buffer._version:
            known = (weakref.ref(buffer), buffer._version, buffer.detach().clone())
            self._buffers[id(buffer)] = known
        return known[2]

    def _linked(self, value: Any, given: list[tuple[Tensor, int]]) -> Any:
        """Return arguments with :class:`Output` where an earlier call has returned them."""
        if isinstance(value, Tensor):
            found = self._made_by(value)
            if found is not None:
                return found
            if value.grad_fn is not None:
                self.gap = "what is computed between a model and a loss is not replayed"
                return value.detach()
            if not value.is_inference():
                given.append((value, value._version))
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._linked(item, given) for item in value))
        if type(value) in (list, tuple):
            return type(value)(self._linked(item, given) for item in value)
        if type(value) is dict:
            return {key: self._linked(item, given) for key, item in value.items()}
        # Any other container is the user's own: it may not be made anew from its items.
        for tensor in tensors_in([value]):
            if tensor.grad_fn is not None:
                self.gap = "what is computed between a model and a loss is not replayed"
            elif not tensor.is_inference():
                given.append((tensor, tensor._version))
        return value

    def _made_by(self, tensor: Tensor) -> Output | None:
        """Return which call has returned a tensor, or one with the same entries in their order."""
        for link in same_entries(tensor):
            for number in range(len(self._calls) - 1, -1, -1):
                if link in self._calls[number].links:
                    index = self._calls[number].links.index(link)
                    return Output(number, index, tuple(tensor.shape), tensor.dtype)
        return None

    def note_root(self, root: Tensor) -> None:
        """Take note of a loss that goes into ``backward``."""
        found = self._made_by(root)
        if found is not None:
            self._roots.append((found.call, found.index))

    # --- again ------------------------------------------------------------------------------------

    def step(self, scale: Callable[[Tensor], Tensor], at: float) -> Callable[[], object]:
        """Return a function that calls everything again, and goes backward from the losses.

        Args:
            scale: Multiplies a loss as the scaler of the run does.
            at: The scale that the gradients which have arrived were multiplied by.
        """
        calls, roots = self._calls, list(self._roots)

        return lambda: call_again(calls, roots, scale, at)

    def why_not(self) -> str | None:
        """Say why nothing can be replayed: an argument was written to, or the loss went bad later.

        Sync: one for each loss.
        """
        for call in self._calls:
            if not all(map(is_finite, call.seeds.values())):
                return "its loss went bad between the loss function and backward"
        for call in self._calls:
            for tensor, version in call.given:
                if tensor._version != version:
                    shape = ", ".join(map(str, tensor.shape))
                    return f"an input of shape [{shape}] was written to in place since"
        return None


def _counts() -> bool:
    """Say whether what is called now is part of training: not evaluation, not a checkpoint."""
    return torch.is_grad_enabled() and autograd.backward_number() < 0 and not modes.is_jit_tracing()


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
