"""Random sequences of calls of the whole surface, against a slow model in Python numbers.

The model knows the true gradient of every parameter in float64, what ``.grad`` is multiplied by at
any moment, and a :class:`ScaleState`, which ``next_state`` moves on. It is compared
after every call: each gradient is the true one, scaled or not, and clipped; each scale is that of
the model; no parameter is inf or NaN. A step is taken if and only if all gradients are finite and,
unscaled, representable, also those that were written to after they were unscaled; what the
optimizer is about to add is looked at right before it does. A call that is refused changes nothing.
Saved, loaded and continued is the same as continued.

    HALFSTEP_FUZZ=20000 pytest -n 2 tests/scaler/test_fuzz.py
    HALFSTEP_FUZZ=1 HALFSTEP_FUZZ_SEED=123 pytest tests/scaler/test_fuzz.py

The first runs more than the 1,000 sequences of every test run, the second runs one alone.
"""

import copy
import json
import math
import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import pytest
import torch
from tests.scaler.containers import Wrapper
from torch import Tensor

from halfstep._common.numbers import power
from halfstep._scaler import GradScaler
from halfstep._scaler.scale_state import Dynamic, Reason, ScaleState, Static, next_state
from halfstep.errors import CallOrderError, SkippedStepsError

pytestmark = pytest.mark.slow

