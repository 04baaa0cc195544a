"""The state of a script under ``--amp``, and its top-level calls, run under autocast."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from halfstep._autocast import Policy, autocast
from halfstep._common.formats import dtype_name
from halfstep._common.nested import map_leaves
from halfstep._common.numbers import count, listed, things
from halfstep._gradients.optimizers import name as name_of
from halfstep._pytorch import autograd, compiler, modes
from halfstep._pytorch.amp import Switches
from halfstep._tools.patches import Patches, TopLevelCalls, not_compiled
from halfstep._tools.record.run import HIDDEN, OWN_PRECISION, seen_in
from halfstep._tools.replay.replay import is_replaying
from halfstep.events import has_own_policies

_OPTION = {torch.float16: "--amp fp16", torch.bfloat16: "--amp bf16"}


class ScriptState:
    """Facts learned about the script so far. Each message is printed once."""

    def __init__(
        self,
        dtype: torch.dtype,
        say: Callable[[str], None],
        products: Callable[[], Mapping[str, int]],
        is_explained: Callable[[], bool],
    ) -> None:
        self.is_on = True  # once off, it stays off
        self.is_scaling = dtype is torch.float16
        # Names in order of appearance: classes of outermost modules that ran under our autocast,
        # loss functions called outside modules, optimizer classes, and scheduler classes.
        self.modules: dict[str, None] = {}
        self.losses: dict[str, None] = {}
        self.optimizers: dict[str, None] = {}
        self._stepped: set[int] = set()  # ids of optimizers: one may have no hash
        self.schedules: dict[str, None] = {}
        self.functions: dict[str, None] = {}  # backward passes of the script's own Functions
        self._products, self._is_explained = products, is_explained
        self.has_backward = self.has_scaled = self.has_own_autocast = False
        self.has_unscaled = self.has_trained = False  # the second: a module ran with gradients
        self.is_by_hand = False  # true while gradients are used without an optimizer
        self._dtype, self._option, self._print = dtype, _OPTION[dtype], say
        self.say_once = cache(self._say)
        self.has_summed_up = False

    @property
    def is_training(self) -> bool:
        """Whether halfstep is on and this thread runs the training, not a replay of it.

        A replay does its own scaling and must leave no trace.
        """
        return self.is_on and not is_replaying()

    def switch_off(self, reason: str) -> None:
        """Add no autocast and no scale to the script from now on, and print why."""
        if self.is_on:
            self.is_on = False
            self._say(f"{reason}; no autocast and no scale are added to it")

    def note_by_hand(self) -> None:
        """Run models in float32 until there is an optimizer; print the reason once."""
        self.is_by_hand = True
        self.say_once(
            "no optimizer of torch.optim was made, so a step with inf or NaN could not be skipped: "
            "the loss is not scaled, and models run in float32 from here on, until there is one "
            "(--amp bf16 needs none)"
        )

    def _say(self, text: str) -> None:
        self._print(f"{self._option}: {text}")

    def note_own_autocast(self, dtype: torch.dtype) -> None:
        """Print once that the script has its own autocast."""
        if not self.has_own_autocast:
            self.has_own_autocast = True
            self._say(
                f"{OWN_PRECISION} autocast, to {dtype_name(dtype)}, which keeps its dtype"
                + ("; the loss is scaled anyway" if self.is_scaling else "")
            )

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step; the second step of an optimizer marks the end of the first iteration."""
        self.optimizers[name_of(optimizer)] = None
        if id(optimizer) in self._stepped and self.modules:
            self._sum_up()
        self._stepped.add(id(optimizer))

    def note_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step whose gradients come from no scaled backward pass."""
        if not self.has_scaled:
            self.has_unscaled = True
            self.say_once(
                f"{name_of(optimizer)}.step takes gradients that no scaled backward pass has made "
                "(torch.func, create_graph=True or by hand): small ones may be zero, and it leaves "
                "out those with inf or NaN; --amp bf16 needs no scale"
            )

    def end(self) -> None:
        """Print the remaining messages at the end of the script."""
        if not self.is_on or self.is_by_hand:
            return
        if self.modules or (self.is_scaling and self.has_backward and self.has_own_autocast):
            self._sum_up()
        elif not (self.has_own_autocast or self._is_explained()):
            self._say(
                "found nothing to run in mixed precision: in this process no module with "
                "parameters was called (not seen: model.forward(x), and compiled functions; "
                "compile the module itself)"
            )

    def _sum_up(self) -> None:
        if not self.has_summed_up:
            self.has_summed_up = True
            self._say("; ".join(self._sentences()))

    def _sentences(self) -> Iterable[str]:
        if self.modules:
            ran = [*(f"{module}.forward" for module in self.modules), *self.losses]
            runs = "runs" if len(ran) == 1 else "run"
            yield f"{listed(ran)} {runs} under autocast{self._counted()}"
        if not self.is_scaling:
            if not self.optimizers:
                yield "no optimizer step was seen"
            return
        if self.has_unscaled and not self.has_scaled:
            yield "no loss is scaled"
            return
        if self.has_scaled:
            yield "the loss is scaled"
        else:
            yield "no loss is scaled" if self.has_backward else "no backward pass was seen"
        if self.functions:
            gets = "gets" if len(self.functions) == 1 else "get"
            yield (
                f"{listed([*self.functions])} {gets} gradients multiplied by the scale: right only "
                "where the result is proportional to them"
            )
        if self.optimizers:
            steps = [f"{optimizer}.step" for optimizer in self.optimizers]
            yield f"{listed(steps)} {'goes' if len(steps) == 1 else 'go'} through a GradScaler"
        else:
            yield "no optimizer step was seen"
        if self.schedules:
            waits = "waits" if len(self.schedules) == 1 else "wait"
            yield f"{listed([*self.schedules])} {waits} for steps that are taken"

    def _counted(self) -> str:
        """Return how many products of the sampled steps ran in the lower precision."""
        products, name = self._products(), dtype_name(self._dtype)
        seen = seen_in(products)
        low, total = seen.get(name, 0), sum(seen.values())
        if low:
            return f", {count(low)} of {things(total, 'product')} in {name}"
        if not seen or HIDDEN in products:  # which may hide others
            return ""
        others = listed([f"{count(num)} in {dtype}" for dtype, num in seen.items()])
        is_own = self.has_trained or self.has_own_autocast
        why = "" if is_own else "; what trains calls other methods than model(x)"
        return f", but no product with gradients ran in {name} ({others}{why})"


# --- calls under autocast -------------------------------------------------------------------------


_SHARDED = ("FSDPModule", "FullyShardedDataParallel")

# The loss functions of torch.nn.functional, which PyTorch's loss modules call. Without
# binary_cross_entropy: autocast rejects it in float16, and in float32 it needs no help.
_LOSSES = (
    *(n for n in dir(functional) if n.endswith("_loss") and not n.startswith("_")),
    *("binary_cross_entropy_with_logits", "cross_entropy", "kl_div"),
)


class Forward(TopLevelCalls):
    """Patches that run top-level calls of modules and of loss functions under autocast.

    Module rules of the policy apply to the first module that runs.
    """

    def __init__(
        self, dtype: torch.dtype, policy: Policy | str | None, script: ScriptState
    ) -> None:
        super().__init__()
        self._dtype, self._policy, self._script = dtype, policy, script
        self._contexts: dict[str, autocast] = {}
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_on(self) -> bool:
        return self._script.is_on

    def install(self, patches: Patches) -> None:
        super().install(patches)
        for name in _LOSSES:
            function = getattr(functional, name)
            wrapper = patches.wrap(functional, name, partial(self._call_loss, name))
            compiler.script_instead(wrapper, function)

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        context = self._context_of(module)
        if context is None:
            return original(module, *args, **kwargs)
        with context, self.inside():
            output = original(module, *args, **kwargs)
        return in_float32(output, self._dtype)

    @not_compiled
    def _call_loss(
        self, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a loss function under autocast if an argument is in the lower precision."""
        if torch.compiler.is_compiling() or self.is_inside or not self.is_on:
            return original(*args, **kwargs)
        with self._context_of_loss(name, [*args, *kwargs.values()]), self.inside():
            return original(*args, **kwargs)

    def note_region(self, switches: Switches) -> None:
        """Note an autocast that the script enters inside a call, as accelerate's forward does."""
        if self.is_inside and switches.enabled and switches.dtype in _OPTION:
            self._note_own(switches.dtype)

    def _note_own(self, dtype: torch.dtype) -> None:
        # An autocast entered in a backward pass is our own, restored by a checkpoint; so is one
        # of a replay.
        is_scripts = autograd.backward_number() < 0 and not is_replaying()
        if is_scripts and self._script.is_on:
            self._script.note_own_autocast(dtype)

    @compiler.do_not_compile_alone
    def _context_of(self, module: nn.Module) -> AbstractContextManager[object] | None:
        """Return the autocast context for an outermost module, or None to run it unchanged."""
        param = next(iter(module.parameters()), None)
        if param is None or not self._may_enter(param.device.type):
            return None
        if module not in self._checked:
            self._checked.add(module)
            reason = _why_not_scaled(module) if self._script.is_scaling else None
            if reason is not None:
                self._script.switch_off(reason)
                return None
        if not is_replaying():  # a checkpoint in a replay calls modules inside of others
            self._script.modules.setdefault(type(_unwrapped(module)).__name__)
        self._script.has_trained |= torch.is_grad_enabled()
        return self._context(param.device.type, module)

    @compiler.do_not_compile_alone
    def _context_of_loss(self, name: str, args: list[Any]) -> AbstractContextManager[object]:
        if not is_replaying():
            self._script.losses.setdefault(name)
        # Models return float32. A loss of float32 inputs needs no autocast.
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        device = next((t.device.type for t in tensors if t.dtype is self._dtype), None)
        if device is None or not self._may_enter(device):
            return nullcontext()
        return self._context(device, None)

    def _may_enter(self, device: str) -> bool:
        # An exported or traced program cannot carry a policy with it.
        if (
            self._script.is_by_hand
            or modes.is_jit_tracing()
            or compiler.is_exporting()
            or modes.is_tracing_before_autocast()
            or not torch.amp.is_autocast_available(device)
        ):
            return False
        if has_own_policies() or torch.is_autocast_enabled(device):
            self._note_own(torch.get_autocast_dtype(device))
            return False
        return True

    def _context(self, device: str, module: nn.Module | None) -> autocast:
        if device not in self._contexts:
            context = autocast(device, self._dtype, policy=self._policy, module=module)
            self._contexts[device] = context
        return self._contexts[device]


