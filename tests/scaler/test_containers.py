"""Containers of optimizers: one decision for all that they hold, and each gradient divided once.

The kinds are those that training code has: with groups of their own or without, as a list, a
dictionary or lists of lists, with PyTorch's base class or none.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.device import seeded
from tests.scaler.containers import KINDS, Bare, Chained, Facade, OfFirst, Parts, Twice
from tests.scaler.test_protocol import CountItems
from tests.training import assert_same, closure_of, fused_or_not, mlp
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import GradScaler
from halfstep._scaler.device_scale import DeviceScale
from halfstep.errors import CallOrderError, NothingCheckedError

SCALE = 2.0**10


kinds = pytest.mark.parametrize("kind", KINDS)


# --- what they train ------------------------------------------------------------------------------


def make_optimizers(model: nn.Sequential, fused: bool = False) -> list[Any]:
    return [
        SGD(model[0].parameters(), lr=0.1, momentum=0.9, fused=fused),
        AdamW(model[2].parameters(), lr=0.01, fused=fused),
    ]


def contained(
    kind: Any, fused: bool = False, **options: Any
) -> tuple[nn.Sequential, Any, GradScaler]:
    model = mlp(4, 4, 1)
    return model, kind(make_optimizers(model, fused)), GradScaler(init_scale=SCALE, **options)


def loss_at(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randn(8, 4, generator=seeded(step))
    loss: Tensor = model(x).square().mean()
    return loss


def backward(model: nn.Sequential, scaler: GradScaler, step: int = 0, is_bad: bool = False) -> None:
    """Leave scaled gradients; in a bad step one that only the last optimizer has is inf."""
    model.zero_grad()
    scaler.scale(loss_at(model, step)).backward()
    if is_bad:
        model[2].weight.grad[0, 0] = math.inf


def step_of(
    model: nn.Sequential, scaler: GradScaler, optimizer: Any, step: int = 0, is_bad: bool = False
) -> None:
    backward(model, scaler, step, is_bad)
    scaler.step(optimizer)
    scaler.update()


def values_of(model: nn.Module, optimizers: Any) -> list[Tensor]:
    """Return copies of all parameters, and of all tensors that the optimizers keep."""
    kept = [value for each in optimizers for of in each.state.values() for value in of.values()]
    found = [*model.parameters(), *(value for value in kept if isinstance(value, Tensor))]
    return [tensor.detach().clone() for tensor in found]


BAD_STEPS = (0, 3)


def by_hand(fused: bool, max_norm: float | None = None) -> list[Tensor]:
    """Return what training without a scale gives, each optimizer stepped, or none of them."""
    model = mlp(4, 4, 1)
    optimizers = make_optimizers(model, fused)
    for step in range(6):
        model.zero_grad()
        loss_at(model, step).backward()
        if step in BAD_STEPS:
            model[2].weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]
        grads = [param.grad for param in model.parameters()]
        if all(grad is not None and grad.isfinite().all() for grad in grads):
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for optimizer in optimizers:
                optimizer.step()
    return values_of(model, optimizers)


# --- a step ---------------------------------------------------------------------------------------


def unscale_all(scaler: GradScaler, container: Any) -> None:
    scaler.unscale_(container)


def unscale_each(scaler: GradScaler, container: Any) -> None:
    for optimizer in container.each():
        scaler.unscale_(optimizer)


def unscale_all_and_each(scaler: GradScaler, container: Any) -> None:
    unscale_all(scaler, container)
    unscale_each(scaler, container)


def unscale_last(scaler: GradScaler, container: Any) -> None:
    scaler.unscale_(list(container.each())[-1])


@kinds
@fused_or_not
@pytest.mark.parametrize(
    "before",
    [lambda *_: None, unscale_all, unscale_each, unscale_all_and_each, unscale_last],
    ids=["step", "all", "each", "all and each", "last"],
)
def test_all_step_or_none(kind: Any, fused: bool, before: Callable[..., None]) -> None:
    model, container, scaler = contained(kind, fused)
    taken = []
    for step in range(6):
        backward(model, scaler, step, step in BAD_STEPS)
        was = values_of(model, container.each())
        before(scaler, container)
        scaler.step(container)
        if step in BAD_STEPS:
            assert_same(values_of(model, container.each()), was)
        scaler.update()
        taken.append(scaler.outcome(container).taken)
    assert taken == [step not in BAD_STEPS for step in range(6)]
    assert scaler.get_scale() == SCALE / 4
    assert_same(values_of(model, container.each()), by_hand(fused))


@kinds
@fused_or_not
def test_one_norm_is_clipped(kind: Any, fused: bool) -> None:
    model, container, scaler = contained(kind, fused)
    norms = []
    for step in range(6):
        backward(model, scaler, step, step in BAD_STEPS)
        scaler.step(container, max_norm=0.1)
        norms.append(scaler.outcome(container).norm)
        scaler.update()
    assert all(norm > 0.1 for norm in norms)
    torch.testing.assert_close(
        values_of(model, container.each()), by_hand(fused, 0.1), rtol=1e-6, atol=1e-6
    )


@kinds
def test_another_attempt(kind: Any) -> None:
    model, container, _ = contained(kind)
    scaler = GradScaler(init_scale=2.0**127)
    taken = []
    for _ in scaler.retry(container, times=9):
        scaler.scale(100 * loss_at(model)).backward()
        scaler.step(container)
        scaler.update()
        taken.append(scaler.outcome(container).taken)
    assert len(taken) > 1
    assert taken.index(True) == len(taken) - 1


class Checks(TorchDispatchMode):
    """Counts the passes that check gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
        self.count += func is kernel
        return func(*args, **(kwargs or {}))


