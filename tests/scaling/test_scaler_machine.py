"""halfstep.GradScaler and torch.amp.GradScaler side by side through random sequences of calls.

Equal at every moment: the scale, the count of steps in a row, every parameter and buffer of an
optimizer, bit for bit, and every gradient before the step. Two differences are on purpose and are
modelled exactly, by doing to the scaler of PyTorch what ours does by itself: the floor of the scale
(A1) and the count that is past a lowered interval (A29). As soon as the scale may be below 1 it
stays a power of two: from then on our fused step unscales first, where theirs divides inside its
kernel, and only then the two are the same to the last bit.
"""

import copy
import math
import pickle
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch.nn.utils import clip_grad_norm_

from halfstep.scaling import GradScaler

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
            generator = torch.Generator().manual_seed(k)
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

    def tensors(self, stages: list[str]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for params, optimizer, stage in zip(self.params, self.optimizers, stages, strict=True):
            for param in params:
                found.append(param.detach())
                # After a skipped fused step at a scale below 1 ours are unscaled, theirs are not.
                if param.grad is not None and stage != "stepped":
                    found.append(param.grad)
                state = optimizer.state.get(param, {})
                found.extend(value for value in state.values() if torch.is_tensor(value))
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
        scale=st.sampled_from([2.0**16, 2.0**4, 1.0, 1000.0, 2.0**-3]),
        growth=st.sampled_from([2.0, 1.5]),
        backoff=st.sampled_from([0.5, 0.25]),
        interval=st.integers(1, 4),
    )
    def start(self, scale: float, growth: float, backoff: float, interval: int) -> None:
        self.powers_of_two = scale < 1
        if self.powers_of_two:
            growth = 2.0
        numbers = (scale, growth, backoff, interval)
        self.ours = Side(GradScaler("cpu", *numbers))
        self.theirs = Side(torch.amp.GradScaler("cpu", *numbers))
        self.floor = min(1.0, scale)
        self.stage = ["fresh"] * len(OPTIMIZERS)  # fresh, scaled, unscaled, stepped
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

    @rule(
        indices=st.lists(which, min_size=1, max_size=3),
        factor=st.sampled_from([1.0, 0.1, 3.0, 1e-4]),
    )
    def backward(self, indices: list[int], factor: float) -> None:
        """Several losses at once; the same one twice accumulates."""
        indices = [k for k in indices if self.stage[k] in ("fresh", "scaled")]
        for side in self.sides:
            side.backward(indices, factor)
        for k in indices:
            self.stage[k] = "scaled"

    @rule(k=which, p=st.integers(0, 1), entry=st.integers(0, 3), value=bad_values)
    def inject(self, k: int, p: int, entry: int, value: float) -> None:
        # Before the check. After it nobody looks again, and the step would be taken on both sides.
        if self.stage[k] == "scaled":
            for side in self.sides:
                side.params[k][p].grad.view(-1)[entry] = value

    @rule(k=which)
    def unscale(self, k: int) -> None:
        if self.stage[k] == "scaled":
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
        if self.stage[k] in ("scaled", "unscaled"):
            for side in self.sides:
                side.scaler.step(side.optimizers[k])
            self.stage[k] = "stepped"

    @precondition(lambda self: not self.between_iterations())
    @rule()
    def update(self) -> None:
        before = self.theirs.scaler.get_scale()
        for side in self.sides:
            side.scaler.update()
        floor = min(before, self.floor)
        if self.theirs.scaler.get_scale() < floor:
            self.theirs.scaler._scale.fill_(floor)
        self.rescaled(before)

    @rule(k=which, factor=st.sampled_from([1.0, 3.0]), bad=st.none() | bad_values)
    def whole_iteration(self, k: int, factor: float, bad: float | None) -> None:
        """The plain loop at once, so that long runs of steps are reached."""
        if self.between_iterations():
            self.backward([k], factor)
            if bad is not None:
                self.inject(k, 0, 0, bad)
            self.step(k)
            self.update()

    def rescaled(self, before: float) -> None:
        """Gradients that wait for the next iteration carry the old scale: drop them."""
        if self.theirs.scaler.get_scale() != before:
            self.stage = [stage if stage != "scaled" else "fresh" for stage in self.stage]
            for side in self.sides:
                for optimizer in side.optimizers:
                    optimizer.zero_grad()
        self.end_iteration()

    @rule(
        scale=st.sampled_from([2.0**-6, 2.0**-1, 1.0, 3.0, 1e4, 2.0**20, 1e38, 3e38]),
        tensor=st.booleans(),
    )
    def new_scale(self, scale: float, tensor: bool) -> None:
        before = self.theirs.scaler.get_scale()
        self.powers_of_two |= tensor or scale < 1
        if self.powers_of_two:
            scale = 2.0 ** math.floor(math.log2(scale))
            self.set_growth_factor(2.0)
            self.set_backoff_factor(0.5)
        for side in self.sides:
            side.scaler.update(torch.tensor(scale) if tensor else scale)
        self.floor = min(self.floor, scale)
        self.rescaled(before)

    @rule(factor=st.sampled_from([1.5, 2.0, 4.0]))
    def set_growth_factor(self, factor: float) -> None:
        if not self.powers_of_two or factor != 1.5:
            for side in self.sides:
                side.scaler.set_growth_factor(factor)

    @rule(factor=st.sampled_from([0.25, 0.5, 0.75]))
    def set_backoff_factor(self, factor: float) -> None:
        if not self.powers_of_two or factor != 0.75:
            for side in self.sides:
                side.scaler.set_backoff_factor(factor)

    @rule(interval=st.integers(1, 5))
    def set_growth_interval(self, interval: int) -> None:
        for side in self.sides:
            side.scaler.set_growth_interval(interval)
        self.theirs.scaler._growth_tracker.clamp_(max=interval - 1)

    @rule(crosswise=st.booleans(), into_new=st.booleans())
    def save_and_load(self, crosswise: bool, into_new: bool) -> None:
        if not self.between_iterations():
            return
        saved = [side.scaler.state_dict() for side in self.sides]
        if into_new:
            self.ours.scaler, self.theirs.scaler = GradScaler(), torch.amp.GradScaler("cpu")
        for side, state in zip(self.sides, saved[::-1] if crosswise else saved, strict=True):
            side.scaler.load_state_dict(state)
        if crosswise:
            self.floor = min(1.0, saved[0]["scale"])
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

    @invariant()
    def all_is_equal(self) -> None:
        ours, theirs = (side.scaler.state_dict() for side in self.sides)
        assert ours.pop("halfstep") == {"version": 1, "min_scale": self.floor}
        assert ours == theirs
        mine, others = (side.tensors(self.stage) for side in self.sides)
        assert len(mine) == len(others)
        assert all(map(same_bits, mine, others))
        for params in self.ours.params:
            assert all(bool(param.isfinite().all()) for param in params)


SideBySide.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSideBySide = SideBySide.TestCase
