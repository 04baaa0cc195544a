"""One step of a task in float32 and in lower precision, compared module by module."""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep._autocast import Policy, autocast
from halfstep._common.module_names import replicated, without_wrappers
from halfstep._common.nested import tensors_in, tensors_reached, values_reached
from halfstep._common.text import shown
from halfstep._pytorch import autograd, modes
from halfstep._pytorch.compiler import eager
from halfstep._pytorch.listeners import listening_to_backward
from halfstep._tools.replay.undo import UndoLog
from halfstep._tools.tune.module_check import (
    KINDS,
    Comparison,
    Depths,
    Difference,
    ModuleCheck,
    amax,
    difference,
    is_leaf,
    outputs_rounded,
    tolerance_for,
)

# --- the task -------------------------------------------------------------------------------------


LossFn: TypeAlias = Callable[[Any, Any], Any]
"""A ``loss_fn(model, batch)`` that calls the model in any way and returns a scalar or outputs."""


OWN_BACKWARD = (
    "loss_fn(model, batch) calls backward(), and the backward pass of what it returns failed: "
    "return the loss; its backward pass is run after it, outside of autocast"
)


def _takes_model_and_batch(function: Any) -> bool:
    if not callable(function) or isinstance(function, nn.Module):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a function without a signature
    return True


@dataclass(frozen=True)
class Task:
    """A model with float32 parameters, and its loss function.

    Raises:
        TypeError: ``model`` is not a module, or ``loss_fn`` is not a function.
        ValueError: A parameter has another dtype, or no shape yet.
    """

    model: nn.Module
    loss_fn: LossFn | None = None  # None to call the model with the batch

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(self.model).__name__}")
        if self.loss_fn is not None and not _takes_model_and_batch(self.loss_fn):
            raise TypeError(f"loss_fn gets the model and the batch; got {shown(self.loss_fn)}")
        for name, parameter in self.model.named_parameters():
            if is_lazy(parameter):
                raise ValueError(f"parameter {name} has no shape yet: run the model on a batch")
            if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                raise ValueError(
                    f"results are compared with those in float32, and parameter {name} is "
                    f"{parameter.dtype}: pass model.float(). To train with parameters of "
                    f"{parameter.dtype} and lose no updates: halfstep.master_weights(optimizer)"
                )

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names as in policies; the model itself is ``""``."""
        for name, module in replicated(self.model).named_modules():
            yield without_wrappers(name), module

    def device(self, batch: Any) -> str:
        tensors = [*self.model.parameters(), *batch_tensors(batch)]
        return tensors[0].device.type if tensors else "cpu"

    def loss(self, batch: Any) -> Tensor:
        """Run the model on a batch and return its loss, or a scalar computed from its outputs.

        Raises:
            TypeError: The result contains no floating-point numbers.
        """
        if self.loss_fn is not None:
            return _loss_of(self.loss_fn(self.model, batch), "loss_fn(model, batch)")
        if isinstance(batch, Mapping):
            output = self.model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = self.model(*batch)
        else:
            output = self.model(batch)
        return _loss_of(output, "the model")


def batch_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors in the containers of a batch, then those in attributes of its objects."""
    found = list(tensors_in([batch]))
    ids = set(map(id, found))
    return [*found, *(tensor for tensor in tensors_reached(batch) if id(tensor) not in ids)]


