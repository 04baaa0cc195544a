"""A small training run with faults, in one process or in a parallel form of the same steps.

``Plan`` says what is trained, with which optimizer, and where gradients become inf; ``Trained``
says what came of it. ``alone`` is the slow, obvious reference on all the data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import halfstep

NUM_STEPS, NUM_SAMPLES = 12, 8
IN, WIDTH, HIDDEN, OUT = 6, 8, 16, 3


class Fault(NamedTuple):
    """Where a step goes bad.

    ``batch``: a sample of the rank is inf, and so is its loss; ``activation``: inf enters the
    backward pass of the rank; ``gradient``: a gradient that the rank holds after backward.
    """

    kind: Literal["batch", "activation", "gradient"]
    rank: int


@dataclass(frozen=True)
class Plan:
    """All that a run depends on."""

    seed: int = 0
    optimizer: Literal["SGD", "AdamW"] = "SGD"
    fused: bool = False
    max_norm: float | None = None
    init_scale: float = 2.0**10
    faults: Mapping[int, Fault] = field(default_factory=dict)  # by step


class Step(NamedTuple):
    """What became of one step; equal on all ranks."""

    taken: bool
    reason: str | None
    scale: float
    scale_after: float
    norm: float | None


@dataclass(frozen=True)
class Trained:
    """Parameters and optimizer state by name, whole; ``bad_ranks`` is ``outcome.rank`` by step."""

    parameters: dict[str, Tensor]
    state: dict[str, Tensor]
    steps: list[Step]
    bad_ranks: list[int | None]


def random_faults(
    seed: int, num_ranks: int, kinds: tuple[Literal["batch", "activation", "gradient"], ...]
) -> dict[int, Fault]:
    """Return faults in about a third of the steps, each of a random kind on a random rank.

    There is none in the first step: torch.distributed.pipelining finds shapes there by a pass over
    memory that nobody has written, whose loss may be NaN.
    """
    chosen = random.Random(seed)
    return {
        step: Fault(chosen.choice(kinds), chosen.randrange(num_ranks))
        for step in range(1, NUM_STEPS)
        if chosen.random() < 0.35
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Four layers, or those of one pipeline stage under the same names; ``poisoned``: see Fault."""

    NAMES = ("first", "left", "right", "last")

    def __init__(self, seed: int, names: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(IN, WIDTH), Block(), Block(), nn.Linear(WIDTH, OUT)]
        for name, layer in zip(self.NAMES, layers, strict=True):
            if name in names:
                self.add_module(name, layer)
        self.poisoned = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        if self.poisoned:
            x.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        return x


def batch(plan: Plan, step: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return all samples of a step; those of a rank are a block of rows."""
    generator = torch.Generator().manual_seed(plan.seed * 1000 + step)
    x = torch.randn(NUM_SAMPLES, IN, generator=generator)
    y = torch.randn(NUM_SAMPLES, OUT, generator=generator)
    fault = plan.faults.get(step)
    if fault and fault.kind == "batch":
        x[fault.rank * NUM_SAMPLES // num_ranks] = math.inf
    return x, y


class Job:
    """One rank's part of a training run; the parallel forms differ in ``backward``.

    Attributes:
        parameters: Those that this rank holds, by the names of the whole model.
        backward: Called with the scaler, the step's number, and all samples of the step.
        poison: Called with whether inf enters this rank's backward pass in this step.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        backward: Callable[[halfstep.GradScaler, int, Tensor, Tensor], None],
        poison: Callable[[bool], None],
        declare: Callable[[halfstep.GradScaler], None] = lambda scaler: None,
        **scaler_arguments: Any,
    ) -> None:
        self.parameters, self.backward, self.poison = parameters, backward, poison
        self.declare, self.scaler_arguments = declare, scaler_arguments


def run_job(plan: Plan, job: Job, rank: int | None, num_ranks: int) -> Trained:
    """Run all steps of one rank's job; ``rank`` None is alone and has the faults of all ranks."""
    parameters = list(job.parameters.values())
    optimizer = optimizer_of(plan, parameters)
    scaler = halfstep.GradScaler(
        "cpu", init_scale=plan.init_scale, growth_interval=3, **job.scaler_arguments
    )
    job.declare(scaler)
    steps, bad_ranks = [], []
    for step in range(NUM_STEPS):
        fault = plan.faults.get(step)
        mine = fault.kind if fault and rank in (None, fault.rank) else None
        optimizer.zero_grad()
        job.poison(mine == "activation")
        job.backward(scaler, step, *batch(plan, step, num_ranks))
        if mine == "gradient":
            spoil(parameters)
        scaler.step(optimizer, max_norm=plan.max_norm)
        scaler.update()
        outcome = scaler.outcome(optimizer)
        norm = outcome.norm if plan.max_norm is not None and outcome.taken else None
        steps.append(Step(outcome.taken, outcome.reason, outcome.scale, outcome.scale_after, norm))
        bad_ranks.append(outcome.rank)
    state = {
        f"{name}.{key}": whole(value)
        for name, parameter in job.parameters.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
    return Trained(
        {name: whole(each) for name, each in job.parameters.items()}, state, steps, bad_ranks
    )


def optimizer_of(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # One group for each mesh: a fused kernel of PyTorch takes no mixed group.
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for each in parameters:
        by_mesh.setdefault(getattr(each, "device_mesh", None), []).append(each)
    groups: Any = [{"params": each} for each in by_mesh.values()]
    if plan.optimizer == "SGD":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=plan.fused)
    return torch.optim.AdamW(groups, lr=0.01, fused=plan.fused)


def spoil(parameters: list[nn.Parameter]) -> None:
    """Write inf into one entry of the largest gradient that is here."""
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    max(gradients, key=Tensor.numel).view(-1)[0] = math.inf


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the values without shards or history; a collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def alone(plan: Plan, num_chunks: int) -> Job:
    """The reference: one process, all data, added up in parts as the parallel form does it."""
    net = Net(plan.seed)

    def backward(scaler: halfstep.GradScaler, step: int, x: Tensor, y: Tensor) -> None:
        for xs, ys in zip(x.chunk(num_chunks), y.chunk(num_chunks), strict=True):
            scaler.scale(F.mse_loss(net(xs), ys) / num_chunks).backward()

    return Job(dict(net.named_parameters()), backward, lambda on: setattr(net, "poisoned", on))
