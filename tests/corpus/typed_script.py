"""A script that uses every public name, for type checkers; it is never run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep import (
    CallOrderError,
    Diagnosis,
    Dynamic,
    GradScaler,
    Guard,
    Outcome,
    Policy,
    Reason,
    Rule,
    Static,
    __version__,
    autocast,
    custom_bwd,
    custom_fwd,
    diagnose,
    float32_weights,
    guard,
    is_autocast_available,
    keep,
    lost_updates,
    master_weights,
    preset,
    record,
    self_check,
    trace,
    tune,
    use_policy,
)

NAMES = (
    CallOrderError,
    Diagnosis,
    Dynamic,
    GradScaler,
    Guard,
    Outcome,
    Policy,
    Reason,
    Rule,
    Static,
    __version__,
    autocast,
    custom_bwd,
    custom_fwd,
    diagnose,
    float32_weights,
    guard,
    is_autocast_available,
    keep,
    lost_updates,
    master_weights,
    preset,
    record,
    self_check,
    trace,
    tune,
    use_policy,
)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch).sum()
    return loss


def train(model: nn.Module, batches: list[Tensor], folder: Path) -> float | None:
    optimizer: torch.optim.SGD = halfstep.master_weights(torch.optim.SGD(model.parameters(), 0.1))
    schedules = halfstep.Dynamic(2.0**10), halfstep.Static()
    scaler: GradScaler = halfstep.GradScaler("cpu", schedule=schedules[0])
    policy: halfstep.Policy = halfstep.preset("standard")
    rule = halfstep.Rule("softmax", "lower", dtype=torch.bfloat16)
    with halfstep.record(folder, model):
        for batch in batches:
            with halfstep.autocast("cpu", torch.float16, policy=policy):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    guarded: halfstep.Guard = halfstep.guard(optimizer, max_norm=1.0)
    with halfstep.lost_updates(optimizer, model) as lost:
        optimizer.step()
    print(guarded.outcome().taken, guarded.counts().skipped)
    weights: dict[str, Tensor] = halfstep.float32_weights(model, optimizer)
    print(lost.share, lost.shares, weights)
    outcome: halfstep.Outcome = scaler.outcome(optimizer)
    is_overflow = outcome.reason is halfstep.Reason.OVERFLOW
    print(halfstep.__version__, rule, is_overflow, halfstep.is_autocast_available("cpu"))
    return outcome.norm


def look(model: nn.Module, batch: Tensor) -> str:
    with (
        halfstep.use_policy("torch", module=model),
        halfstep.trace(model) as seen,
        halfstep.autocast("cpu", torch.bfloat16),
    ):
        model(batch)
    with halfstep.keep(model, "*.norm"):
        found: halfstep.Diagnosis = halfstep.diagnose(lambda: loss_of(model, batch), model=model)
        with halfstep.diagnose(GradScaler(), model=model, tell=lambda found, step: None) as watch:
            found = watch.found[0]
    check = halfstep.self_check(model, batch, loss_of)
    tuned = halfstep.tune(model, [batch], loss_of)
    return "\n".join([seen.table(), found.to_json(), str(check), str(tuned.policy)])


class Double(torch.autograd.Function):
    @staticmethod
    @halfstep.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @halfstep.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0] * 2


try:
    print(look(nn.Linear(1, 1), torch.ones(1, 1)))
except (halfstep.CallOrderError, halfstep.errors.RecordError) as error:
    print(error)