def _loss_of(output: Any, of: str) -> Tensor:
    """Return the loss of an output, the output if it is one number, or its sum of mean squares."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    values = (each for each in values_reached(output, (nn.Module,)) if isinstance(each, Tensor))
    outputs = [value for value in values if value.is_floating_point()]
    if not outputs:
        raise TypeError(
            f"{of} returns {type(output).__name__} without a floating-point tensor: pass a "
            "loss_fn(model, batch) that returns the loss or, for inference, the outputs as tensors"
        )
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    # In float32, so that squares do not overflow float16.
    return torch.stack([each.float().square().mean() for each in outputs]).sum()


# --- restoring a model ----------------------------------------------------------------------------

SEED = 0  # the seed of all random number generators in each pass


@contextmanager
def restored(
    model: nn.Module, batch: Iterable[Tensor], device: str
) -> Iterator[Callable[[], None]]:
    """Restore a model, the tensors of a batch and the random numbers after the block.

    Parameters, buffers, gradients and module attributes are restored. Yield a function that
    restores the same state without gradients and seeds the random numbers of the CPU and of a
    device type, so that each pass starts from the same state. Sync: none.
    """
    tensors = [*tensors_in(map(vars, model.modules())), *batch]
    log = UndoLog()
    log.note_model(model)
    log.note_grads(tensor for tensor in tensors if tensor.is_leaf)

    def reset() -> None:
        log.restore()
        for tensor in tensors:
            log.note_write(tensor)
        for leaf, _ in log.grads():
            leaf.grad = None
        torch.default_generator.manual_seed(SEED)
        if device != "cpu":
            torch.get_device_module(device).manual_seed_all(SEED)
        random.seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)

    reset()
    try:
        yield reset
    finally:
        log.restore()


# --- passes ---------------------------------------------------------------------------------------


class TensorPlace(NamedTuple):
    module: str
    call: int  # the index of the module's call; 0 for gradients of parameters
    kind: str  # one of KINDS
    position: int  # the index among its floating-point tensors, or all parameters


See: TypeAlias = Callable[[TensorPlace, Tensor], None]
OnCall: TypeAlias = Callable[[str, int, Any], None]
"""A function of a module's name, the index of its call, and the arguments or the output."""


@contextmanager
def module_hooks(task: Task, before: OnCall, after: OnCall) -> Iterator[None]:
    """Call functions before and after each module call of the forward pass."""
    calls, running = dict[str, int](), list[tuple[str, int]]()

    def is_recomputed() -> bool:  # in a backward pass, only checkpointing calls modules
        return autograd.backward_number() >= 0

    def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_recomputed():
            call = calls[name] = calls.get(name, -1) + 1
            running.append((name, call))
            before(name, call, (args, kwargs))

    def leave(name: str, _: nn.Module, args: Any, output: Any) -> None:
        if not is_recomputed():
            opened, call = running.pop()
            while opened != name:  # an inner call raised an error that was caught
                opened, call = running.pop()
            after(name, call, output)

    with ExitStack() as stack:
        for name, module in task.named_modules():
            hook = module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        yield


@contextmanager
def tensor_hooks(task: Task, see: See) -> Iterator[None]:
    """Call ``see`` with each floating-point input and output of a module, and with gradients.

    Recomputations of activation checkpointing are left out.
    """
    places_of: dict[tuple[int, int], list[TensorPlace]] = {}
    held: list[Tensor] = []  # keeps their ids from being reused

    def look(kind: str, name: str, call: int, values: Any) -> None:
        found = [each for each in tensors_in([values]) if each.is_floating_point()]
        for position, tensor in enumerate(found):
            if modes.is_inside_functorch(tensor):
                continue
            see(TensorPlace(name, call, kind, position), tensor)
            if tensor.requires_grad:
                key = id(tensor), autograd.version_of(tensor)
                if key not in places_of:
                    held.append(tensor)
                    places = places_of[key] = []
                    hook = tensor.register_hook(partial(seen, places))  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
                places_of[key].append(TensorPlace(name, call, f"{kind}_gradient", position))

    def seen(places: list[TensorPlace], gradient: Tensor) -> None:
        for place in places:
            see(place, gradient)

    with ExitStack() as stack:
        on_input, on_output = partial(look, "input"), partial(look, "output")
        stack.enter_context(module_hooks(task, on_input, on_output))
        yield


HEADROOM = 8.0
"""The factor by which the largest scaled gradient stays below the largest float16 value."""
BACKOFF = 4.0
LARGEST_SCALE = 2.0**40
GRADIENTS = ("output_gradient", "parameters")