@kinds
@fused_or_not
def test_one_pass_and_one_wait_for_all(kind, fused, waiting_device, monkeypatch):
    reads, read = [], DeviceScale.read_with
    monkeypatch.setattr(DeviceScale, "read_with", lambda *args: reads.append(args) or read(*args))
    model, container, scaler = contained(kind, fused)
    for step in range(5):  # the first ones are measured
        backward(model, scaler, step)
        del reads[:]
        with CountItems() as waits, Checks() as checks:
            scaler.step(container)
        scaler.update()
    # PyTorch's own steps read numbers on a CPU, and would on no other device.
    with CountItems() as of_steps:
        container.step()
    assert (waits.count - of_steps.count, len(reads), checks.count) == (0, 1, 1)


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not OfFirst])
def test_a_parameter_that_two_of_them_have_is_divided_once(kind: Any) -> None:
    shared, own = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    container = kind([SGD([shared], lr=1.0), SGD([shared, own], lr=1.0)])
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(shared.sum() + own.sum()).backward()
    scaler.step(container, max_norm=math.inf)
    assert torch.equal(shared, torch.full((2,), -2.0))
    assert torch.equal(own, torch.full((2,), -1.0))
    assert scaler.outcome(container).norm == 2.0
    assert len(scaler.outcome(container).norms) == 2


@kinds
def test_groups_that_are_added_later(kind: Any) -> None:
    model, container, scaler = contained(kind)
    late = nn.Parameter(torch.zeros(2))
    next(container.each()).add_param_group({"params": [late], "momentum": 0.0, "lr": 1.0})
    scaler.scale(loss_at(model) + late.sum()).backward()
    scaler.step(container)
    assert torch.equal(late, torch.full((2,), -1.0))


@kinds
def test_one_without_gradients(kind: Any) -> None:
    model, container, scaler = contained(kind)
    before = values_of(model, [])
    scaler.scale(model[2](torch.ones(2, 4)).sum()).backward()
    scaler.step(container)
    is_same = list(map(torch.equal, values_of(model, []), before))
    assert is_same == [True, True, False, False]
    scaler.update()
    model.zero_grad()
    with pytest.raises(NothingCheckedError, match="none of its 4 parameters has a gradient"):
        scaler.step(container)


def test_own_parameters_of_a_container_are_stepped_with_those_that_it_holds() -> None:
    class Hybrid(SGD):
        def __init__(self, params: Any, *others: Optimizer) -> None:
            super().__init__(params, lr=1.0)
            self.optimizers = others

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for each in self.optimizers:
                each.step()

    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = Hybrid([first], SGD([second], lr=1.0))
    scaler = GradScaler(init_scale=SCALE)
    for expected in (-1.0, -1.0):
        optimizer.zero_grad()
        second.grad = None
        scaler.scale(first.sum() + second.sum()).backward()
        assert first.grad is not None
        if first[0] != 0:
            first.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(first, torch.full((2,), expected))
        assert torch.equal(second, torch.full((2,), expected))


