"""One step in float32 and one in lower precision, module by module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfstep._autocast import Policy, autocast
from halfstep._autocast.casts import tensors_in
from halfstep._common.force_eager import eager
from halfstep._tune.depth import Depths
from halfstep._tune.difference import Difference, amax, difference
from halfstep._tune.rounding import rounding
from halfstep._tune.row import Row
from halfstep._tune.task import Task
from halfstep._tune.tolerances import tolerance_for
from halfstep._tune.untouched import Untouched
from halfstep._tune.watching import Phase, Place, watching

HEADROOM = 8.0
"""By how much the largest gradient stays below the largest number of float16."""
BACKOFF = 4.0
LARGEST_SCALE = 2.0**40
GRADIENTS = ("output_gradient", "parameters")
KINDS = ("input", "output", "output_gradient", "input_gradient", "parameters")


@dataclass(frozen=True)
class Lowering:
    """How the step in lower precision is run.

    Attributes:
        dtype: The lower precision.
        policy: Which op runs in which.
        error: The error that holds for all modules, None for tolerances that follow from the dtype.
    """

    dtype: torch.dtype
    policy: Policy
    error: float | None = None


@dataclass
class Reference:
    """What a step computes in float32.

    Attributes:
        values: What was seen where, in the order of the forward pass.
        parameters: The gradients of parameters, by the name of the module that has them, and by
            their own.
        depths: Ops in a row from the beginning to the output of a module.
        total_depth: The same to the loss.
        largest_gradient: The largest magnitude in any of the gradients.
        loss: The loss.
        unavoidable: The errors of the gradients of modules if outputs are rounded and nothing else.
    """

    values: dict[Place, Tensor] = field(default_factory=dict)
    parameters: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    total_depth: int = 0
    largest_gradient: float = 0.0
    loss: float = 0.0
    unavoidable: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A step in lower precision, compared with float32.

    Attributes:
        rows: The modules that ran, in their order.
        scale: What the loss was multiplied by.
        loss: The loss.
        loss32: The loss in float32.
    """

    rows: tuple[Row, ...]
    scale: float
    loss: float
    loss32: float

    @property
    def is_loss_good(self) -> bool:
        """Whether the loss is finite if it is in float32."""
        return math.isfinite(self.loss) or not math.isfinite(self.loss32)


@dataclass(frozen=True)
class Bench:
    """A task and a batch, ready to be run.

    Attributes:
        task: What is run.
        batch: What it is run on.
        lowering: How, in lower precision.
        region: The context of that.
        untouched: Brings everything back between the passes.
    """

    task: Task
    batch: Any
    lowering: Lowering
    region: AbstractContextManager[object]
    untouched: Untouched

    def step(self, watch: AbstractContextManager[Phase], *, lowered: bool, scale: float) -> Tensor:
        """Run one step from the same beginning and return the loss; the gradients are there."""
        self.untouched.reset()
        with watch as phase:
            with self.region if lowered else nullcontext():
                loss = self.task.loss(self.batch)
            phase.is_backward = True
            if loss.requires_grad:
                torch.autograd.backward(loss.float() * scale)
        return loss


@contextmanager
def bench_for(task: Task, batch: Any, lowering: Lowering) -> Iterator[Bench]:
    """Run steps in the block: eager, with gradients, and with nothing changed afterwards."""
    device = task.device(batch)
    with ExitStack() as stack:
        stack.enter_context(eager(has_global_hooks=False))
        # Made first, for it may let modules know their names, which is to stay.
        region = autocast(device, lowering.dtype, policy=lowering.policy, module=task.model)
        untouched = Untouched(task.model, tensors_in([batch]), {device})
        stack.enter_context(untouched)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(autocast(device, enabled=False))
        yield Bench(task, batch, lowering, region, untouched)


