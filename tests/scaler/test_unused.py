"""Gradients that no step has used when the scale moves: an error at their step, and only then."""

import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.training import assert_same, batches, one_parameter, take_step
from torch.utils.checkpoint import checkpoint

from halfstep._scaler import GradScaler, unused
from halfstep._tools.run import stand_ins
from halfstep.errors import CallOrderError

KINDS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))


on_host_and_device = pytest.mark.usefixtures("host_or_device")


def growing(**kwargs: Any) -> GradScaler:
    """The scale doubles at each update."""
    return GradScaler(DEVICE, init_scale=1024.0, growth_interval=1, **kwargs)


def constant(**kwargs: Any) -> GradScaler:
    return GradScaler(DEVICE, init_scale=1024.0, growth_interval=1000, **kwargs)


def backward(scaler: GradScaler, *params: torch.Tensor) -> None:
    """Add 1 to the gradient of each."""
    scaler.scale(torch.stack([param.sum() for param in params]).sum()).backward()


def moved(param: torch.Tensor) -> float:
    return -param[0].item()


def two_known(scaler: GradScaler, **kind: Any) -> tuple[Any, Any, Any, Any]:
    """Two parameters with optimizers that have stepped once, and were set back."""
    (a, first), (b, second) = one_parameter(torch.zeros(3)), one_parameter(torch.zeros(3), **kind)
    backward(scaler, a, b)
    for param, optimizer in ((a, first), (b, second)):
        scaler.step(optimizer)
        optimizer.zero_grad()
        param.detach().zero_()
    scaler.update()
    return a, first, b, second


def to_number(scaler: GradScaler) -> None:
    scaler.update(4.0)


def to_tensor(scaler: GradScaler) -> None:
    scaler.update(torch.tensor(4.0))


def to_loaded(scaler: GradScaler) -> None:
    scaler.load_state_dict(GradScaler(init_scale=4.0).state_dict())


changes = pytest.mark.parametrize("change", [to_number, to_tensor, to_loaded])


# --- errors ---------------------------------------------------------------------------------------


@kinds
@changes
@on_host_and_device
@pytest.mark.parametrize("use", ["step", "unscale_"])
def test_a_scale_that_was_set_before_the_step(
    kind: dict[str, Any], change: Callable[[GradScaler], None], use: str
) -> None:
    scaler = constant()
    _, _, b, second = two_known(scaler, **kind)
    backward(scaler, b)
    change(scaler)
    for _ in range(2):
        with pytest.raises(CallOrderError) as caught:
            getattr(scaler, use)(second)
        assert "accumulated at scale 1024, and the scale is 4 now" in str(caught.value)
        assert moved(b) == 0.0
        assert b.grad[0] == 1024.0
    second.zero_grad()
    backward(scaler, b)
    scaler.step(second)
    assert moved(b) == 1.0