NUM_SEQUENCES = int(os.environ.get("HALFSTEP_FUZZ", "1000"))
FIRST_SEED = int(os.environ.get("HALFSTEP_FUZZ_SEED", "0"))
NUM_PARTS = min(max(10, NUM_SEQUENCES // 500), NUM_SEQUENCES)  # none takes minutes
NUM_CALLS = 40

F32 = torch.finfo(torch.float32)
SUBNORMAL = 2.0**-149
LR = 1e-3


class BorderlineError(Exception):
    """Rounding decides what happens here, and the model does not round as the scaler does."""


class BoomError(Exception):
    """What an optimizer raises here."""


# --- the model: gradients -------------------------------------------------------------------------


@dataclass(eq=False)
class Look:
    """What was found in the gradients of one call."""

    found_inf: bool
    params: list["Param"] = field(default_factory=list)
    left_scaled: bool = False  # as they were, because the step was skipped


class Param:
    """A parameter with its true gradient.

    Attributes:
        true: The gradient as it is without any scale, None if there is none.
        bound: For each entry the sum of the magnitudes that were added up.
        relative: ``.grad`` is as good as this times ``bound``, plus ``absolute``.
        scaled_by: What ``.grad`` is multiplied by.
        look: The look that has seen this ``.grad`` in this iteration.
        is_mixed: Whether gradients of several scales were added up: nothing divides the sum.
    """

    def __init__(self, rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        values = [rng.uniform(-2, 2) for _ in range(math.prod(shape))]
        self.tensor = torch.nn.Parameter(torch.tensor(values, dtype=dtype).view(shape))
        self.size, self.info = len(values), torch.finfo(dtype)
        self.tiny = self.info.smallest_normal * self.info.eps
        self.true: list[float] | None
        self.forget()

    def forget(self) -> None:
        """Drop the gradient."""
        self.tensor.grad = None
        self.begin(None, 1.0)

    def begin(self, true: list[float] | None, scaled_by: float) -> None:
        """Take over a new gradient."""
        self.true, self.scaled_by = true, scaled_by
        self.bound = [abs(entry) for entry in true or []]
        self.relative = 8 * max(self.info.eps, F32.eps) + SUBNORMAL * scaled_by
        self.absolute = 0.0
        self.look: Look | None = None
        self.is_in_doubt = self.is_mixed = False

    def add(self, true: list[float], scaled_by: float) -> None:
        """Add a gradient that ``.grad`` has been increased by."""
        if self.true is None:
            self.begin([0.0] * self.size, scaled_by)
        assert self.true is not None
        self.true = [a + b for a, b in zip(self.true, true, strict=True)]
        self.bound = [a + abs(b) for a, b in zip(self.bound, true, strict=True)]
        self.relative += max(self.info.eps, F32.eps)
        self.absolute += 2 * self.tiny / scaled_by
        for k, seen in enumerate(self.grad()):
            if math.isfinite(self.true[k]) and not math.isfinite(seen):
                assert self.bound[k] * scaled_by > 0.99 * self.info.max, "inf from nowhere"
                self.true[k] = seen

    def grad(self) -> list[float]:
        """Return ``.grad`` as it is."""
        values: list[float] = self.tensor.grad.view(-1).tolist()
        return values

    def is_usable(self) -> bool:
        """Whether all entries are finite and, unscaled, representable."""
        worst = max((abs(entry) for entry in self.true or []), default=0.0)
        if abs(worst / self.info.max - 1.0) < 4 * self.info.eps:
            raise BorderlineError
        return worst < self.info.max and not any(map(math.isnan, self.true or []))

    def multiply(self, factor: float, error: float) -> None:
        """Make another gradient the true one, as clipping does with a factor this good."""
        if factor != 1.0 and self.true is not None:
            self.true = [entry * factor for entry in self.true]
            self.bound = [entry * factor for entry in self.bound]
            self.relative += 1e-5 + error

    def check(self, seen: list[float], scaled_by: float) -> None:
        """Compare a gradient with the true one."""
        assert self.true is not None
        for entry, true, bound in zip(seen, self.true, self.bound, strict=True):
            if not abs(true) * scaled_by <= 0.99 * self.info.max:
                assert math.isfinite(true) or not math.isfinite(entry), "an inf or NaN has gone"
                continue
            slack = self.absolute + 2 * self.tiny * max(1.0, 1.0 / scaled_by)
            assert abs(entry / scaled_by - true) <= self.relative * bound + slack, (
                f"a gradient is {entry:g}, scaled by {scaled_by:g}; the true one is {true:g}"
            )

    def check_now(self) -> None:
        """Compare ``.grad``, and see that the parameter is finite."""
        assert all(map(math.isfinite, self.tensor.view(-1).tolist())), "a parameter is not finite"
        assert (self.tensor.grad is None) == (self.true is None), "a gradient came or went"
        if self.true is not None and not self.is_mixed:
            self.check(self.grad(), self.scaled_by)


def norm_of(params: list[Param]) -> float:
    """Return the norm of true gradients; inf if one of them is not finite, or no longer is."""
    entries = []
    for param in params:
        limit = param.info.max if param.scaled_by == 1.0 else F32.max**2
        entries += [abs(e) if abs(e) <= limit else math.inf for e in param.true or []]
    return math.hypot(*entries)


def clip_factor(params: list[Param], norm: float, max_norm: float) -> float:
    """Return what clipping multiplies by."""
    factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
    scale = max((param.scaled_by for param in params), default=1.0)
    if factor and scale / factor > 1e37:
        raise BorderlineError  # together they are one float32 number, and no normal one
    return factor


def clip(params: list[Param], factor: float) -> None:
    """Multiply true gradients; the factor is as good as the gradients it was made from."""
    error = max((max(4 * param.info.eps, param.relative) for param in params), default=0.0)
    for param in params:
        param.multiply(factor, error)


def f32(value: float) -> float:
    """Round to float32."""
    return float(torch.tensor(value, dtype=torch.float32))


# --- the model: optimizers ------------------------------------------------------------------------


class Opt:
    """An optimizer, and how far it has come in this iteration: scaled, unscaled, stepped."""

    def __init__(self, name: str, optimizer: Any, params: list[Param]) -> None:
        self.name, self.optimizer, self.params = name, optimizer, params
        self.is_fused = not isinstance(optimizer, Wrapper) and optimizer.defaults.get("fused")
        self.is_sgd = isinstance(getattr(optimizer, "inner", optimizer), torch.optim.SGD)
        self.begin()

    def begin(self) -> None:
        self.stage = "scaled"
        self.looks: list[Look] = []
        self.num_losses = 0  # scaled before the last call for it

    def shares(self, params: Iterable[Param]) -> bool:
        return not set(self.params).isdisjoint(params)

    def with_gradient(self) -> list[Param]:
        return [param for param in self.params if param.true is not None]

    @property
    def is_unscaled(self) -> bool:
        """Whether nothing scaled is to be added to its gradients: nobody could notice."""
        return self.stage != "stepped" and bool(self.looks)


# --- the model: the scaler ------------------------------------------------------------------------

SCHEDULES: list[Callable[[random.Random], Any]] = [
    lambda rng: Dynamic(
        rng.choice([2.0, 1.5, 1.0]),
        rng.choice([0.5, 0.25, 0.7, 1.0]),
        rng.randint(1, 4),
        trials=rng.choice([True, True, True, False]),
    ),
    lambda rng: Dynamic(growth_interval=rng.choice([1, 2, 3, 4, 9, 20])),
    lambda rng: Static(),
]
Start: TypeAlias = tuple[float, Any, float | None, float | None]


class World:
    """A scaler, optimizers and parameters, with the model beside them.

    Args:
        seed: Of everything that is drawn.
        swaps: Whether the scaler is replaced by a loaded or pickled one, where it could be.

    Attributes:
        state: That of the scale.
        on_device: Whether this scaler has scaled a loss.
        bad_loss: Whether a loss was not finite, until the scale has moved.
        went_bad: Whether a step was skipped because of what was written to unscaled gradients.
        num_losses: Number of losses scaled since the last ``update``.
        looks: What has been found since then.
        seen: What the optimizer that just stepped was about to use; None if it skipped.
    """

    def __init__(self, seed: int, swaps: bool = True) -> None:
        self.rng = rng = random.Random(seed)
        self.swaps = swaps
        self.log: list[str] = []
        self.uses_adam = rng.random() < 0.3
        self.largest = 1e36 if self.uses_adam else 3e38  # squares and sums in Adam overflow
        dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
        shapes = [(3,), (2, 2), (2,), (1,)]
        self.params = [Param(rng, shape, rng.choice(dtypes)) for shape in shapes]
        self.opts = self.make_optimizers()
        self.is_exploding = self.has_cadences = False
        self.seen: dict[Param, list[float]] | None = None
        self.schedule = rng.choice(SCHEDULES)(rng)
        self.on_skips = rng.choice(["raise", str, str])
        self.start = self.random_start()
        self.take(self.new_scaler(self.start), ScaleState.first(*self.start))
        self.state = self.first
        self.begin()

    def make_optimizers(self) -> list[Opt]:
        """Make two, which may share a parameter, and a wrapper of one of them."""
        rng, opts = self.rng, []
        for name, params in [("A", self.params[:2]), ("B", self.params[rng.choice([1, 2]) : 3])]:
            named = [(f"layer{k // 2}.{name}{k}", p.tensor) for k, p in enumerate(params)]
            cls = torch.optim.Adam if self.uses_adam and name == "A" else torch.optim.SGD
            kwargs = rng.choice([{"fused": True}, {"foreach": True}, {"foreach": False}])
            optimizer = cls(named, lr=LR, **kwargs)
            optimizer.register_step_pre_hook(self.about_to_step)
            opts.append(Opt(name, optimizer, params))
        inner = rng.choice(opts)
        return [*opts, Opt(f"wrapper of {inner.name}", Wrapper(inner.optimizer), inner.params)]

    def random_start(self) -> Start:
        rng = self.rng
        scale = rng.choice([2.0**16, 2.0**16, 2.0**4, 1.0, 1000.0, 2.0**-3, 0.3, 2.0**-10, 1e30])
        low = rng.choice([None, None, scale, min(scale, 2.0**-4), min(scale, 100.0)])
        high = rng.choice([None, None, max(scale, 2.0**18), scale])
        return scale, self.schedule, low, high

    def new_scaler(self, start: Start) -> GradScaler:
        scale, schedule, low, high = start
        kwargs: Any = {"max_consecutive_skips": 3, "on_skips": self.on_skips}
        return GradScaler(None, scale, schedule=schedule, min_scale=low, max_scale=high, **kwargs)

    def take(self, scaler: GradScaler, first: ScaleState) -> None:
        """Go on with a scaler that has not scaled anything yet, nor stepped an optimizer."""
        self.known: set[Opt] = set()
        self.scaler, self.first = scaler, first
        self.on_device = self.bad_loss = False
        self.num_losses = 0

    def begin(self) -> None:
        """Begin an iteration. Gradients may be left, but none that the scaler cannot know."""
        drops_all = self.rng.random() < (0.2 if self.has_cadences else 0.7)
        for param in self.params:
            param.is_in_doubt = False
            if drops_all or not self.is_known_unused(param):
                param.forget()
            param.look = None
        self.looks: list[Look] = []
        self.num_losses, self.bad_loss, self.went_bad = 0, False, False
        for opt in self.opts:
            opt.begin()

    def is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the step is one of the first, which are measured."""
        engine = self.scaler._engine
        memory = engine.journal.plans.get(id(optimizer))
        is_measuring = memory is None or memory.early_clipping.is_measuring
        return engine.loss_scale.state.scale != 1.0 and is_measuring

    def is_known_unused(self, param: Param) -> bool:
        """Say whether the scaler must know, as an iteration ends, that no step used a gradient."""
        opts = [opt for opt in self.opts if param in opt.params]
        if any(opt.stage == "stepped" and param.look in opt.looks for opt in opts):
            return False
        known = [opt for opt in opts if opt in self.known]
        return any(o.stage != "stepped" or o.num_losses != self.num_losses for o in known)

    def is_stale(self, param: Param) -> bool:
        """Say whether a gradient is not multiplied by the present scale."""
        is_other = param.look is None and param.scaled_by != self.state.scale
        return param.true is not None and (param.is_mixed or (is_other and any(param.grad())))

    @property
    def is_between(self) -> bool:
        """Whether nothing has been done to gradients since the last ``update``."""
        return not self.looks

    def require_scale(self) -> None:
        """Raise CallOrderError if no loss has been scaled."""
        if not self.on_device:
            raise CallOrderError

    def look_at(self, params: list[Param]) -> Look | None:
        """Look at gradients that are scaled; if there are any."""
        if not params:
            return None
        return Look(not all(param.is_usable() for param in params), params)

    def keep_look(self, look: Look) -> None:
        self.looks.append(look)
        for param in look.params:
            param.look = look

    def keep(self, opt: Opt | None, looks: list[Look], look: Look | None, stage: str) -> None:
        """Keep what was done for an optimizer, if there was anything to do."""
        if look is not None:
            self.keep_look(look)
            looks = [*looks, look]
        if opt is not None and looks:
            opt.looks, opt.stage, opt.num_losses = looks, stage, self.num_losses
            if stage == "stepped":
                self.known.add(opt)

    def unscaled(self, params: Iterable[Param]) -> None:
        for param in params:
            param.scaled_by = 1.0

    def gather(self, opt: Opt | None, params: list[Param]) -> tuple[list[Param], list[Look]]:
        """Return the gradients that are still scaled, and the looks at the others.

        If some have been unscaled with another optimizer, the others are unscaled now.
        """
        if any(self.is_stale(param) for param in params):
            raise CallOrderError
        if not (opt and opt.looks):
            self.require_scale()
        if any(param.is_in_doubt for param in params):
            raise CallOrderError
        if opt is not None and opt.stage != "scaled":
            return [], opt.looks
        params = [param for param in params if param.true is not None]
        looks = list(dict.fromkeys(param.look for param in params if param.look is not None))
        rest = [param for param in params if param.look is None]
        if not looks:
            return rest, []
        for look in looks:
            if look.left_scaled:
                look.left_scaled = False
                self.unscaled(param for param in look.params if param.look is look)
        if look_at_rest := self.look_at(rest):
            self.keep_look(look_at_rest)
            self.unscaled(rest)
            looks.append(look_at_rest)
        return [], looks

    def reason(self, found_inf: bool) -> Reason | None:
        """Return why a step is skipped."""
        if not found_inf:
            return None
        if self.bad_loss:
            return Reason.LOSS
        state = self.state
        is_last = state.reached_floor or state.scale <= state.min_scale
        return Reason.NON_FINITE if is_last else Reason.OVERFLOW

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare gradients and scales with the model."""
        for param in self.params:
            param.check_now()
        state = self.state
        assert self.scaler.get_scale() == state.scale
        assert F32.smallest_normal <= state.min_scale <= state.scale <= state.max_scale
        assert state.max_scale <= F32.max

    def check_saved(self) -> dict[str, Any]:
        """Compare the whole state with the model; return it."""
        saved = self.scaler.state_dict()
        # A count past a lowered interval becomes one that is just below it.
        tracker = min(self.state.growth_tracker, self.state.schedule.growth_interval - 1)
        assert saved == replace(self.state, growth_tracker=tracker).to_dict()
        return saved

    def refused(
        self, call: Callable[[], Any], errors: tuple[type[Exception], ...] = (CallOrderError,)
    ) -> None:
        """Make a call that must raise and change nothing."""
        saved, grads = self.scaler.state_dict(), [param.tensor.grad for param in self.params]
        try:
            call()
        except errors:
            pass
        else:
            raise AssertionError("a wrong call was not refused")
        assert self.scaler.state_dict() == saved
        for param, grad in zip(self.params, grads, strict=True):
            assert param.tensor.grad is grad

    def about_to_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note what an optimizer is about to use; called by it."""
        if self.is_exploding:
            raise BoomError
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or found_inf.item() != 1:
            grad_scale = getattr(optimizer, "grad_scale", None)
            by = 1.0 if grad_scale is None else grad_scale.item()
            params = next(opt for opt in self.opts if opt.optimizer is optimizer).with_gradient()
            self.seen = {param: [entry / by for entry in param.grad()] for param in params}

    @contextmanager
    def watching(self, opt: Opt) -> Iterator[None]:
        """Compare the parameters before and after a step with what the optimizer saw."""
        self.seen = None
        before = [(param, param.tensor.view(-1).tolist()) for param in opt.params]
        yield
        for param, old in before:
            new = param.tensor.view(-1).tolist()
            if self.seen is None or param not in self.seen:
                assert new == old, "a parameter changed without a step"
            elif opt.is_sgd:
                for a, b, g in zip(new, old, self.seen[param], strict=True):
                    tolerance = 4 * param.info.eps * (abs(b) + LR * abs(g)) + 1e-30
                    assert abs(a - (b - LR * g)) <= tolerance, "not what SGD does"

    def check_as_before(self, grads: list[tuple[Param, list[float]]], factor: float) -> None:
        """The gradients are those from before the call; by a plain step, up to rounding."""
        for param, before in grads:
            by = param.scaled_by / factor
            assert param.true is not None
            for k, (now, old) in enumerate(zip(param.grad(), before, strict=True)):
                tolerance = 3 * max(param.info.eps, F32.eps) + SUBNORMAL * by
                is_same = abs(now - old) <= tolerance * abs(old) + param.tiny * (1 + by)
                assert is_same or not (math.isfinite(now) or math.isfinite(old)), (
                    f"{old:g} is {now:g} after a step that was not taken"
                )
                if now != old and math.isfinite(old):
                    param.true[k] = now / param.scaled_by

    # --- losses and gradients ---------------------------------------------------------------------

    def weights(self, param: Param) -> list[float]:
        """Draw a true gradient, of numbers that every dtype can hold."""
        rng = self.rng
        huge = (90, 113 if self.uses_adam else 124)
        low, high = rng.choice([(-4, 4)] * 8 + [(-30, -20), (-140, -100), (20, 40), huge])
        factors = rng.choices([-3, -1, 0, 1, 2, 3], k=param.size)
        return [factor * 2.0 ** rng.randint(low, high) for factor in factors]

    def scale(self, outputs: Any) -> Any:
        """Call ``scale`` with tensors, or with a dict of them."""
        scaled = self.scaler.scale(outputs)
        self.on_device = True
        self.num_losses += 1
        tensors = outputs.values() if isinstance(outputs, dict) else outputs
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            self.bad_loss = True
        return scaled

    def backward(self, params: list[Param], bad: float = 0.0) -> None:
        """Scale a loss for each parameter, and go backward."""
        rng, scale = self.rng, self.state.scale
        for param in params:
            if self.is_stale(param) and rng.random() < 0.7:
                param.is_mixed = True
            elif param.look is not None or param.scaled_by != scale or self.is_stale(param):
                param.forget()
        weights = [self.weights(param) for param in params]
        has_bad_gradient = bad != 0.0 and rng.random() < 0.5
        if has_bad_gradient:
            weights[0][0] = bad
        self.log.append(f"scale(...).backward() {weights}, {bad=}")
        losses = [dot(param, w) for param, w in zip(params, weights, strict=True)]
        if bad and not has_bad_gradient:
            losses[0] = losses[0] + bad
        as_container: Any = rng.choice([tuple, list, lambda found: dict(enumerate(found))])
        scaled = self.scale(as_container(losses))
        for tensor in scaled.values() if isinstance(scaled, dict) else scaled:
            tensor.backward()
        for param, true in zip(params, weights, strict=True):
            param.add(true, scale)

    def op_backward(self) -> None:
        rng = self.rng
        done = {param for opt in self.opts if opt.is_unscaled for param in opt.params}
        params = [p for p in rng.sample(self.params, rng.randint(1, 4)) if p not in done]
        if params:
            self.backward(params, rng.choice([0.0] * 9 + [math.inf, -math.inf, math.nan]))

    def op_scale_only(self) -> None:
        value = self.rng.choice([1.0, 1.0, math.inf, math.nan])
        self.log.append(f"scale({value})")
        scaled = self.scale([torch.tensor([value, 1.0])])
        assert scaled[0][1].item() == self.state.scale

    def op_inject(self) -> None:
        params = [p for p in self.params if p.true is not None and p.look is None]
        # What is written to a gradient of another scale is the user's.
        params = [p for p in params if p.scaled_by == self.state.scale and not p.is_mixed]
        bad = [math.inf, -math.inf, math.nan]
        values = [*bad, self.largest, -self.largest, 1e-40, 1e-45, 0.0]
        if params:
            self.inject(self.rng.choice(params), self.rng.choice(values))

    def inject(self, param: Param, value: float) -> None:
        """Write an entry of ``.grad``."""
        entry = self.rng.randrange(param.size)
        self.log.append(f"inject {value} into parameter {self.params.index(param)}")
        param.tensor.grad.view(-1)[entry] = value
        param.true[entry] = param.grad()[entry] / param.scaled_by
        param.bound[entry] = abs(param.true[entry])

    def op_write(self) -> None:
        """Write to a gradient after it was unscaled."""
        params = [p for p in self.params if p.true is not None and p.look is not None]
        params = [p for p in params if p.scaled_by == 1.0 and not (p.is_mixed or p.is_in_doubt)]
        if params:
            values = [math.inf, math.nan, self.largest, 0.0]
            self.inject(self.rng.choice(params), self.rng.choice(values))

    def op_zero_grad(self) -> None:
        opt, set_to_none = self.rng.choice(self.opts), self.rng.random() < 0.7
        self.log.append(f"{opt.name}.zero_grad({set_to_none})")
        opt.optimizer.zero_grad(set_to_none)
        for param in opt.with_gradient():
            if set_to_none:
                param.forget()
            else:
                param.true, param.bound = [0.0] * param.size, [0.0] * param.size
                param.is_mixed = False

    def op_unscale(self) -> None:
        self.unscale(self.rng.choice(self.opts))

    def unscale(self, opt: Opt) -> None:
        self.log.append(f"unscale_({opt.name})")
        try:
            if opt.stage != "scaled":
                raise CallOrderError
            scaled, looks = self.gather(opt, opt.params)
        except CallOrderError:
            self.refused(lambda: self.scaler.unscale_(opt.optimizer))
            return
        look = self.look_at(scaled)
        self.scaler.unscale_(opt.optimizer)
        self.unscaled(scaled)
        self.keep(opt, looks, look, "unscaled")

    def op_torch_clip(self) -> None:
        """PyTorch's own clipping: of unscaled gradients, or, a mistake, of scaled ones."""
        opt, max_norm = self.rng.choice(self.opts), self.rng.choice([0.1, 1.0, 1e4])
        params = opt.with_gradient()
        entries = [abs(entry) for param in params for entry in param.grad()]
        if not all(entry < 1e15 for entry in entries) or not any(entries):
            return
        if any(self.is_stale(param) for param in params):
            return
        self.log.append(f"torch's clip_grad_norm_({opt.name}, {max_norm})")
        torch.nn.utils.clip_grad_norm_([param.tensor for param in params], max_norm)
        clip(params, min(1.0, max_norm / (math.hypot(*entries) + 1e-6)))

    # --- steps ------------------------------------------------------------------------------------

    def op_step(self) -> None:
        max_norm = self.rng.choice([None, None, None, 0.5, 100.0, math.inf])
        self.step(self.rng.choice(self.opts), max_norm, explodes=self.rng.random() < 0.05)

    def step(self, opt: Opt, max_norm: float | None = None, explodes: bool = False) -> None:
        self.log.append(f"step({opt.name}, max_norm={max_norm}), {explodes=}")

        def call() -> None:
            assert self.scaler.step(opt.optimizer, max_norm=max_norm) is None

        before = [(p, p.grad(), p.scaled_by, p.true) for p in opt.with_gradient()]
        try:
            if opt.stage == "stepped" or (opt.stage == "scaled" and not before):
                raise CallOrderError
            scaled, looks = self.gather(opt, opt.params)
        except CallOrderError:
            self.refused(call)
            return
        untouched = [(p, grad) for p, grad, *was in before if was == [p.scaled_by, p.true]]
        params, look = opt.with_gradient(), self.look_at(scaled)
        found_inf = any(found.found_inf for found in (*looks, look) if found)
        norm = norm_of(params)
        factor = 1.0 if max_norm is None else clip_factor(params, norm, max_norm)
        unscaled = [param for param in params if param not in scaled]
        went_bad = not (found_inf or all(param.is_usable() for param in unscaled))
        is_taken = not (found_inf or went_bad)
        self.is_exploding = explodes = explodes and bool(is_taken or opt.is_fused)
        is_measured = max_norm is not None
        is_measured |= self.is_first(opt.optimizer) and look is not None and not looks
        with self.watching(opt):
            if not explodes:
                call()
            else:
                with pytest.raises(BoomError):
                    call()
        self.is_exploding = False
        if explodes and opt.is_fused:
            self.check_as_before(untouched, 1.0)
        if explodes and opt.is_fused and look is not None:
            for param in scaled:  # without norms nobody knows that nothing was changed
                param.is_in_doubt = not is_measured
            return
        if explodes:
            clip(params, 1.0 if opt.is_fused else factor)
            self.unscaled(scaled)
            self.keep(opt, looks, look, "unscaled")
            return
        assert (self.seen is not None) == is_taken, f"taken: {not is_taken}, should: {is_taken}"
        if is_taken:
            clip(params, factor)
            self.unscaled(scaled)
            for param, seen in (self.seen or {}).items():
                param.check(seen, 1.0)
        else:
            self.check_as_before(untouched, 1.0)
            if look is not None:
                look.left_scaled = True
        self.keep(opt, looks, look, "stepped")
        self.went_bad |= went_bad
        outcome = self.scaler.outcome(opt.optimizer)
        assert (outcome.taken, outcome.scale) == (is_taken, self.state.scale)
        assert outcome.reason == (Reason.AFTER_UNSCALE if went_bad else self.reason(found_inf))
        measured = self.scaler.history()[-1].norm
        if measured < 1e37:  # not NaN: it was measured
            assert measured == pytest.approx(norm, rel=0.02, abs=1e-12)

    def op_closure(self) -> None:
        rng = self.rng
        opt = rng.choice(self.opts)
        others = [other for other in self.opts if other.shares(opt.params)]
        if any(o.is_unscaled for o in others):
            return
        if opt.stage == "stepped":
            self.refused(lambda: self.scaler.step(opt.optimizer, lambda: torch.ones(())))
            return
        params = rng.sample(opt.params, rng.randint(1, len(opt.params)))
        weights = [self.weights(param) for param in params]
        weights[0][0] = rng.choice([weights[0][0]] * 4 + [math.inf])
        max_norm = rng.choice([None, None, 0.5, math.inf])
        self.log.append(f"step({opt.name}, closure, max_norm={max_norm}) {weights}")

        def closure() -> Tensor:
            total = torch.stack([dot(p, w) for p, w in zip(params, weights, strict=True)]).sum()
            if not bool(total.isfinite()):
                self.bad_loss = True
            self.scaler.scale(total).backward()
            return total

        scale = self.state.scale
        finite = [abs(entry) for true in weights for entry in true if math.isfinite(entry)]
        if max(finite) * max(scale, 1 / scale) > 1e37:
            return
        for param in opt.params:
            param.forget()
        before = [param.tensor.tolist() for param in opt.params]
        can_amplify = self.scaler._engine.loss_scale.can_amplify
        is_divided_later = max_norm is not None or self.is_first(opt.optimizer) or can_amplify
        self.scaler.step(opt.optimizer, closure, max_norm=max_norm)
        self.on_device = True
        self.num_losses += 1
        for param, true in zip(params, weights, strict=True):
            param.begin(true, 1.0)
            param.absolute = 2 * param.tiny / scale
        look = self.look_at(params)
        assert self.scaler.outcome(opt.optimizer).taken == (not look.found_inf)
        if look.found_inf:
            assert [param.tensor.tolist() for param in opt.params] == before
            if is_divided_later:  # and left as they were
                look.left_scaled = True
                for param in params:
                    param.scaled_by = scale
        elif max_norm is not None:
            clip(params, clip_factor(params, norm_of(params), max_norm))
        self.keep(opt, [], look, "stepped")

    def op_retry(self) -> None:
        opt, times, num_bad = self.rng.choice(self.opts), *self.rng.choices(range(4), k=2)
        if not self.is_between:
            return
        self.log.append(f"retry({opt.name}, {times})")
        is_over = False
        for attempt in self.scaler.retry(opt.optimizer, times):
            assert not is_over, "retry() goes on though nothing can help"
            self.drop_all()
            self.backward(opt.params[:1])
            if attempt < num_bad:
                self.inject(opt.params[0], math.inf)
            before = self.state.scale
            self.step(opt)
            reason = self.scaler.outcome(opt.optimizer).reason
            self.op_update()
            is_over = attempt == times or reason not in (Reason.OVERFLOW, Reason.LOSS)
            is_over |= self.state.scale >= before
            if not is_over:  # and then it calls zero_grad
                for param in opt.params:
                    param.true = None
        assert is_over, "retry() stopped early"

    def drop_all(self) -> None:
        for param in self.params:
            param.forget()

    def op_iteration(self) -> None:
        """The plain loop, so that runs of steps are reached."""
        if self.looks:
            self.op_update()
        if self.is_between:
            self.iteration(self.rng.choice(self.opts), self.rng.choice([None, None, math.inf]))

    def op_usual_iterations(self) -> None:
        """So many that steps are usual ones, which are counted."""
        if self.looks:
            self.op_update()
        opt = self.rng.choice(self.opts)
        after_unscale = [self.op_write, self.op_torch_clip, self.op_inject, self.op_look]
        unscales = self.rng.choice([[], [lambda: self.unscale(opt)]])
        for _ in range(self.rng.randint(5, 12) if self.is_between else 0):
            more = [self.rng.choice(after_unscale)] if unscales and self.rng.random() < 0.3 else []
            self.iteration(opt, self.rng.choice([None] * 9 + [math.inf]), [*unscales, *more])

    def op_cadences(self) -> None:
        """One optimizer steps in every iteration, another one accumulates over them."""
        if self.looks:
            self.op_update()
        if not self.is_between:
            return
        often, rarely = self.rng.sample(self.opts, 2)
        self.has_cadences = True
        for _ in range(self.rng.randint(1, 3)):
            self.backward([*dict.fromkeys([*often.params, *rarely.params])])
            self.step(often)
            self.op_update()
        self.has_cadences = False
        self.step(rarely)

    def iteration(
        self, opt: Opt, bad: float | None = None, between: Iterable[Callable[[], None]] = ()
    ) -> None:
        self.drop_all()
        self.backward(opt.params)
        if bad is not None:
            self.inject(opt.params[0], bad)
        for operation in between:
            operation()
        self.step(opt, self.rng.choice([None, None, 0.5, math.inf]))
        self.op_update()

    def op_run_of_nan(self) -> None:
        """Once the floor was tried in vain, the scale is where the run began."""
        if not self.is_between or self.num_losses:
            return
        opt = self.rng.choice(self.opts)
        for _ in range(self.rng.randint(5, 20)):
            self.iteration(opt, math.nan)
        run = self.state
        self.iteration(opt)
        if run.reached_floor and not self.state.skipped_in_a_row:
            assert self.state.scale >= run.run_scale

    # --- the end of an iteration, and settings ----------------------------------------------------

    def op_update(self) -> None:
        self.log.append("update()")
        if not self.looks:
            self.refused(self.scaler.update)
            return
        found_inf = any(look.found_inf for look in self.looks)
        self.state = next_state(
            self.state,
            found_inf=found_inf,
            loss_is_finite=not self.bad_loss,
            went_bad=self.went_bad,
        )
        try:
            self.scaler.update()
        except SkippedStepsError:
            assert found_inf or self.went_bad
            assert self.on_skips == "raise"
        self.check_saved()
        self.begin()

    def op_new_scale(self) -> None:
        rng = self.rng
        value = rng.choice([2.0**16, 1.0, 0.3, 2.0**-10, 1000.0, 1e30])
        bad = rng.choice([0.0, -1.0, math.inf, math.nan, 1e-45])
        new = rng.choice([value, torch.tensor([value]), torch.tensor(value).double(), None])
        is_bad, new = new is None, torch.tensor(bad) if new is None else new
        self.log.append(f"update({new})")
        if isinstance(new, Tensor) and not self.on_device:
            self.refused(lambda: self.scaler.update(new))
            return
        self.scaler.update(new)
        if not is_bad:
            self.state = self.state.with_scale(value)
        self.check_saved()
        self.begin()

    def op_setter(self) -> None:
        rng = self.rng
        values: dict[str, list[Any]] = {
            "growth_factor": [1.0, 1.5, 2.0, 4.0],
            "backoff_factor": [0.25, 0.5, 0.9, 1.0],
            "growth_interval": [1, 2, 3, 5],
        }
        key = rng.choice(list(values))
        value = rng.choice(values[key])
        self.log.append(f"set_{key}({value})")
        set_it = getattr(self.scaler, f"set_{key}")
        if isinstance(self.schedule, Static):
            self.refused(lambda: set_it(value), (ValueError,))
            return
        set_it(value)
        self.schedule = replace(self.schedule, **{key: value})
        self.first = replace(self.first, schedule=self.schedule)
        tracker = min(self.state.growth_tracker, self.schedule.growth_interval - 1)
        self.state = replace(self.state, schedule=self.schedule, growth_tracker=tracker)
        self.check_saved()

    # --- saving, looking, and wrong calls ---------------------------------------------------------

    def op_swap(self) -> None:
        """Between iterations: go on with a copy, or with a new scaler and what was saved."""
        if not self.is_between or self.num_losses:
            return
        how = self.rng.choice(["load", "load into another", "pickle", "deepcopy", "same"])
        other = self.random_start() if how == "load into another" else self.start
        self.log.append(f"swap: {how}")
        saved = json.loads(json.dumps(self.check_saved()))
        scaler, first = self.scaler, self.first
        if how == "same":
            scaler.load_state_dict(saved)
        elif self.swaps and how == "pickle":
            scaler = pickle.loads(pickle.dumps(scaler))
        elif self.swaps and how == "deepcopy":
            scaler = copy.deepcopy(scaler)
        elif self.swaps:
            scaler, first = self.new_scaler(other), ScaleState.first(*other)
            scaler.load_state_dict(saved)
            first = replace(first, schedule=self.schedule)
        self.drop_all()
        self.take(scaler, first)
        self.scale([torch.ones(())])
        self.check_saved()

    def op_copy_now(self) -> None:
        """A copy is refused within an iteration; ``state_dict`` never is."""
        make: Any = self.rng.choice([copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
        self.log.append("copy")
        saved = self.check_saved()
        if self.is_between:
            assert make(self.scaler).state_dict() == saved
        else:
            self.refused(lambda: make(self.scaler))

    def op_load_now(self) -> None:
        """Loading its own state changes nothing but that the losses so far count as good."""
        self.log.append("load its own state")
        self.scaler.load_state_dict(self.check_saved())
        self.bad_loss = False
        self.check_saved()

    def op_look(self) -> None:
        scaler, state = self.scaler, self.state
        self.log.append("look")
        counts = scaler.counts()
        assert (counts.taken, counts.skipped) == (state.num_taken, state.num_skipped)
        assert counts.skipped_in_a_row == state.skipped_in_a_row
        assert f"scale={power(state.scale)}, " in repr(scaler)
        assert scaler.get_growth_interval() == self.schedule.growth_interval
        assert scaler.get_growth_factor() == self.schedule.growth_factor
        assert scaler.get_backoff_factor() == self.schedule.backoff_factor
        assert all(entry.taken == (entry.reason is None) for entry in scaler.history()[-3:])

    def op_wrong(self) -> None:
        scaler: Any = self.scaler
        saved, one = scaler.state_dict(), torch.ones(())
        optimizer = self.rng.choice(self.opts).optimizer
        calls: list[Callable[[], Any]] = [
            lambda: scaler.scale("loss"),
            lambda: scaler.scale([None, one]),
            lambda: scaler.scale({"a": {"b": 1.0}}),
            *(lambda b=bad: scaler.step(optimizer, max_norm=b) for bad in [-1.0, math.nan, "1"]),
            *(lambda bad=bad: scaler.update(bad) for bad in [0.0, -3, math.nan, "x", True, 1e39]),
            lambda: scaler.update(torch.ones(2)),
            lambda: scaler.update(torch.ones(1, dtype=torch.complex64)),
            lambda: scaler.update(torch.ones((), requires_grad=True)),
            *(lambda bad=bad: scaler.set_growth_factor(bad) for bad in [0.5, math.nan, True]),
            *(lambda bad=bad: scaler.set_backoff_factor(bad) for bad in [0.0, 1.5, math.inf]),
            *(lambda bad=bad: scaler.set_growth_interval(bad) for bad in [0, 1.5, True, 2**31]),
            lambda: scaler.load_state_dict({"scale": 1.0}),
            lambda: scaler.load_state_dict(saved | {"scale": 0.0}),
            lambda: scaler.load_state_dict(saved | {"_growth_tracker": -1}),
            lambda: scaler.load_state_dict(saved | {"halfstep": '{"version": 99}'}),
            lambda: scaler.outcome(torch.optim.SGD([torch.nn.Parameter(one)])),
            lambda: list(scaler.retry(optimizer, times=1)),
            self.step_in_float16,
        ]
        choice = self.rng.randrange(len(calls))
        self.log.append(f"wrong call {choice}")
        self.refused(calls[choice], (CallOrderError, ValueError, TypeError))

    def step_in_float16(self) -> None:
        """An optimizer with a float16 parameter, and maybe one of which others know."""
        half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        half.grad = grad = torch.full_like(half, 2.0**-20)
        shared = [p.tensor for p in self.params[:1] if p.look and not p.look.left_scaled]
        optimizer = torch.optim.SGD([half, *shared])
        scaler = self.scaler
        try:
            self.rng.choice([scaler.unscale_, scaler.step])(optimizer)
        finally:
            assert bool(grad.eq(2.0**-20).all())


def dot(param: Param, weights: list[float]) -> Tensor:
    """Return a loss with this gradient."""
    factors = torch.tensor(weights, dtype=param.tensor.dtype).view(param.tensor.shape)
    return (param.tensor * factors).sum()


OPERATIONS = {
    World.op_backward: 14.0,
    World.op_scale_only: 1.0,
    World.op_inject: 3.0,
    World.op_write: 2.0,
    World.op_zero_grad: 1.0,
    World.op_unscale: 4.0,
    World.op_torch_clip: 6.0,
    World.op_step: 12.0,
    World.op_closure: 2.0,
    World.op_retry: 1.0,
    World.op_iteration: 5.0,
    World.op_usual_iterations: 3.0,
    World.op_cadences: 1.0,
    World.op_run_of_nan: 0.4,
    World.op_update: 9.0,
    World.op_new_scale: 1.0,
    World.op_setter: 1.0,
    World.op_swap: 1.5,
    World.op_copy_now: 1.0,
    World.op_load_now: 0.5,
    World.op_look: 1.0,
    World.op_wrong: 3.0,
}


def run_sequence(seed: int, swaps: bool = True) -> World | None:
    """Run one sequence; return its end, None if rounding would have decided."""
    world = World(seed, swaps)
    try:
        for operation in world.rng.choices(
            [*OPERATIONS], [*OPERATIONS.values()], k=world.rng.randint(5, NUM_CALLS)
        ):
            operation(world)
            world.check()
        world.check_saved()
    except BorderlineError:
        return None
    except Exception as error:
        calls = "\n  ".join([repr(world.scaler), *world.log])
        raise AssertionError(
            f"seed {seed}: {type(error).__name__}: {error}\n  {calls}\n"
            f"again: HALFSTEP_FUZZ=1 HALFSTEP_FUZZ_SEED={seed} pytest {__file__}"
        ) from error
    return world


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_sequences(part: int) -> None:
    for seed in range(FIRST_SEED + part, FIRST_SEED + NUM_SEQUENCES, NUM_PARTS):
        world = run_sequence(seed)
        if world is not None and seed % 10 == 0:
            continued = run_sequence(seed, swaps=False)
            assert world.state == continued.state, f"seed {seed}"
            for mine, other in zip(world.params, continued.params, strict=True):
                assert torch.equal(mine.tensor, other.tensor), f"seed {seed}"