def reference_of(bench: Bench) -> Reference:
    """Run a step in float32. Sync: one for each tensor that is seen."""
    reference, depths, copies = Reference(), Depths(), _Copies()

    def see(place: Place, tensor: Tensor) -> None:
        if place.kind == "output":
            known = reference.depths.get(place.module, 0)
            reference.depths[place.module] = max(known, depths.of(tensor))
        elif place.kind.endswith("gradient"):
            reference.largest_gradient = max(reference.largest_gradient, _finite(amax(tensor)))
        reference.values[place] = copies.of(tensor)

    loss = bench.step(watching(bench.task, see), lowered=False, scale=1.0)
    reference.loss, reference.total_depth = float(loss.detach()), depths.of(loss)
    for key, gradient in _parameter_gradients(bench.task):
        reference.parameters[key] = gradient.detach().clone()
        reference.largest_gradient = max(reference.largest_gradient, _finite(amax(gradient)))
    with rounding(bench.task, bench.lowering.dtype):
        found, _ = _differences(bench, reference, lowered=False, scale=1.0)
    for (module, kind), seen in found.items():
        if kind in GRADIENTS:
            known = reference.unavoidable.get(module, 0.0)
            reference.unavoidable[module] = max(known, _finite(seen.error))
    return reference


def compare(bench: Bench, reference: Reference) -> Comparison:
    """Run a step in lower precision and compare it.

    In float16 the loss is scaled, so that gradients suffer from their range only, and not from
    where in it they lie: by the power of two at which float32's largest gradient is a factor of
    HEADROOM below float16's largest number. If gradients overflow all the same, while the forward
    pass does not, the step is run again at a quarter of it, as a scaler backs off, down to 1.

    Sync: several for each tensor that is seen.
    """
    scale = _first_scale(reference, bench.lowering.dtype)
    while True:
        comparison = _compare_at(scale, bench, reference)
        rows = comparison.rows
        is_forward_good = comparison.is_loss_good and not any(r.output.overflow for r in rows)
        overflows = any(r.output_gradient.overflow or r.parameters.overflow for r in rows)
        if scale <= 1 or not (overflows and is_forward_good):
            return comparison
        scale = max(scale / BACKOFF, 1.0)


def _compare_at(scale: float, bench: Bench, reference: Reference) -> Comparison:
    found, loss = _differences(bench, reference, lowered=True, scale=scale)
    return Comparison(tuple(_rows(bench, reference, found)), scale, loss, reference.loss)


def _differences(
    bench: Bench, reference: Reference, *, lowered: bool, scale: float
) -> tuple[dict[tuple[str, str], Difference], float]:
    """Run a step and return what differs, by module and kind, and the loss."""
    found: dict[tuple[str, str], Difference] = {}

    def add(module: str, kind: str, difference: Difference) -> None:
        found[module, kind] = found.get((module, kind), Difference()) + difference

    def see(place: Place, tensor: Tensor) -> None:
        wanted = reference.values.get(place)
        if wanted is not None:  # else the program took another way
            of_gradient = place.kind.endswith("gradient")
            seen = difference(tensor, wanted, scale if of_gradient else 1.0)
            add(place.module, place.kind, seen)

    loss = bench.step(watching(bench.task, see), lowered=lowered, scale=scale)
    for key, gradient in _parameter_gradients(bench.task):
        wanted = reference.parameters.get(key)
        if wanted is not None:
            add(key[0], "parameters", difference(gradient, wanted, scale))
    return found, float(loss.detach())


def _rows(
    bench: Bench, reference: Reference, found: Mapping[tuple[str, str], Difference]
) -> Iterator[Row]:
    modules, total = dict(bench.task.named_modules()), reference.total_depth
    for name in dict.fromkeys(place.module for place in reference.values):
        depth = reference.depths.get(name, total)
        unavoidable = reference.unavoidable.get(name, 0.0)
        tolerance = tolerance_for(
            bench.lowering.dtype, depth, total, bench.lowering.error, unavoidable
        )
        yield Row(
            name,
            type(modules[name]).__name__,
            not any(True for _ in modules[name].children()),
            tolerance.output,
            tolerance.gradient,
            *(found.get((name, kind), Difference()) for kind in KINDS),
        )


def _parameter_gradients(task: Task) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for name, module in task.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.grad is not None:
                yield (name, own), parameter.grad


def _first_scale(reference: Reference, dtype: torch.dtype) -> float:
    if dtype is not torch.float16 or not reference.largest_gradient:
        return 1.0
    room = torch.finfo(dtype).max / HEADROOM / reference.largest_gradient
    return min(max(2.0 ** math.floor(math.log2(room)), 1.0), LARGEST_SCALE)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


class _Copies:
    """Copies of tensors, one of each for as long as it is not written to."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy; the tensor is held, so that no other gets its id."""
        key = id(tensor), tensor._version
        if key not in self._copies:
            self._copies[key] = tensor, tensor.detach().clone()
        return self._copies[key][1]