@dataclass(frozen=True)
class Lowering:
    """The settings of a step in lower precision."""

    dtype: torch.dtype
    policy: Policy
    tolerance: float | None = None  # of all modules; None to derive it from the dtype


@dataclass
class Reference:
    """The values of a float32 step. A depth is a number of consecutive ops."""

    values: dict[TensorPlace, Tensor] = field(default_factory=dict)  # in the order of the step
    depths: dict[str, int] = field(default_factory=dict)  # the depths of module outputs
    total_depth: int = 0  # the depth of the loss
    largest_gradient: float = 0.0
    loss: float = 0.0
    unavoidable: dict[str, float] = field(default_factory=dict)  # errors if outputs are rounded


@dataclass(frozen=True)
class StepRunner:
    task: Task
    batch: Any
    lowering: Lowering
    region: AbstractContextManager[object]  # the autocast of lower precision
    reset: Callable[[], None]  # restores everything between the passes

    def step(self, *hooks: AbstractContextManager[None], lowered: bool, scale: float) -> Tensor:
        """Run one step from the initial state and return the loss; gradients are in ``.grad``.

        ``hooks`` are installed after the reset, which would remove them from the modules.

        Raises:
            ValueError: ``loss_fn`` has already run the backward pass.
        """
        self.reset()
        backward_calls: list[bool] = []
        with ExitStack() as stack:
            for each in hooks:
                stack.enter_context(each)
            with (
                self.region if lowered else nullcontext(),
                listening_to_backward(lambda *_: backward_calls.append(True)),
            ):
                loss = self.task.loss(_copied(self.batch))
            if loss.requires_grad:
                try:
                    torch.autograd.backward(loss.float() * scale)
                except RuntimeError as error:
                    if not backward_calls:
                        raise
                    raise ValueError(OWN_BACKWARD) from error
        return loss


def _copied(batch: Any) -> Any:
    """Return a shallow copy of a batch: a program may remove items, or set attributes."""
    try:
        return batch if isinstance(batch, Tensor) else copy.copy(batch)
    except Exception:  # it cannot be copied
        return batch


@contextmanager
def step_runner(task: Task, batch: Any, lowering: Lowering) -> Iterator[StepRunner]:
    """Yield a runner of steps in eager mode, with gradients and without lasting changes."""
    device = task.device(batch)
    with eager(), ExitStack() as stack:
        # Created before `restored`, since it may name modules, and the names must stay.
        region = autocast(device, lowering.dtype, policy=lowering.policy, module=task.model)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        reset = stack.enter_context(restored(task.model, batch_tensors(batch), device))
        stack.enter_context(autocast(device, enabled=False))
        yield StepRunner(task, batch, lowering, region, reset)


def reference_of(runner: StepRunner) -> Reference:
    """Run a step in float32 and return its values. Sync: one for each tensor that is seen."""
    reference, depths = Reference(), Depths()
    # One copy for each version of a tensor, which is kept so that its id is not reused.
    copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if tensor.is_inference():  # it has no version counter
            return tensor.clone()
        key = id(tensor), autograd.version_of(tensor)
        if key not in copies:
            copies[key] = tensor, tensor.detach().clone()
        return copies[key][1]

    def see(place: TensorPlace, tensor: Tensor) -> None:
        if place.kind == "output":
            known = reference.depths.get(place.module, 0)
            reference.depths[place.module] = max(known, depths.of(tensor))
        elif place.kind != "input":
            reference.largest_gradient = max(reference.largest_gradient, _finite(amax(tensor)))
        reference.values[place] = copy_of(tensor)

    loss = _seen_step(runner, see, lowered=False, scale=1.0)
    reference.loss, reference.total_depth = float(loss.detach()), depths.of(loss)
    modules = [module for _, module in runner.task.named_modules()]
    rounding = outputs_rounded(modules, runner.lowering.dtype)
    found, _ = _differences(runner, reference, rounding, lowered=False, scale=1.0)
    for (module, kind), seen in found.items():
        if kind in GRADIENTS:
            known = reference.unavoidable.get(module, 0.0)
            reference.unavoidable[module] = max(known, _finite(seen.error))
    return reference


