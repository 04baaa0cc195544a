"""halfstep.GradScaler and torch.amp.GradScaler side by side through random sequences of calls.

Equal at every moment, bit for bit: the scale, the count of steps in a row, every parameter and
buffer of an optimizer, and every gradient but those of a skipped step, which are compared with what
they were before it (A33).

How the scale moves differs on purpose in a few iterations: a floor, a trial and what comes of it
(A1), a bad loss (A9), a count past a lowered interval (A29). What it should be is what
``next_state`` says of a state that is kept beside both; everywhere else torch's own update must
agree with it, and then torch's scaler is given that scale, so that both go on alike.
"""

import copy
import math
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.device import DEVICE, seeded
from torch.nn.utils import clip_grad_norm_

from halfstep._scaler import GradScaler
from halfstep._scaler.scale_state import TORCH_KEYS, Dynamic, ScaleState, next_state

pytestmark = pytest.mark.slow

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.01, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
]
which = st.integers(0, len(OPTIMIZERS) - 1)
bad_values = st.sampled_from([math.inf, -math.inf, math.nan])


class Side:
    """One scaler with its own copy of all parameters and optimizers."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.params = []
        self.optimizers = []
        for k, (cls, kwargs) in enumerate(OPTIMIZERS):
            generator = seeded(k)
            params = [
                torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
                for shape, dtype in [((2, 3), torch.float32), ((4,), torch.float64)]
            ]
            self.params.append(params)
            self.optimizers.append(cls(params, **kwargs))

    def backward(self, indices: list[int], factor: float) -> None:
        losses = [
            sum((param.double() * factor).square().sum() for param in self.params[k])
            for k in indices
        ]
        for loss in self.scaler.scale(losses):
            loss.backward()

    def grads(self, k: int) -> list[torch.Tensor]:
        return [param.grad for param in self.params[k] if param.grad is not None]

    def tensors(self, stages: list[str]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for k, (params, optimizer) in enumerate(zip(self.params, self.optimizers, strict=True)):
            found += [param.detach() for param in params]
            if stages[k] != "skipped":
                found += self.grads(k)
            for param in params:
                state = optimizer.state.get(param, {})
                found += [value for value in state.values() if torch.is_tensor(value)]
        return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(
            a.nan_to_num(0.0, math.inf, -math.inf), b.nan_to_num(0.0, math.inf, -math.inf)
        )
    )


class SideBySide(RuleBasedStateMachine):
    @initialize(
        scale=st.sampled_from([2.0**16, 2.0**4, 1.0, 1000.0, 2.0**-3, 0.3]),
        growth=st.sampled_from([2.0, 1.5]),
        backoff=st.sampled_from([0.5, 0.25, 0.7]),
        interval=st.integers(1, 4),
    )
    def start(self, scale: float, growth: float, backoff: float, interval: int) -> None:
        numbers = (scale, growth, backoff, interval)
        self.ours = Side(GradScaler(DEVICE, *numbers, on_skips=str))
        self.theirs = Side(torch.amp.GradScaler(DEVICE, *numbers))
        self.first = self.model = ScaleState.first(scale, Dynamic(growth, backoff, interval))
        # fresh, scaled, unscaled, taken, skipped
        self.stage = ["fresh"] * len(OPTIMIZERS)
        self.found_inf = [False] * len(OPTIMIZERS)
        self.loss_is_finite = True
        self.create_again()

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.theirs

    def between_iterations(self) -> bool:
        return all(stage in ("fresh", "scaled") for stage in self.stage)

    def end_iteration(self) -> None:
        for k, stage in enumerate(self.stage):
            if stage != "scaled":
                self.stage[k] = "fresh"
                for side in self.sides:
                    side.optimizers[k].zero_grad()
        self.loss_is_finite = True

    @rule(
        indices=st.lists(which, min_size=1, max_size=3),
        factor=st.sampled_from([1.0, 0.1, 3.0, 1e-4, math.inf]),
    )
    def backward(self, indices: list[int], factor: float) -> None:
        """Several losses at once; the same one twice accumulates."""
        indices = [k for k in indices if self.stage[k] in ("fresh", "scaled")]
        for side in self.sides:
            side.backward(indices, factor)
        for k in indices:
            self.stage[k] = "scaled"
        self.loss_is_finite &= not indices or math.isfinite(factor)

    @rule(k=which, p=st.integers(0, 1), entry=st.integers(0, 3), value=bad_values)
    def inject(self, k: int, p: int, entry: int, value: float) -> None:
        # Before the check. After it nobody looks again, and the step would be taken on both sides.
        if self.stage[k] == "scaled":
            for side in self.sides:
                side.params[k][p].grad.view(-1)[entry] = value

    def look(self, k: int) -> None:
        """Note, before the scalers do, what they will find."""
        if self.stage[k] == "scaled":
            self.found_inf[k] = not all(bool(g.isfinite().all()) for g in self.ours.grads(k))

    @rule(k=which)
    def unscale(self, k: int) -> None:
        if self.stage[k] == "scaled":
            self.look(k)
            for side in self.sides:
                side.scaler.unscale_(side.optimizers[k])
            self.stage[k] = "unscaled"

    @rule(k=which, max_norm=st.sampled_from([0.1, 1.0, 1e4]))
    def clip(self, k: int, max_norm: float) -> None:
        if self.stage[k] in ("scaled", "unscaled"):
            for side in self.sides:
                clip_grad_norm_(side.params[k], max_norm)

    @rule(k=which)
    def step(self, k: int) -> None:
        if self.stage[k] not in ("scaled", "unscaled"):
            return
        self.look(k)
        before = [grad.clone() for grad in self.ours.grads(k)]
        for side in self.sides:
            side.scaler.step(side.optimizers[k])
        self.stage[k] = "skipped" if self.found_inf[k] else "taken"
        assert self.ours.scaler.outcome(self.ours.optimizers[k]).skipped == self.found_inf[k]
        if self.found_inf[k]:
            self.are_as_before(self.ours.grads(k), before)

    def are_as_before(self, now: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        is_power_of_two = math.frexp(self.model.scale)[0] == 0.5
        for a, b in zip(now, before, strict=True):
            rtol = 0.0 if is_power_of_two else 2**-22
            torch.testing.assert_close(a, b, rtol=rtol, atol=0.0, equal_nan=True)

    @precondition(lambda self: not self.between_iterations())
    @rule()
    def update(self) -> None:
        before = self.model
        found_inf = any(
            found
            for found, stage in zip(self.found_inf, self.stage, strict=True)
            if stage not in ("fresh", "scaled")
        )
        self.model = after = next_state(
            before, found_inf=found_inf, loss_is_finite=self.loss_is_finite
        )
        for side in self.sides:
            side.scaler.update()
        theirs = self.theirs.scaler
        if not (
            (found_inf and not self.loss_is_finite)
            or before.reached_floor
            or before.resume_scale
            or after.resume_scale
            or theirs.get_scale() < after.min_scale
        ):
            assert theirs.get_scale() == after.scale
            assert theirs._growth_tracker.item() == after.growth_tracker
        theirs._scale.fill_(after.scale)
        theirs._growth_tracker.fill_(after.growth_tracker)
        self.rescaled(before.scale)

    @rule(k=which, factor=st.sampled_from([1.0, 3.0]), bad=st.none() | bad_values)
    def whole_iteration(self, k: int, factor: float, bad: float | None) -> None:
        """The plain loop at once, so that long runs of steps are reached."""
        if self.between_iterations():
            self.backward([k], factor)
            if bad is not None:
                self.inject(k, 0, 0, bad)
            self.step(k)
            self.update()

    @rule(k=which, bad=bad_values, length=st.integers(2, 20))
    def run_of_overflows(self, k: int, bad: float, length: int) -> None:
        """Down to the floor, and on."""
        for _ in range(length):
            self.whole_iteration(k, 1.0, bad)

    def rescaled(self, before: float) -> None:
        """Gradients that wait for the next iteration carry the old scale: drop them."""
        if self.model.scale != before:
            self.stage = [stage if stage != "scaled" else "fresh" for stage in self.stage]
            for side in self.sides:
                for optimizer in side.optimizers:
                    optimizer.zero_grad()
        self.end_iteration()

    @rule(
        scale=st.sampled_from([2.0**-6, 0.4, 1.0, 3.0, 1e4, 2.0**20, 1e38, 3e38]),
        tensor=st.booleans(),
    )
    def new_scale(self, scale: float, tensor: bool) -> None:
        before = self.model
        for side in self.sides:
            side.scaler.update(torch.tensor(scale) if tensor else scale)
        self.model = before.with_scale(scale)
        self.rescaled(before.scale)

    @rule(factor=st.sampled_from([1.5, 2.0, 4.0]))
    def set_growth_factor(self, factor: float) -> None:
        for side in self.sides:
            side.scaler.set_growth_factor(factor)
        self.model = replace(
            self.model, schedule=replace(self.model.schedule, growth_factor=factor)
        )

    @rule(factor=st.sampled_from([0.25, 0.5, 0.75]))
    def set_backoff_factor(self, factor: float) -> None:
        for side in self.sides:
            side.scaler.set_backoff_factor(factor)
        self.model = replace(
            self.model, schedule=replace(self.model.schedule, backoff_factor=factor)
        )

    @rule(interval=st.integers(1, 5))
    def set_growth_interval(self, interval: int) -> None:
        for side in self.sides:
            side.scaler.set_growth_interval(interval)
        self.theirs.scaler._growth_tracker.clamp_(max=interval - 1)
        self.model = replace(
            self.model,
            schedule=replace(self.model.schedule, growth_interval=interval),
            growth_tracker=min(self.model.growth_tracker, interval - 1),
        )

    @rule(crosswise=st.booleans(), into_new=st.booleans())
    def save_and_load(self, crosswise: bool, into_new: bool) -> None:
        if not self.between_iterations():
            return
        saved = [side.scaler.state_dict() for side in self.sides]
        if into_new:
            self.ours.scaler = GradScaler(on_skips=str)
            self.first = ScaleState.first(65536.0, self.model.schedule)
            self.theirs.scaler = torch.amp.GradScaler(DEVICE)
        for side, state in zip(self.sides, saved[::-1] if crosswise else saved, strict=True):
            side.scaler.load_state_dict(state)
        if crosswise:  # theirs knows of no limits and of no run: the limits are our own
            fresh = replace(self.first, schedule=self.model.schedule).with_scale(self.model.scale)
            self.model = replace(fresh, growth_tracker=self.model.growth_tracker)
        self.create_again()

    @rule(deep=st.booleans())
    def pickle_or_copy(self, deep: bool) -> None:
        if not self.between_iterations():
            return
        for side in self.sides:
            scaler = side.scaler
            side.scaler = copy.deepcopy(scaler) if deep else pickle.loads(pickle.dumps(scaler))
        self.create_again()

    def create_again(self) -> None:
        # A new scaler has no scale on the device before its first loss. Both get one at once, so
        # that waiting gradients can be used.
        for side in self.sides:
            side.scaler.scale(torch.zeros(()))
        self.loss_is_finite = True

    @invariant()
    def all_is_equal(self) -> None:
        ours, theirs = (side.scaler.state_dict() for side in self.sides)
        expected = self.model.to_dict()
        assert ours == expected
        assert {key: ours[key] for key in TORCH_KEYS} == theirs
        mine, others = (side.tensors(self.stage) for side in self.sides)
        assert len(mine) == len(others)
        assert all(map(same_bits, mine, others))
        for params in self.ours.params:
            assert all(bool(param.isfinite().all()) for param in params)


SideBySide.TestCase.settings = settings(
    max_examples=300 if "HALFSTEP_FUZZ" in os.environ else 100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSideBySide = pytest.mark.filterwarnings("ignore:.*clipped before they are unscaled")(
    SideBySide.TestCase
)
