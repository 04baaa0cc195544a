"""How often the gradients are read and written, and how often the host waits for a device.

G is one read, or one write, of all gradients. What counts are the bytes of storages that belong to
gradients. Scratch memory does not count: it is of bounded size, and is still in the cache when it
is read. Nor does what an optimizer does in its own step.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from tests.device import DEVICE, seeded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep._gradients import gradients as norms
from halfstep._scaler import GradScaler
from halfstep._scaler import step as step_module
from halfstep._scaler.clipping import MAX_STEPS
from halfstep._scaler.device_scale import DeviceScale
from halfstep.errors import CallOrderError

SHAPES = [(300, 400), (7,), (), (64, 64), (64, 64), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16]
SCALE = 2.0**10
WARM_UP = 4
"""In the first three steps of an optimizer the scaler also looks for gradients clipped too early"""

WRITES_ONLY = {"copy_", "fill_", "zero_"}
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero"}


class Ops(TorchDispatchMode):
    """Adds up the bytes of gradients that ops read and write, and lists the ops that wait."""

    def __init__(self, grads: list[torch.Tensor]) -> None:
        super().__init__()
        self.grads = {grad.untyped_storage()._cdata for grad in grads}
        self.size = sum(grad.nbytes for grad in grads)
        self.moved = 0
        self.names: list[str] = []
        self.is_paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_paused:
            self.count(function, args, kwargs)
        return function(*args, **kwargs)

    def count(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        schema = function._schema
        name = schema.name.split("::")[1]
        self.names.append(name)
        returned = schema.returns[0].alias_info if schema.returns else None
        if returned is not None and not returned.is_write:
            return  # a view
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            is_read = not (is_written and (name in WRITES_ONLY or argument.is_out))
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and self.is_gradient(leaf):
                    self.moved += leaf.nbytes * (is_read + is_written)

    def is_gradient(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.grads

    @property
    def passes(self) -> Fraction:
        """In units of G."""
        return Fraction(self.moved, self.size)

    @property
    def num_waits(self) -> int:
        return sum(name in WAITS for name in self.names)


@dataclass
class Setup:
    scaler: Any
    optimizer: torch.optim.Optimizer
    params: list[torch.nn.Parameter]

    def backward(self) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        loss = sum((param.float() * 0.1 * (k + 1)).sum() for k, param in enumerate(self.params))
        self.scaler.scale(loss).backward()
        return [param.grad for param in self.params]

    @contextmanager
    def counted(self) -> Iterator[Ops]:
        """Counts between backward and the optimizer's own work, and after it."""
        with Ops(self.backward()) as ops:
            hooks = [
                self.optimizer.register_step_pre_hook(lambda *_: setattr(ops, "is_paused", True)),
                self.optimizer.register_step_post_hook(lambda *_: setattr(ops, "is_paused", False)),
            ]
            yield ops
        for hook in hooks:
            hook.remove()


def setup(make_scaler: Callable[..., Any], *, fused: bool, **kwargs: Any) -> Setup:
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape).to(dtype)) for dtype in DTYPES for shape in SHAPES
    ]
    optimizer = torch.optim.SGD(params, lr=1e-3, fused=fused)
    made = Setup(make_scaler(DEVICE, init_scale=SCALE, **kwargs), optimizer, params)
    for _ in range(WARM_UP):
        made.backward()
        made.scaler.step(optimizer)
        made.scaler.update()
    return made


def no_clip(setup: Setup) -> None:
    setup.scaler.step(setup.optimizer)


def clip_in_step(setup: Setup) -> None:
    setup.scaler.step(setup.optimizer, max_norm=1.0)


def clip_with_torch(setup: Setup) -> None:
    setup.scaler.unscale_(setup.optimizer)
    torch.nn.utils.clip_grad_norm_(setup.params, 1.0, foreach=True)
    setup.scaler.step(setup.optimizer)


# --- passes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused", "step", "passes"),
    [
        (False, no_clip, 2),
        (False, clip_in_step, 3),
        (False, clip_with_torch, 5),
        (True, no_clip, 2),
        (True, clip_in_step, 1),
    ],
)
def test_passes(fused: bool, step: Callable[[Setup], None], passes: int) -> None:
    made = setup(GradScaler, fused=fused)
    with made.counted() as ops:
        step(made)
        made.scaler.update()
    assert ops.passes == passes
    assert made.scaler.outcome(made.optimizer).taken


