"""A sampled step: hooks that look at every tensor that the recorder tells of, while it runs."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from halfstep._autocast import scopes
from halfstep._autocast.casts import tensors_in
from halfstep._numerics.measure import measure
from halfstep._numerics.statistics import Statistics, merged
from halfstep._pytorch import autograd, modes
from halfstep._record.models import Models
from halfstep._record.run import KINDS, Kind, Measured

OUTERMOST = "(model)"
"""What the outermost module is called."""
COMPILED = (
    "parts of the model are compiled: the outputs of modules inside them are not seen; their "
    "parameters and the gradients of these are"
)
_FILTER = ("ignore", re.compile(".*when there are global hooks"), Warning, None, 0)


class Sampler:
    """Measures parameters, their gradients, the outputs of modules and the gradients of these.

    Between :meth:`begin` and :meth:`end` it has hooks; outside it costs nothing.

    Args:
        models: The models.
        is_searching: Whether outermost modules that run with gradients are models too.
        say: Is told what a reader of the record has to know.
        is_listening: Says whether what runs is part of the training.

    Attributes:
        is_open: Whether a step is being sampled.
        policies: By device type the lower precision and the text of the policy that was last seen.
    """

    def __init__(
        self,
        models: Models,
        is_searching: bool,
        say: Callable[[str], None],
        is_listening: Callable[[], bool],
    ) -> None:
        self._models = models
        self._is_searching = is_searching
        self._say, self._is_listening = say, is_listening
        self.is_open = self._is_measuring = False
        self._forward_hooks: list[RemovableHandle] = []
        self._parameter_hooks: list[RemovableHandle] = []
        self._output_hooks: list[RemovableHandle] = []
        self._found: dict[tuple[Kind, str], tuple[str, Statistics]] = {}
        self._last_outputs: list[weakref.ref[Tensor]] = []
        self._depth = 0
        self._scope: scopes.Scope | None = None
        self.policies: dict[str, tuple[str, str]] = {}

    def begin(self, is_measuring: bool) -> None:
        """Begin a step; measuring nothing it only finds models and policies."""
        self.is_open, self._is_measuring = True, is_measuring
        self._depth = 0
        # For all modules, not on each: nn.TransformerEncoderLayer computes in another way if it
        # has hooks.
        self._forward_hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        # torch.compile's own module warns of them; once it is known they are taken off. Not by
        # filterwarnings(), after which every warning of the script would be shown again.
        warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
        self._watch_models()

    def end(self) -> list[Measured]:
        """End the step and return its tensors, in the order of the kinds."""
        self.is_open = False
        for hooks in (self._forward_hooks, self._parameter_hooks, self._output_hooks):
            _remove(hooks)
        if _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
        found, self._found = self._found, {}
        by_kind = sorted(found.items(), key=lambda item: KINDS.index(item[0][0]))
        return [
            Measured.of(kind, name, dtype, statistics)
            for (kind, name), (dtype, statistics) in by_kind
        ]

    def _watch_models(self) -> None:
        """Put hooks on the models, anew when another one was found."""
        if not len(self._models):
            return
        if self._models.has_compiled:
            # Hooks for all modules make torch.compile compile everything again.
            self._say(COMPILED)
            _remove(self._forward_hooks)
            for module in self._models.eager_modules():
                handle = module.register_forward_hook(_ForwardHook(self._leave))
                self._forward_hooks.append(handle)
        if not self._is_measuring:
            return
        _remove(self._parameter_hooks)
        for name, parameter in self._models.parameters():
            if is_lazy(parameter):  # it has no shape before the first batch
                continue
            if ("parameter", name) not in self._found:
                self._take("parameter", name, parameter)
            if parameter.requires_grad and parameter.is_leaf:
                hook = partial(self._take_gradient, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._parameter_hooks.append(handle)

    # --- hooks ------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, _: Any) -> None:
        if _is_traced() or not self._is_listening():
            return
        if (
            self._depth == 0
            and self._is_searching
            and self._models.name(module) is None
            and _is_trained(module)
        ):
            if self._models.add(module):
                self._found = {}  # it has the names of a part
            self._watch_models()
        self._depth += 1

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if _is_traced() or not self._is_listening():
            return
        self._depth = max(self._depth - 1, 0)
        name = self._models.name(module)
        # In a backward pass it is computed again, for a checkpoint.
        if name is None or autograd.backward_number() >= 0:
            return
        self._models.ran(name)
        if not torch.is_grad_enabled():
            return
        self._note_policy()
        if self._is_measuring:
            self._take_outputs(name or OUTERMOST, output)

    def _take_outputs(self, name: str, output: Any) -> None:
        outputs = [tensor for tensor in tensors_in([output]) if tensor.requires_grad]
        last = [ref() for ref in self._last_outputs]
        for tensor in outputs:
            if any(tensor is seen for seen in last):
                continue  # a container returns what its last module has returned
            self._take("output", name, tensor)
            hook = partial(self._take, "output_gradient", name)
            self._output_hooks.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        self._last_outputs = [weakref.ref(tensor) for tensor in outputs]

    def _take_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None or not self._is_listening():
            return  # used up by another hook, a step inside of the backward pass; or a replay
        # With several backward passes it is the sum so far: the last one counts.
        self._found.pop(("parameter_gradient", name), None)
        self._take("parameter_gradient", name, parameter.grad)

    def _take(self, kind: Kind, name: str, tensor: Tensor) -> None:
        if _is_traced():
            return
        try:
            # In the gradients of outputs zeros are what a ReLU or a mask leaves.
            with modes.unseen_by_modes():
                statistics = measure(tensor, is_gradient=kind == "parameter_gradient")
        except (RuntimeError, NotImplementedError) as error:  # a recorder never ends a run
            self._say(f"{kind} {name} cannot be measured: {error}")
            return
        if statistics is None:
            return
        _, earlier = self._found.get((kind, name), ("", None))
        if earlier is not None:
            statistics = merged((earlier, statistics))
        self._found[kind, name] = _name_of(tensor.dtype), statistics

    def _note_policy(self) -> None:
        scope = scopes.current()
        if scope is self._scope:
            return
        self._scope = scope
        for device, policy in scope.policies.items():
            if torch.is_autocast_enabled(device):
                dtype = _name_of(torch.get_autocast_dtype(device))
                self.policies[device] = dtype, str(policy.policy)


class _ForwardHook:
    """A hook on a module, which is not copied, and not saved, with it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: object) -> _ForwardHook:
        return _ForwardHook(_do_nothing)

    def __reduce__(self) -> tuple[object, ...]:
        return _ForwardHook, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    pass


def _is_traced() -> bool:
    """Say whether tensors have no values: a program is made of what runs."""
    return torch.compiler.is_compiling() or modes.is_jit_tracing()


def _is_trained(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
