"""What tools observe of training, and that nobody observes it after the block."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from halfstep import GradScaler, Outcome, Policy, Rule, autocast, guard, use_policy
from halfstep.events import (
    PolicyOnDevice,
    active_policies,
    has_own_policies,
    is_observing,
    is_on_island,
    is_stepping,
    observe,
    observe_contexts,
    observe_ops,
    observers,
    unobserved,
)


class Noting:
    is_diagnosing = False

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_loss(self, scaler: Any, outputs: Any) -> None:
        self.seen.append(outputs.item())

    def on_iteration(
        self, scaler: Any, outcomes: Sequence[Outcome], left_out: Sequence[Outcome]
    ) -> None:
        self.seen.append([outcome.taken for outcome in outcomes])


def train(scaler: GradScaler, value: float) -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight * value).backward()
    scaler.step(optimizer)
    scaler.update()


def test_losses_and_iterations() -> None:
    scaler, outer, inner = GradScaler("cpu"), Noting(), Noting()
    with observe(outer):
        train(scaler, 2.0)
        with observe(inner):
            assert observers() == (outer, inner)
            train(scaler, torch.inf)
            with unobserved():
                assert not is_observing(outer)
                train(scaler, 3.0)
    train(scaler, 4.0)
    assert not observers()
    assert outer.seen == [2.0, [True], torch.inf, [False]]
    assert inner.seen == [torch.inf, [False]]


def test_a_step_of_a_scaler_or_a_guard_is_told_from_a_plain_one() -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    plain, guarded = torch.optim.SGD([weight]), torch.optim.SGD([weight])
    guard(guarded)
    seen: list[bool] = []
    for optimizer in (plain, guarded):
        optimizer.register_step_pre_hook(lambda *_: seen.append(is_stepping()))
    weight.sum().backward()
    plain.step()
    guarded.step()
    scaler = GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(plain)
    assert seen == [False, True, True]
    assert not is_stepping()


def test_contexts_ops_and_policies() -> None:
    islands: list[bool] = []

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            islands.append(is_on_island())
            return super().forward(x)

    model = torch.nn.Sequential(Layer(2, 2), Layer(2, 2))
    policy = Policy.parse("standard; @1:fp32")
    dtypes: list[torch.dtype | None] = []
    ops: list[tuple[str, str, str]] = []

    def note(op: str, rule: Rule, active: PolicyOnDevice) -> nullcontext[None]:
        ops.append((op, str(rule), str(active.policy)))
        return nullcontext()

    with (
        observe_contexts(lambda switches: dtypes.append(switches.dtype)),
        observe_ops(note),
        autocast("cpu", torch.bfloat16, policy=policy, module=model),
    ):
        assert has_own_policies()
        assert active_policies()["cpu"].policy == policy
        model(torch.ones(1, 2))
    assert dtypes == [torch.bfloat16]
    assert ("linear.default", "linear:lower", str(policy)) in ops
    assert islands == [False, True]
    assert not active_policies()
    with use_policy("torch"), ThreadPoolExecutor(1) as other:
        assert other.submit(active_policies).result()
        assert not other.submit(has_own_policies).result()