@pytest.mark.parametrize(
    ("fused", "step", "passes"),
    [
        (False, no_clip, 2),
        (False, clip_with_torch, 5),
        (True, no_clip, 2),  # reads, multiplies by 1, and writes
        (True, clip_with_torch, 5),
    ],
)
def test_passes_of_torch(fused: bool, step: Callable[[Setup], None], passes: int) -> None:
    made = setup(torch.amp.GradScaler, fused=fused)
    with made.counted() as ops:
        step(made)
        made.scaler.update()
    assert ops.passes == passes


@pytest.mark.parametrize(
    "entries",
    [[torch.ones(64)] * 300, [torch.ones(1 << 20, dtype=torch.float16)], [torch.ones(1 << 18)]],
)
def test_gradients_that_are_slow_to_measure_are_checked_in_place(entries):
    params = [torch.nn.Parameter(each.clone()) for each in entries]
    made = Setup(GradScaler(DEVICE, SCALE), torch.optim.SGD(params, lr=1e-3, fused=True), params)
    for _ in range(WARM_UP):
        with made.counted() as ops:
            no_clip(made)
        made.scaler.update()
    assert ops.passes == 2
    outcome = made.scaler.outcome(made.optimizer)
    if entries[0].dtype is torch.float16:  # unscaled, what is small may be gone
        with pytest.raises(CallOrderError, match="let step\\(\\) measure them"):
            _ = outcome.norm
    else:
        exact = math.sqrt(sum(param.grad.double().square().sum().item() for param in params))
        assert outcome.norm == pytest.approx(exact, rel=1e-5)

    with made.counted() as ops:
        params[0].grad[0] = math.inf
        no_clip(made)
    outcome = made.scaler.outcome(made.optimizer)
    assert outcome.skipped
    assert outcome.culprits == ["param_groups[0]['params'][0]"]
    assert params[0].grad[1] == pytest.approx(0.1 * SCALE, rel=1e-3)  # as it was
    rest = list(outcome.norms.values())[1:]
    assert rest == pytest.approx([p.grad.norm().item() / SCALE for p in params[1:]])


@pytest.mark.parametrize(
    ("fused", "step", "passes"),
    # A plain step finds out when it has divided, and multiplies again; else nothing was changed.
    [(False, no_clip, 4), (False, clip_in_step, 1), (True, no_clip, 2), (True, clip_in_step, 1)],
)
def test_passes_of_a_skipped_step(fused: bool, step: Callable[[Setup], None], passes: int) -> None:
    made = setup(GradScaler, fused=fused)
    with made.counted() as ops:
        made.params[0].grad[0, 0] = math.inf
        ops.moved = 0
        step(made)
        made.scaler.update()
    # On a CPU the norm reads the rows with inf again, in float64.
    assert passes <= ops.passes < passes + 1
    assert made.scaler.outcome(made.optimizer).skipped


@pytest.mark.parametrize(
    ("kwargs", "fused", "passes"),
    [
        # A scale below 1 makes gradients larger: what comes out has to be looked at, too, if the
        # scale may be there in a few steps.
        ({"min_scale": 0.5, "backoff_factor": 2.0**-6}, False, 5),
        ({"min_scale": 0.5, "backoff_factor": 2.0**-6}, True, 3),
        ({"min_scale": 0.5}, False, 2),
        ({"min_scale": 0.5}, True, 2),
    ],
)
def test_passes_of_what_costs_one_more(kwargs: dict[str, Any], fused: bool, passes: int) -> None:
    made = setup(GradScaler, fused=fused, **kwargs)
    with made.counted() as ops:
        no_clip(made)
        made.scaler.update()
    assert ops.passes == passes


class WithOwnScale(GradScaler):
    def get_scale(self) -> float:
        return super().get_scale()


@pytest.mark.parametrize(
    ("make_scaler", "step"),
    [(cls, each) for cls in (GradScaler, WithOwnScale) for each in (no_clip, clip_with_torch)],
)
def test_only_the_first_steps_are_searched(make_scaler, step, monkeypatch):
    measured, largest = [], step_module.largest
    monkeypatch.setattr(step_module, "largest", lambda *a: measured.append(a) or largest(*a))
    made = setup(make_scaler, fused=False)
    made.scaler._engine.journal.plans.clear()
    del measured[:]
    for _ in range(8):
        made.backward()
        step(made)
        made.scaler.update()
    assert len(measured) <= MAX_STEPS


