"""Backward passes with a scaled loss, whose gradients are unscaled before the pass returns.

The script therefore only ever sees unscaled gradients. If a pass adds to an existing gradient, that
gradient is first multiplied by the scale. The scale is a power of two, so this is exact.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep._common.nested import map_tensors
from halfstep._gradients.gradients import NONE, Gradients, collect, parameters
from halfstep._gradients.optimizers import members
from halfstep._gradients.scalars import CPU, as_tensor, combine
from halfstep._pytorch import autograd, compiler, distributed
from halfstep._pytorch.autograd import version_of
from halfstep._pytorch.devices import to_device
from halfstep._pytorch.modules import GLOBAL_BACKWARD_HOOKS
from halfstep._scaler import GradScaler, LossScale, access
from halfstep._tools.patches import Patches, ThreadFlag
from halfstep._tools.replay.observer import restoring
from halfstep._tools.run.amp_forward import ScriptState


class ScaledPass:
    """A running backward pass, with its scale and the leaves it adds to."""

    def __init__(self, scale: LossScale, fresh: FreshGradients) -> None:
        self.scale = scale
        self.by = scale.tensor.clone()  # a step inside the pass may move the scale
        self.is_used = False  # whether an optimizer has stepped, or skipped a step, with it
        self.found_inf: list[Tensor] = []  # of each gradient that a hook has seen
        self._fresh = fresh
        self._leaves: dict[int, Tensor] = {}

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Multiply the existing gradients of leaves by the scale. Memory traffic: 2 G of these."""
        new = [leaf for leaf in leaves if id(leaf) not in self._leaves]
        self._leaves.update((id(leaf), leaf) for leaf in new)
        held = collect(new)
        if held.grads:
            with restoring.on():
                held.multiply_(self.by)

    def unscale_(self, params: Iterable[Tensor] | None = None) -> None:
        """Unscale the gradients so far of some leaves, by default of all that remain. 2 G."""
        given = self._leaves.values() if params is None else params
        ids = [id(leaf) for leaf in given if leaf.grad is not None]
        done = [self._leaves.pop(key) for key in ids if key in self._leaves]
        if done:
            self._fresh.unscale_(done, self)

    def note(self, grad: Tensor) -> None:
        """Note whether a gradient is inf or NaN before a hook replaces it. Sync: none."""
        if grad.layout is torch.strided:
            is_bad = (to_device(self.by, grad.device) > 1) & ~grad.float().sum().isfinite()
            self.found_inf.append(is_bad.float())

    def shown(self, grad: Tensor) -> Tensor:
        """Return a gradient for a hook: a copy in float32 at least, without the scale."""
        if distributed.is_dtensor(grad):
            return grad
        self.note(grad)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return grad.to(dtype) / to_device(self.by, grad.device)

    def hidden(self, result: Any, grad: Tensor | None) -> Any:
        """Return the result of a hook for autograd, in the place of a gradient with the scale."""
        if not isinstance(result, Tensor) or grad is None or distributed.is_dtensor(grad):
            return result
        return (result * to_device(self.by, grad.device)).to(grad.dtype)