def _why_not_scaled(module: nn.Module) -> str | None:
    """Return why halfstep cannot scale the gradients of a model, or None if it can."""
    name = type(_unwrapped(module)).__name__
    if any(p.dtype is torch.float16 and p.requires_grad for p in module.parameters()):
        return f"the script keeps parameters of {name} in float16 itself"
    if any(cls.__name__ in _SHARDED for inner in module.modules() for cls in type(inner).__mro__):
        return (
            f"{name} is sharded by FSDP, whose gradients only a GradScaler in the script can reach "
            "(--amp bf16 needs none)"
        )
    return None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the script's own module, without wrappers for compilation or replication."""
    inner = compiler.compiled_from(module) or getattr(module, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module


# --- outputs in float32 ---------------------------------------------------------------------------


@compiler.do_not_compile_alone
def in_float32(value: Any, lower: torch.dtype) -> Any:
    """Return ``value`` with all its tensors of dtype ``lower`` cast to float32.

    Nested lists, tuples, named tuples, dictionaries (including a transformers ``ModelOutput``) and
    dataclasses are searched. A container without such tensors is returned as it is, not copied.
    Objects of other classes, such as a key-value cache, stay unchanged. Sync: none.
    """

    def each(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.float() if item.dtype is lower else item
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return _dataclass_in_float32(item, lower)
        return item

    return map_leaves(each, value)


def _dataclass_in_float32(value: Any, lower: torch.dtype) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = in_float32(fields, lower)
    if new is fields:
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # the dataclass may be frozen
    return result