@fused_or_not
def test_a_container_that_says_it_divides_by_itself(fused: bool) -> None:
    """One that is derived from a fused optimizer: those that it holds would not be told."""

    class Derived(AdamW):
        def __init__(self, optimizers: list[Any]) -> None:
            super().__init__(
                [p for each in optimizers for p in each.param_groups[0]["params"]], fused=True
            )
            self.optimizers = optimizers

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for each in self.optimizers:
                each.step()

    model, container, scaler = contained(Derived, fused)
    for step in range(6):
        step_of(model, scaler, container, step, step in BAD_STEPS)
    assert_same(values_of(model, container.optimizers), by_hand(fused))


# --- closures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Parts, Facade, OfFirst, Twice])
@fused_or_not
def test_closures(kind: Any, fused: bool) -> None:
    model, container, scaler = contained(kind, fused)
    other = mlp(4, 4, 1)
    plain = kind(make_optimizers(other, fused))
    for step in range(3):

        def closure(model: nn.Module = model, step: int = step) -> Tensor:
            loss = loss_at(model, step)
            scaler.scale(loss).backward()
            return loss

        def by_itself(step: int = step) -> Tensor:
            other.zero_grad()
            loss = loss_at(other, step)
            loss.backward()
            return loss

        scaler.step(container, closure)
        scaler.update()
        plain.step(by_itself)
    assert_same(values_of(model, container.each()), values_of(other, plain.each()))


@pytest.mark.parametrize("is_first", [False, True])
def test_a_bad_evaluation_undoes_the_steps_of_those_before(is_first: bool) -> None:
    """Each of them evaluates the closure: the first has stepped when that of the second fails."""
    model, container, scaler = contained(Parts)
    if not is_first:
        scaler.step(container, closure_of(scaler, lambda: loss_at(model)))
        scaler.update()
    before = values_of(model, container.each())
    count = itertools.count()
    loss = lambda: loss_at(model) * (math.nan if next(count) else 1.0)  # noqa: E731
    scaler.step(container, closure_of(scaler, loss))
    scaler.update()
    assert next(count) == 2
    assert scaler.outcome(container).skipped
    assert_same(values_of(model, container.each()), before)


def test_a_container_without_a_closure_raises_and_changes_nothing() -> None:
    model, container, scaler = contained(Chained)
    before = values_of(model, container.each())
    with pytest.raises(TypeError, match=r"Chained\.step\(\) takes 1 positional argument"):
        scaler.step(container, lambda: loss_at(model))
    assert_same(values_of(model, container.each()), before)


# --- what became of it ----------------------------------------------------------------------------


@kinds
def test_the_outcome_is_that_of_all_whoever_asks(kind: Any) -> None:
    model, container, scaler = contained(kind, module=None)
    for step, is_bad in enumerate((True, False, True)):
        step_of(model, scaler, container, step, is_bad)
        of_all = scaler.outcome(container)
        assert of_all.taken is not is_bad
        for optimizer in container.each():
            assert scaler.outcome(optimizer) is of_all
    assert len(scaler.history()) == 3
    assert {entry.optimizer for entry in scaler.history()} == {kind.__name__}
    scaler.watch(model)
    assert of_all.culprits == ["2.weight"]


def test_the_newest_outcome_counts() -> None:
    model, container, scaler = contained(Parts)
    first, second = container.optimizers
    step_of(model, scaler, first)
    step_of(model, scaler, container, is_bad=True)
    assert scaler.outcome(first).skipped
    step_of(model, scaler, first)
    assert scaler.outcome(first).taken
    assert scaler.outcome(second).skipped


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Parts, "param_groups[0]['params'][2]"),
        (Chained, "param_groups[1]['params'][0]"),
        (Bare, "AdamW[1].param_groups[0]['params'][0]"),
    ],
)
def test_parameters_without_a_name_are_told_by_their_place(kind: Any, name: str) -> None:
    model, container, scaler = contained(kind)
    backward(model, scaler, is_bad=True)
    scaler.step(container)
    assert scaler.outcome(container).culprits == [name]