@dataclass
class Backward:
    """Wrapper of ``torch.autograd.backward``, which ``Tensor.backward`` calls."""

    _scaler: GradScaler
    _fresh: FreshGradients
    _script: ScriptState
    _retained: list[weakref.ref[Tensor]] = field(default_factory=list, init=False)
    running: ScaledPass | None = field(default=None, init=False)
    stepping: torch.optim.Optimizer | None = field(
        default=None, init=False
    )  # one without a closure

    def install(self, patches: Patches) -> None:
        """Wrap ``backward``, ``grad``, and ``retain_grad``, which non-leaf gradients depend on."""
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap(torch.autograd, "grad", self._grad)
        patches.wrap(torch.Tensor, "retain_grad", self._retain_grad)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            patches.wrap(module, "clip_grad_norm_", self.clip_grad_norm_)
        wrap_hooks(patches, self)

    def _retain_grad(self, original: Callable[[Tensor], None], tensor: Tensor) -> None:
        original(tensor)
        if not tensor.is_leaf:
            self._retained.append(weakref.ref(tensor))

    def _grad(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_compiling()
        if not is_traced and self._script.is_training and not self._fresh.has_optimizers:
            self._script.note_by_hand()
        return original(*args, **kwargs)

    @compiler.keep_out_of_graphs
    def _backward(
        self,
        original: Callable[..., None],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        def run(roots: Any) -> None:
            original(roots, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

        if not self._script.is_training:
            run(tensors)
            return
        self._script.has_backward = True
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if autograd.backward_number() >= 0:
            # A checkpoint runs this inside the outer pass, so its gradients are scaled already.
            if self.running is not None:
                self.running.include(_reached(roots, inputs))
            run(tensors)
        elif self.stepping is not None:
            self._script.switch_off(
                f"{type(self.stepping).__name__}.step() runs backward passes of its own, as GSAM "
                "does, which a GradScaler cannot skip (--amp bf16 needs none)"
            )
            run(roots)
            _zero_if_bad(_reached(roots, inputs))
        elif create_graph or not all(map(_can_be_scaled, roots)):
            # Passes with create_graph, or with roots that cannot be scaled, stay unscaled. Their
            # gradients may underflow, but need no unscaling.
            run(roots)
        else:
            leaves = list(_reached(roots, inputs))
            if self._fresh.owns_any(leaves):
                self._scaled(run, roots, leaves)
            else:
                self._by_hand(run, roots, leaves)

    def _by_hand(
        self, run: Callable[[Any], None], roots: list[Tensor], leaves: list[Tensor]
    ) -> None:
        """Run a pass whose gradients the script applies by hand. Sync: one.

        halfstep cannot skip such a step. The loss is therefore not scaled, and if a gradient is inf
        or NaN, all gradients of the pass are set to zero.
        """
        run(roots)
        if self._fresh.has_optimizers:
            self._script.say_once(
                "no optimizer has the parameters of a backward pass, so a step with inf or NaN "
                "could not be skipped: their gradients are not scaled and may underflow (--amp "
                "bf16 needs no scale)"
            )
        else:
            self._script.note_by_hand()
        if _zero_if_bad(leaves):
            self._script.say_once(
                "gradients that no optimizer has were inf or NaN in float16, and were set to zero"
            )

    def _scaled(
        self, run: Callable[[Any], None], roots: list[Tensor], leaves: list[Tensor]
    ) -> None:
        self._script.has_scaled = True
        if not self._script.has_summed_up:
            names = (f"{each.__name__}.backward" for each in autograd.functions_of(roots))
            self._script.functions |= dict.fromkeys(names)
        self._back_off_after_left_out_steps()
        access.end_iteration(self._scaler)  # open if only some of the optimizers have stepped
        with torch.enable_grad():  # backward() itself needs none, as in step() of a SAM
            scaled = self._scaler.scale(roots)
        running = ScaledPass(access.loss_scale(self._scaler), self._fresh)
        running.include(leaves)
        # This includes gradients of other graphs. Multiplying and dividing them is harmless.
        self._retained = [ref for ref in self._retained if ref() is not None]
        running.include(tensor for ref in self._retained if (tensor := ref()) is not None)
        self.running = running
        try:
            run(scaled)
        finally:
            self.running = None
            running.unscale_()

    def _back_off_after_left_out_steps(self) -> None:
        """Count the overflows whose step the script has left out by itself.

        A script that only steps if ``clip_grad_norm_`` is finite would otherwise never step: the
        scale comes down with steps. Sync: one for each step that was left out.
        """
        for optimizer, found_inf in self._fresh.take_left_out():
            if combine(found_inf.values(), CPU):
                access.add_check(self._scaler, optimizer, NONE, found_inf)

    def clip_grad_norm_(
        self, original: Callable[..., Tensor], /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Clip without ending the script at an overflow that a smaller scale avoids."""
        given = inspect.signature(original).bind(*args, **kwargs)
        if self._script.is_training and self._scaler.get_scale() > 1.0:
            given.arguments["error_if_nonfinite"] = False
        return original(*given.args, **given.kwargs)


def _reached(roots: Sequence[Tensor], inputs: Any) -> Iterable[Tensor]:
    if inputs is None:
        return autograd.leaves_of(roots)
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.is_leaf]


def _zero_if_bad(leaves: Iterable[Tensor]) -> bool:
    gradients = collect(leaves)
    is_bad = combine(gradients.check().values(), CPU)
    for grad in gradients.grads if is_bad else ():
        grad.zero_()
    return bool(is_bad)


def _can_be_scaled(root: object) -> bool:
    return isinstance(root, Tensor) and root.is_floating_point() and root.requires_grad


# --- hooks of the script --------------------------------------------------------------------------

# They see gradients as without the scale: divided before the hook and multiplied after it, which is
# exact. A hook on lower-precision tensors sees float32, as it would without autocast.

_in_hook = ThreadFlag()


class _Hook:
    """A hook of the script. In a copy or a file of its module, the script's own stands for it."""

    def __init__(
        self, hook: Callable[..., Any], backward: Backward, kind: Callable[..., Any]
    ) -> None:
        self.hook, self._backward, self._kind = hook, backward, kind
        self.__name__ = getattr(hook, "__name__", "hook")

    def __call__(self, *args: Any) -> Any:
        running = self._backward.running
        # A pass inside of a hook has gradients without a scale.
        if running is None or _in_hook.is_on:
            return self.hook(*args)
        with _in_hook.on():
            return self._kind(self.hook, running, *args)

    def __reduce__(self) -> tuple[object, ...]:
        return _same, (self.hook,)


def _same(hook: object) -> object:
    return hook


def _of_tensor(hook: Callable[..., Any], running: ScaledPass, grad: Tensor) -> Any:
    shown = running.shown(grad)
    version = version_of(shown)
    result = hook(shown)
    if result is None and version_of(shown) != version:  # written in place
        result = shown
    return running.hidden(result, grad)


def _of_module(hook: Callable[..., Any], running: ScaledPass, module: Any, *grads: Any) -> Any:
    replaced = grads[0]
    result = hook(module, *map_tensors(running.shown, grads))
    if result is None or isinstance(result, Tensor):
        return running.hidden(result, replaced[0])
    if len(result) != len(replaced):  # PyTorch raises an error
        return result
    return tuple(map(running.hidden, result, replaced))


def _after_accumulation(hook: Callable[..., Any], running: ScaledPass, param: Tensor) -> Any:
    if param.grad is not None:
        running.note(param.grad)
    running.unscale_([param])
    result = hook(param)
    if not running.is_used:  # else the optimizer has stepped in the hook
        running.include([param])
    return result  # an error of PyTorch if it is not None


def wrap_hooks(patches: Patches, backward: Backward) -> None:
    """Wrap what registers hooks on gradients."""

    def wrap(owner: Any, name: str, kind: Callable[..., Any]) -> None:
        def register(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            is_ours = str(sys._getframe(2).f_globals.get("__name__")).startswith("halfstep.")
            if is_ours or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            given = inspect.signature(original).bind(*args, **kwargs)
            hook = given.arguments["hook"]
            if callable(hook) and not isinstance(hook, _Hook):
                given.arguments["hook"] = _Hook(hook, backward, kind)
            return original(*given.args, **given.kwargs)

        patches.wrap(owner, name, register)

    wrap(Tensor, "register_hook", _of_tensor)
    wrap(Tensor, "register_post_accumulate_grad_hook", _after_accumulation)
    for name in ("full_backward_hook", "full_backward_pre_hook", "backward_hook"):
        wrap(torch.nn.Module, f"register_{name}", _of_module)
    for owner, name in GLOBAL_BACKWARD_HOOKS:
        wrap(owner, name, _of_module)


# --- unscaled gradients, until their optimizer steps ----------------------------------------------


@dataclass(frozen=True, eq=False)
class UnscaledGradients:
    """A group of gradients that were unscaled together, with the result of their finite check."""

    of: ScaledPass
    found_inf: dict[torch.device, Tensor]
    # Parameters and gradients, which the script may drop, and the versions of the gradients.
    refs: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor], int]]

    def present(self) -> dict[int, bool]:
        """Return the ids of the gradients still in place, and whether they have changed since."""
        refs = ((param(), grad(), version) for param, grad, version in self.refs)
        return {
            id(g): version_of(g) != version
            for p, g, version in refs
            if p is not None and g is not None and p.grad is g
        }


class FreshGradients:
    """The gradients unscaled since the last step of each known optimizer."""

    def __init__(self) -> None:
        # An optimizer made before the block is unknown until it steps.
        self._unscaled = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[UnscaledGradients]]()
        # Those that were dropped before a step used them.
        self._left_out: list[tuple[torch.optim.Optimizer, UnscaledGradients]] = []

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        self._unscaled.setdefault(optimizer, [])

    @property
    def has_optimizers(self) -> bool:
        return len(self._unscaled) > 0

    def owns_any(self, leaves: Iterable[Tensor]) -> bool:
        ids = set(map(id, leaves))
        return any(id(p) in ids for optimizer in self._unscaled for p in parameters(optimizer))

    def unscale_(self, params: Iterable[Tensor], of: ScaledPass) -> None:
        """Divide the gradients of a pass, in groups of parameters with the same optimizers.

        A group per set of optimizers keeps an overflow in one optimizer from skipping another's
        step. 2 G. Sync: none.
        """
        owners: dict[int, list[torch.optim.Optimizer]] = defaultdict(list)
        for optimizer in self._unscaled:
            for param in parameters(optimizer):
                owners[id(param)].append(optimizer)
        shared: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for param in params:
            shared[tuple(map(id, owners.get(id(param), ())))].append(param)
        for group in shared.values():
            gradients = collect(group)
            if gradients.grads:
                with restoring.on():
                    found = gradients.unscale_(of.by, can_amplify=of.scale.can_amplify)
                pairs = zip(gradients.params, gradients.grads, strict=True)
                refs = [
                    (weakref.ref(param), weakref.ref(grad), version_of(grad))
                    for param, grad in pairs
                ]
                unscaled = UnscaledGradients(of, found, refs)
                for optimizer in owners.get(id(group[0]), ()):
                    self._unscaled[optimizer] = [*_alive(self._unscaled[optimizer]), unscaled]

    def take(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[Gradients, dict[torch.device, Tensor]] | None:
        """Return the gradients of an optimizer and whether any is inf or NaN, and forget them.

        Those that the script has replaced or written to are checked here. None if there are no
        gradients, or if none come from a scaled pass.
        """
        stepped = members(optimizer)  # a container steps all of its members
        earlier = [unscaled for each in stepped for unscaled in self._popped(each)]
        gradients = collect(parameters(optimizer))
        if not earlier or not gradients.grads:
            return None
        passes = dict.fromkeys(unscaled.of for unscaled in earlier)
        for each in passes:
            each.is_used = True
        found = [unscaled.found_inf for unscaled in _alive(earlier)]
        present = (item for unscaled in earlier for item in unscaled.present().items())
        others = gradients.without({key for key, is_changed in present if not is_changed})
        if others.grads:
            found.append(others.check())
        device = earlier[0].of.by.device
        flags = [flag for by_device in found for flag in by_device.values()]
        flags += [flag for each in passes for flag in each.found_inf]
        found_inf = as_tensor(combine(flags, device), device)
        return gradients, {device: found_inf}

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients of an optimizer after they were dropped or zeroed."""
        self._left_out += [(optimizer, each) for each in self._popped(optimizer)]

    def take_left_out(self) -> list[tuple[torch.optim.Optimizer, dict[torch.device, Tensor]]]:
        """Return the checks of gradients that were dropped without a step, and forget them.

        Those that the loss of a generator leaves in its discriminator do not count: the generator
        has stepped with that pass.
        """
        for optimizer, unscaled in [*self._unscaled.items()]:
            alive = _alive(unscaled)
            self._left_out += [(optimizer, each) for each in unscaled if each not in alive]
            self._unscaled[optimizer] = alive
        found, self._left_out = self._left_out, []
        return [(owner, each.found_inf) for owner, each in found if not each.of.is_used]

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has unscaled gradients that it has not stepped with."""
        return bool(_alive(self._unscaled.get(optimizer, [])))

    def is_waiting(self) -> bool:
        """Return whether any known optimizer has such gradients, see :meth:`has`."""
        return any(map(_alive, self._unscaled.values()))

    def _popped(self, optimizer: torch.optim.Optimizer) -> list[UnscaledGradients]:
        found = self._unscaled.get(optimizer, [])
        if found:
            self._unscaled[optimizer] = []
        return found


def _alive(unscaled: list[UnscaledGradients]) -> list[UnscaledGradients]:
    """Return the groups that still have a gradient in place."""
    return [each for each in unscaled if each.present()]