@kinds
@on_host_and_device
def test_an_optimizer_that_accumulates_over_the_updates_of_another(kind: dict[str, Any]) -> None:
    scaler = growing()
    a, often, b, rarely = two_known(scaler, **kind)
    for _ in range(3):
        often.zero_grad()
        backward(scaler, a, b)
        scaler.step(often)
        scaler.update()
    with pytest.raises(CallOrderError) as caught:
        scaler.step(rarely)
    assert str(caught.value) == (
        "step(SGD): gradients of SGD were accumulated at scale 2048, and others at 8192.\n"
        "Cause: the scale moved before their step. For example, the optimizer steps in every k-th "
        "iteration of another one that has the same GradScaler.\n"
        "Cure: use one GradScaler for each cadence: the discriminator that steps in every k-th "
        "iteration gets a GradScaler of its own. Otherwise call zero_grad() after each update()"
    )
    assert (moved(a), moved(b)) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("value", "cure"),
    [(math.inf, "before the script continues without a step"), (1.0, "after it")],
)
def test_gradients_that_the_only_optimizer_has_left(value: float, cure: str) -> None:
    scaler, (param, optimizer) = growing(), one_parameter(torch.zeros(3))
    take_step(scaler, optimizer, param.sum())
    optimizer.zero_grad()
    scaler.scale(value * param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    backward(scaler, param)
    with pytest.raises(CallOrderError, match=rf"zero_grad\(\) {cure}$"):
        scaler.unscale_(optimizer)


@kinds
@on_host_and_device
def test_one_scaler_for_each_cadence(kind: dict[str, Any]) -> None:
    scalers = growing(), growing()
    a, often, _, _ = two_known(scalers[0])
    _, _, b, rarely = two_known(scalers[1], **kind)
    for number in range(8):
        often.zero_grad()
        backward(scalers[0], a)
        scalers[0].step(often)
        scalers[0].update()
        backward(scalers[1], b)
        if number % 4 == 3:
            scalers[1].step(rarely)
            scalers[1].update()
            rarely.zero_grad()
    assert (moved(a), moved(b)) == (8.0, 8.0)


@kinds
@on_host_and_device
def test_a_scale_that_has_not_moved(kind: dict[str, Any]) -> None:
    scaler = constant()
    a, often, b, rarely = two_known(scaler, **kind)
    for number in range(8):
        often.zero_grad()
        backward(scaler, a, b)
        scaler.step(often)
        if number % 4 == 3:
            scaler.step(rarely)
            rarely.zero_grad()
        scaler.update()
    assert (moved(a), moved(b)) == (8.0, 8.0)


@on_host_and_device
def test_gradients_that_were_unscaled_and_not_used() -> None:
    """They would be divided again, whether the scale has moved or not."""
    scaler = constant()
    a, first, b, second = two_known(scaler)
    backward(scaler, a, b)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    for adds in (False, True):
        if adds:
            backward(scaler, b)
        with pytest.raises(CallOrderError, match=r"were unscaled, and .*\nCause: update\(\) came"):
            scaler.step(second)


@on_host_and_device
def test_a_gradient_that_came_after_the_step() -> None:
    scaler = growing()
    a, first, b, second = two_known(scaler)
    backward(scaler, a)
    scaler.step(first)
    first.zero_grad()
    backward(scaler, a, b)  # for the next step of the first one
    scaler.step(second)
    scaler.update()
    with pytest.raises(CallOrderError, match="accumulated at scale 2048, and the scale is 4096"):
        scaler.step(first)
    assert (moved(a), moved(b)) == (1.0, 1.0)


def test_a_wrapper_and_an_optimizer_of_the_same_parameters() -> None:
    scaler = growing()
    a, first, b, _ = two_known(scaler)
    backward(scaler, a, b)
    scaler.step(first)
    scaler.update()
    with pytest.raises(CallOrderError, match=r"step\(Adam\): gradients of SGD were accumulated"):
        scaler.step(torch.optim.Adam([b]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("layout", ["sparse", "expanded", "view"])
@on_host_and_device
def test_other_gradients(layout: str, dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = constant()
    grads = {
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.ones(2, dtype=dtype), (3,), check_invariants=True
        ),
        "expanded": torch.ones((), dtype=dtype).expand(3),
        "view": torch.ones(6, dtype=dtype)[3:],
    }
    scaler.scale(param.abs().sum())
    param.grad = torch.ones(3, dtype=dtype)
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(param.abs().sum())
    param.grad = grads[layout]
    scaler.update(16.0)
    with pytest.raises(CallOrderError, match="accumulated at scale 1024"):
        scaler.step(optimizer)


@on_host_and_device
def test_a_reentrant_backward_pass() -> None:
    scaler = growing()
    a, first, b, second = two_known(scaler)
    for _ in range(2):
        first.zero_grad()
        ones = torch.ones(3).requires_grad_()
        product = checkpoint(lambda x: x * 1 + b, ones, use_reentrant=True)
        scaler.scale((product + a).sum()).backward()
        scaler.step(first)
        scaler.update()
    with pytest.raises(CallOrderError, match="accumulated at scale 2048, and others at 4096"):
        scaler.step(second)


def test_gradients_that_are_written_after_backward_as_those_of_ddp() -> None:
    """It copies the mean into them in a callback at the end of the pass."""
    scaler = growing()
    a, first, b, second = two_known(scaler)

    def copy_later(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: b.grad.mul_(1.0))

    b.register_hook(copy_later)
    for _ in range(2):
        first.zero_grad()
        backward(scaler, a, b)
        scaler.step(first)
        scaler.update()
    with pytest.raises(CallOrderError, match="and others at"):
        scaler.step(second)


def test_switching_off_with_gradients_at_hand() -> None:
    scaler: Any = constant()
    _, _, b, second = two_known(scaler)
    backward(scaler, b)
    scaler._enabled = False
    with pytest.raises(CallOrderError, match="accumulated at scale 1024, and the scale is 1 now"):
        scaler.step(second)
    second.zero_grad()
    backward(scaler, b)
    scaler.step(second)
    assert moved(b) == 1.0


# --- no error without certainty -------------------------------------------------------------------


@on_host_and_device
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zeroes", ["before", "after"])
def test_zeroed_gradients(set_to_none: bool, zeroes: str) -> None:
    """Two networks, one of which gives the other gradients that it does not want."""
    scaler = growing()
    a, first, b, second = two_known(scaler)
    for _ in range(5):
        for optimizer, params in ((first, (a, b)), (second, (b,))):
            if zeroes == "before":
                optimizer.zero_grad(set_to_none)
            backward(scaler, *params)
            scaler.step(optimizer)
            scaler.update()
            if zeroes == "after":
                first.zero_grad(set_to_none)
                second.zero_grad(set_to_none)
    assert (moved(a), moved(b)) == (5.0, 5.0)


@on_host_and_device
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_between_scale_and_backward(set_to_none: bool) -> None:
    scaler = growing()
    a, first, b, second = two_known(scaler)
    for _ in range(3):
        backward(scaler, a, b)
        scaler.step(first)
        scaler.update()
        loss = scaler.scale(b.sum() + a.sum())
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none)
        loss.backward()
        scaler.step(second)
        scaler.update()
        first.zero_grad(set_to_none)
    assert moved(b) == 3.0


@on_host_and_device
def test_gradients_that_the_user_rescales() -> None:
    scaler = growing()
    a, often, b, rarely = two_known(scaler)
    for _ in range(4):
        often.zero_grad()
        backward(scaler, a, b)
        scaler.step(often)
        before = scaler.get_scale()
        scaler.update()
        b.grad *= scaler.get_scale() / before
    scaler.step(rarely)
    assert (moved(a), moved(b)) == (4.0, 4.0)


@on_host_and_device
def test_gradients_that_are_asked_for_and_not_added() -> None:
    scaler = growing()
    a, first, b, second = two_known(scaler)
    backward(scaler, a, b)
    scaler.step(first)
    scaler.update()
    torch.autograd.grad(scaler.scale(b.sum()), [b])
    scaler.update(2048.0)
    scaler.step(second)
    assert moved(b) == 1.0


@on_host_and_device
@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_the_gradients_of_a_taken_step_are_used(max_norm: float | None) -> None:
    scaler = growing()
    a, first, b, second = two_known(scaler)
    backward(scaler, a)
    scaler.step(first, max_norm=max_norm)
    scaler.update()
    backward(scaler, b)
    scaler.step(second)
    scaler.update()
    scaler.update(8.0)
    assert not scaler._engine.unused.by_param
    assert scaler.outcome(first).norm == pytest.approx(math.sqrt(3))


def test_what_is_unscaled_stays_so_when_a_state_is_loaded() -> None:
    scaler = constant()
    _, _, b, second = two_known(scaler)
    backward(scaler, b)
    scaler.unscale_(second)
    to_loaded(scaler)
    scaler.step(second)
    assert moved(b) == 1.0


def test_an_optimizer_is_known_from_its_first_step_on() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    scaler = constant()
    backward(scaler, param)
    scaler.update(512.0)
    scaler.step(optimizer)
    assert moved(param) == 2.0


def test_a_disabled_one_changes_nothing() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    scaler = GradScaler(enabled=False)
    backward(scaler, param)
    scaler.update(4.0)
    scaler.step(optimizer)
    assert moved(param) == 1.0


def test_a_usual_iteration_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = growing()
    a, first, b, second = two_known(scaler)
    monkeypatch.delattr(unused, "parameters")
    backward(scaler, a, b)
    for optimizer in (first, second):
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()


@on_host_and_device
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    """Each optimizer accumulates as long as it likes: trained as without a scaler, or an error."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mine, plain = ([torch.nn.Parameter(torch.ones(3)) for _ in range(3)] for _ in range(2))
    kind = rng.choice(KINDS)
    ours = [torch.optim.SGD([param], lr=0.01, momentum=0.9, **kind) for param in mine]
    theirs = [torch.optim.SGD([param], lr=0.01, momentum=0.9) for param in plain]
    scaler = GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
    num_errors = num_steps = 0
    for number in range(24):
        which = range(3) if number == 0 else rng.sample(range(3), rng.randint(1, 3))
        weights = torch.randn(3)
        losses = [[(params[k] * weights).square().sum() for k in which] for params in (mine, plain)]
        scaler.scale(torch.stack(losses[0]).sum()).backward()
        torch.stack(losses[1]).sum().backward()
        stepping = [k for k in which if number == 0 or rng.random() < 0.5]
        set_to_none, num_taken = rng.random() < 0.7, 0
        for k in stepping:
            try:
                scaler.step(ours[k])
            except CallOrderError:
                num_errors += 1
            else:
                theirs[k].step()
                num_taken += 1
            theirs[k].zero_grad(set_to_none)
        if num_taken:
            scaler.update()
        num_steps += num_taken
        for k in stepping:
            ours[k].zero_grad(set_to_none)
        # Not assert_close, which takes some 40 ops for each: on a simulated device they are slow.
        values, expected = (torch.cat(each).tolist() for each in (mine, plain))
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert num_steps
    assert num_errors < num_steps


# --- programs that torch.amp runs right: nothing of theirs changes --------------------------------

Loop = Callable[[Any], list[torch.Tensor]]


def two_layers() -> tuple[torch.nn.Linear, torch.nn.Linear, torch.optim.SGD, torch.optim.SGD]:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    return (
        first,
        second,
        torch.optim.SGD(first.parameters(), lr=0.01),
        torch.optim.SGD(second.parameters(), lr=0.01),
    )


def state(*modules: torch.nn.Module) -> list[torch.Tensor]:
    params = [param for module in modules for param in module.parameters()]
    return [t.clone() for p in params for t in (p.detach(), p.grad) if t is not None]


def unscaled_and_stepped_alone(scaler: Any) -> list[torch.Tensor]:
    a, b, first, second = two_layers()
    seen = []
    for batch in batches(8, 8, 4):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(b(a(batch)).square().mean()).backward()
        scaler.unscale_(first)
        scaler.unscale_(second)
        scaler.step(first)
        second.step()
        scaler.update()
        seen += state(a, b)
    return seen


def stepped_after_update(scaler: Any) -> list[torch.Tensor]:
    a, b, first, second = two_layers()
    for batch in batches(8, 8, 4):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(b(a(batch)).square().mean()).backward()
        scaler.unscale_(first)
        scaler.unscale_(second)
        scaler.update()
        first.step()
        second.step()
    return state(a, b)


def divided_by_hand(scaler: Any) -> list[torch.Tensor]:
    a, b, first, second = two_layers()
    for batch in batches(8, 8, 4):
        first.zero_grad()
        second.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(b(a(batch)).square().mean()).backward()
        scaler.step(first)
        scaler.update()
        for param in b.parameters():
            param.grad.div_(scale)
        second.step()
    return state(a, b)


def never_scaled(scaler: Any) -> list[torch.Tensor]:
    a, b, first, second = two_layers()
    for batch in batches(8, 8, 4):
        first.zero_grad()
        scaler.scale(b(a(batch)).square().mean()).backward()
        scaler.step(first)
        second.zero_grad()
        b(a(batch).detach()).square().mean().backward()
        scaler.update()
        second.step()
    return state(a, b)


def accumulated_without_a_scale(scaler: Any, scaled_first: bool = False) -> list[torch.Tensor]:
    """The other network is in the graph, but gets nothing of it."""
    a, b, first, second = two_layers()
    for number, batch in enumerate(batches(8, 8, 4)):
        if not scaled_first:
            b(a(batch).detach()).mean().backward()
        loss = scaler.scale(b(a(batch)).square().mean())
        if scaled_first:
            b(a(batch).detach()).mean().backward()
        loss.backward(inputs=list(a.parameters()))
        scaler.step(first)
        first.zero_grad()
        scaler.update()
        if number % 3 == 2:
            second.step()
            second.zero_grad()
    return state(a, b)


def changed_after_the_step(scaler: Any) -> list[torch.Tensor]:
    a, b, first, second = two_layers()
    seen = []
    for number, batch in enumerate(batches(8, 8, 4)):
        module, optimizer = (a, first) if number % 2 else (b, second)
        take_step(scaler, optimizer, module(batch).square().mean())
        for param in module.parameters():
            param.grad.mul_(0.5)
        seen += state(a, b)
    return seen


def shared_with_a_copy_of_the_weights(scaler: Any) -> list[torch.Tensor]:
    a, _, _, _ = two_layers()
    copies = [torch.nn.Parameter(param.detach().clone()) for param in a.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.01)
    seen = []
    for batch in batches(8, 8, 4):
        a.zero_grad()
        scaler.scale(a(batch).square().mean()).backward()
        for param, its_copy in zip(a.parameters(), copies, strict=True):
            its_copy.grad = param.grad
        scaler.step(optimizer)
        scaler.update()
        seen += [copy.grad.clone() for copy in copies if copy.grad is not None]
    return seen


def scale_written_before_update(scaler: Any) -> list[torch.Tensor]:
    a, _, optimizer, _ = two_layers()
    for batch in batches(8, 8, 4):
        optimizer.zero_grad()
        scaler.scale(a(batch).square().mean()).backward()
        scaler.step(optimizer)
        if scaler._scale > 4096.0:
            scaler._scale = torch.tensor(1024.0)
        scaler.update()
    return [*state(a), torch.tensor(scaler.get_scale())]


RIGHT: list[Loop] = [
    unscaled_and_stepped_alone,
    stepped_after_update,
    divided_by_hand,
    never_scaled,
    accumulated_without_a_scale,
    lambda scaler: accumulated_without_a_scale(scaler, scaled_first=True),
    changed_after_the_step,
    shared_with_a_copy_of_the_weights,
    scale_written_before_update,
]


@on_host_and_device
@pytest.mark.parametrize("loop", RIGHT)
def test_what_torch_amp_does_right_stays_equal(loop: Loop) -> None:
    theirs = loop(torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=1))
    assert_same(loop(growing()), theirs)


# --- in the place of torch.amp's scaler -----------------------------------------------------------


def one_that_accumulates(scaler: Any) -> list[torch.Tensor]:
    a, b, often, rarely = two_layers()
    for number, batch in enumerate(batches(12, 8, 4)):
        often.zero_grad()
        scaler.scale(b(a(batch)).square().mean()).backward()
        scaler.step(often)
        if number % 3 == 0:
            scaler.step(rarely)
            rarely.zero_grad()
        scaler.update()
    return state(a, b)


@on_host_and_device
def test_a_stand_in_steps_as_torch_amp_does() -> None:
    options: Any = {"init_scale": 1024.0, "growth_interval": 2}
    theirs = one_that_accumulates(torch.amp.GradScaler(DEVICE, **options))
    assert_same(one_that_accumulates(stand_ins.GradScaler(DEVICE, **options)), theirs)
    with pytest.raises(CallOrderError, match="one GradScaler for each cadence"):
        one_that_accumulates(GradScaler(DEVICE, **options))


# --- what is kept alive ---------------------------------------------------------------------------


def test_hooks_go_and_keep_no_scaler() -> None:
    scaler = constant()
    _, _, b, second = two_known(scaler)
    backward(scaler, b)
    scaler.update(4.0)
    assert b._backward_hooks
    second.zero_grad()
    backward(scaler, b)
    scaler.step(second)
    scaler.update()
    assert not b._backward_hooks
    backward(scaler, b)
    scaler.update(8.0)
    engine = weakref.ref(scaler._engine.unused)
    del scaler
    gc.collect()
    assert engine() is None
    b.sum().backward()


def test_an_optimizer_does_not_keep_the_outcomes_of_a_scaler() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    scaler = growing()
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    journal = weakref.ref(scaler._engine.journal)
    del scaler
    gc.collect()
    assert journal() is None