@pytest.mark.parametrize("fused", [False, True])
def test_looking_at_what_was_measured_reads_nothing(fused: bool) -> None:
    made = setup(GradScaler, fused=fused)
    with made.counted() as ops:
        clip_in_step(made)
        made.scaler.update()
        before = ops.passes
        outcome = made.scaler.outcome(made.optimizer)
        assert outcome.norm > 0
        assert len(outcome.norms) == len(made.params)
    assert ops.passes == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shapes", [SHAPES, [(norms.SMALL + 1,), (2, (1 << 20) + 5), (3, 5, 7)]], ids=["small", "large"]
)
def test_the_norm_reads_every_gradient_once(shapes, dtype):
    grads = [torch.ones(shape, dtype=dtype) for shape in shapes]
    grads += [grad.t() for grad in grads if grad.dim() == 2]
    with Ops(grads) as ops:
        norms.sums_of_squares(grads)
    # A sum of squares of float64 may overflow; on a device nobody waits to see whether it did.
    reads = 2 if dtype is torch.float64 and DEVICE != "cpu" else 1
    assert ops.moved == reads * sum(grad.nbytes for grad in grads)


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("waiting_device")
@pytest.mark.parametrize("step", [no_clip, clip_in_step])
def test_a_fused_step_never_waits(step: Callable[[Setup], None]) -> None:
    made = setup(GradScaler, fused=True)
    for value in (1.0, math.inf, 1.0):
        with made.counted() as ops:
            made.params[0].grad.mul_(value)
            step(made)
            made.scaler.update()
            outcome = made.scaler.outcome(made.optimizer)
        assert ops.num_waits == 0
        assert outcome.taken == math.isfinite(value)
    assert len(made.scaler.history()) == WARM_UP + 3


@pytest.mark.parametrize("step", [no_clip, clip_in_step, clip_with_torch])
@pytest.mark.parametrize("value", [1.0, math.inf])
@pytest.mark.usefixtures("waiting_device")
def test_a_plain_step_waits_once(step, value, monkeypatch):
    made = setup(GradScaler, fused=False)
    reads, read = [], DeviceScale.read_with
    monkeypatch.setattr(DeviceScale, "read_with", lambda *args: reads.append(args) or read(*args))
    with made.counted() as ops:
        made.params[0].grad.mul_(value)
        step(made)
        made.scaler.update()
        made.scaler.outcome(made.optimizer)
    assert len(reads) == 1
    assert ops.num_waits == 0  # beside it


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("waiting_device")
def test_nothing_but_the_step_waits(fused: bool) -> None:
    made = setup(GradScaler, fused=fused)
    with Ops([]) as ops:
        made.scaler.scale(torch.ones(3))
        made.scaler.unscale_(made.optimizer)
        made.scaler.update(4.0)
    assert ops.num_waits == 0


# --- what fused optimizers do with the scale (on the CPU here) ------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **kind: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kind),
    "adam": lambda p, **kind: torch.optim.Adam(p, lr=0.1, **kind),
    "adamw": lambda p, **kind: torch.optim.AdamW(p, lr=0.1, **kind),
    "adagrad": lambda p, **kind: torch.optim.Adagrad(p, lr=0.1, **kind),
}
makers = pytest.mark.parametrize("maker", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
ODD_SCALE = 1000.0


def make_params() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 7)), torch.nn.Parameter(torch.randn(9))]


def make_grads(seed: int) -> list[torch.Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator) for shape in ((5, 7), (9,))]


assert_close = partial(torch.testing.assert_close, rtol=2e-5, atol=1e-7)


@makers
def test_fused_optimizers_take_scale_and_clipping_as_one_number(maker: Any) -> None:
    ours, theirs = make_params(), make_params()
    fused, plain = maker(ours, fused=True), maker(theirs, foreach=False)
    for seed, (scale, coefficient) in enumerate([(1024.0, 0.3), (1000.0, 1.0), (3.0, 0.01)]):
        for mine, other, grad in zip(ours, theirs, make_grads(seed), strict=True):
            mine.grad, other.grad = grad * scale, grad * coefficient
        fused.grad_scale = torch.tensor(scale / coefficient)
        fused.found_inf = torch.tensor(0.0)
        fused.step()
        plain.step()
        assert_close(ours, theirs)
        assert_close([param.grad for param in ours], [param.grad for param in theirs])


@makers
def test_fused_optimizers_skip_on_the_device(maker: Any) -> None:
    params = make_params()
    optimizer = maker(params, fused=True)
    for is_skipped in (False, True):
        for param, grad in zip(params, make_grads(1), strict=True):
            param.grad = grad.clone()
        before = [param.detach().clone() for param in params]
        state = {
            id(param): {k: v.clone() for k, v in values.items()}
            for param, values in optimizer.state.items()
        }
        optimizer.grad_scale = torch.tensor(ODD_SCALE)
        optimizer.found_inf = torch.tensor(float(is_skipped))
        optimizer.step()
    for param, grad, old in zip(params, make_grads(1), before, strict=True):
        assert torch.equal(param, old)
        assert torch.equal(param.grad, grad)
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, state[id(param)][key])