def compare_step(runner: StepRunner, reference: Reference) -> Comparison:
    """Run a step in lower precision and compare it with float32.

    In float16 the loss is scaled by the largest power of two that keeps the largest float32
    gradient a factor of HEADROOM below the largest float16 value. Thus only the width of the range
    of gradients matters, not its position. If gradients overflow but the forward pass does not, the
    step is run again at a quarter of the scale, down to 1, as a scaler would back off.

    Sync: several for each tensor that is seen.
    """
    scale = _first_scale(reference, runner.lowering.dtype)
    while True:
        found, loss = _differences(runner, reference, lowered=True, scale=scale)
        rows = tuple(_rows(runner, reference, found))
        comparison = Comparison(scale, loss, reference.loss, rows)
        is_forward_good = comparison.is_loss_good and not any(r.output.overflow for r in rows)
        overflows = any(r.output_gradient.overflow or r.parameters.overflow for r in rows)
        if scale <= 1 or not (overflows and is_forward_good):
            return comparison
        scale = max(scale / BACKOFF, 1.0)


def _differences(
    runner: StepRunner,
    reference: Reference,
    *hooks: AbstractContextManager[None],
    lowered: bool,
    scale: float,
) -> tuple[dict[tuple[str, str], Difference], float]:
    """Run a step and return the differences, by module and kind, and the loss."""
    found: dict[tuple[str, str], Difference] = {}

    def see(place: TensorPlace, tensor: Tensor) -> None:
        wanted = reference.values.get(place)
        if wanted is not None:  # else the program took another path
            is_scaled = place.kind not in ("input", "output")
            seen = difference(tensor, wanted, scale if is_scaled else 1.0)
            of = place.module, place.kind
            found[of] = found.get(of, Difference()) + seen

    loss = _seen_step(runner, see, *hooks, lowered=lowered, scale=scale)
    return found, float(loss.detach())


def _seen_step(
    runner: StepRunner, see: See, *hooks: AbstractContextManager[None], lowered: bool, scale: float
) -> Tensor:
    """Run a step, and call ``see`` as :func:`tensor_hooks` do and with gradients of parameters."""
    loss = runner.step(*hooks, tensor_hooks(runner.task, see), lowered=lowered, scale=scale)
    named = runner.task.named_modules()
    own = [(name, each) for name, module in named for each in module.parameters(recurse=False)]
    for position, (name, parameter) in enumerate(own):
        if parameter.grad is not None:
            see(TensorPlace(name, 0, "parameters", position), parameter.grad)
    return loss


def _rows(
    runner: StepRunner, reference: Reference, found: Mapping[tuple[str, str], Difference]
) -> Iterator[ModuleCheck]:
    modules, total = dict(runner.task.named_modules()), reference.total_depth
    dtype, given = runner.lowering.dtype, runner.lowering.tolerance
    ran = (place.module for place in reference.values if place.kind != "parameters")
    for name in dict.fromkeys(ran):
        depth, unavoidable = reference.depths.get(name, total), reference.unavoidable.get(name, 0.0)
        yield ModuleCheck(
            name,
            type(modules[name]).__name__,
            is_leaf(modules[name]),
            *tolerance_for(dtype, depth, total, given, unavoidable),
            *(found.get((name, kind), Difference()) for kind in KINDS),
        )


def _first_scale(reference: Reference, dtype: torch.dtype) -> float:
    if dtype is not torch.float16 or not reference.largest_gradient:
        return 1.0
    room = torch.finfo(dtype).max / HEADROOM / reference.largest_gradient
    return min(max(2.0 ** math.floor(math.log2(room)), 1.0), LARGEST_SCALE)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