def test_an_attribute_of_the_same_name_that_holds_settings() -> None:
    model = mlp(4, 4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler(init_scale=8.0)
    optimizer.optimizers = [{"name": "sgd", "params": list(model.parameters()), "lr": 0.1}]
    step_of(model, scaler, optimizer)
    assert scaler.outcome(optimizer).taken


def test_names_that_the_optimizers_were_given() -> None:
    model = mlp(4, 4, 1)
    container = Bare([SGD(model[2].named_parameters(), lr=0.1)])
    scaler = GradScaler(init_scale=SCALE)
    backward(model, scaler, is_bad=True)
    scaler.step(container)
    assert scaler.outcome(container).culprits == ["weight"]


@kinds
def test_schedules_of_what_it_holds_wait_with_it(kind: Any) -> None:
    """No warning comes of their order either: in these tests each is an error."""
    model, container, scaler = contained(kind)
    schedules = [ExponentialLR(each, 0.5) for each in container.each()]
    for step in range(6):
        step_of(model, scaler, container, step, step in BAD_STEPS)
        for each in schedules:
            if scaler.outcome(each.optimizer).taken:
                each.step()
    rates = [each.param_groups[0]["lr"] for each in container.each()]
    assert rates == [0.1 / 16, 0.01 / 16]


@kinds
def test_a_disabled_scaler(kind: Any) -> None:
    model, container, _ = contained(kind)
    scaler = GradScaler(enabled=False)
    for step in range(3):
        model.zero_grad()
        scaler.scale(loss_at(model, step)).backward()
        scaler.unscale_(container)
        scaler.step(container, max_norm=math.inf)
        scaler.update()
        assert scaler.outcome(container).taken
    other = mlp(4, 4, 1)
    optimizers = make_optimizers(other)
    for step in range(3):
        other.zero_grad()
        loss_at(other, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(values_of(model, container.each()), values_of(other, optimizers))


# --- guards ---------------------------------------------------------------------------------------


@kinds
@fused_or_not
def test_a_guard_of_a_container(kind: Any, fused: bool) -> None:
    model, container, _ = contained(kind, fused)
    guard = halfstep.guard(container, on_skips=lambda report: None)
    for step in range(6):
        model.zero_grad()
        loss_at(model, step).backward()
        if step in BAD_STEPS:
            model[2].weight.grad[0, 0] = math.inf  # type: ignore[index, union-attr]
        container.step()
    assert guard.counts()[:2] == (4, 2)
    assert_same(values_of(model, container.each()), by_hand(fused))


def test_a_guard_evaluates_a_closure_once() -> None:
    for kind in (Facade, Parts):
        model, container, _ = contained(kind)
        halfstep.guard(container)
        count = itertools.count()

        def closure(model: nn.Module = model, count: Iterator[int] = count) -> Tensor:
            next(count)
            loss = loss_at(model)
            loss.backward()
            return loss

        if kind is Facade:
            assert container.step(closure) > 0.0
        else:  # which asks again for its second one
            with pytest.raises(CallOrderError, match="it has changed parameters and evaluates"):
                container.step(closure)
        assert next(count) == 1


def test_a_guard_refuses_a_container_with_a_line_search() -> None:
    model = mlp(4, 4, 1)
    with pytest.raises(ValueError, match=r"guard\(LBFGS\)"):
        halfstep.guard(Bare([LBFGS(model.parameters())]))  # type: ignore[arg-type]


# --- what is none ---------------------------------------------------------------------------------

CALLS = ("step", "unscale_", "retry")


@pytest.mark.parametrize("call", CALLS)
def test_something_without_groups_in_a_container_without_groups(call: str) -> None:
    class Unknown:
        def step(self) -> None: ...

    model, container, scaler = contained(Bare)
    container.optimizers.append(Unknown())
    backward(model, scaler)
    message = rf"{call}\(Bare\): it holds a Unknown, which has no param_"
    with pytest.raises(TypeError, match=message):
        getattr(scaler, call)(container)


def test_a_container_with_groups_of_its_own_may_hold_what_has_none() -> None:
    class Inner:
        def __init__(self, optimizer: Optimizer) -> None:
            self.step = optimizer.step

    model, container, scaler = contained(Parts)
    container.optimizers = [Inner(each) for each in container.optimizers]
    before = values_of(model, [])
    backward(model, scaler)
    scaler.step(container)
    assert not any(map(torch.equal, values_of(model, []), before))


def test_something_else_of_that_name() -> None:
    class Trainer:
        def optimizers(self) -> list[Any]:
            return []

        def step(self) -> None: ...

    scaler = GradScaler()
    with pytest.raises(TypeError, match=r"step\(Trainer\): pass the optimizer"):
        scaler.step(Trainer())  # type: ignore[arg-type]
    model = mlp(4, 4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.optimizers = {"sgd": SGD, "name": "adam", "number": 3, "schedule": None}  # type: ignore[attr-defined]
    backward(model, scaler)
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).taken


def test_an_empty_container_has_no_gradients() -> None:
    scaler = GradScaler()
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    with pytest.raises(NothingCheckedError, match=r"step\(Bare\): none of its 0 parameters"):
        scaler.step(Bare([]))  # type: ignore[arg-type]
