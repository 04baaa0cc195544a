"""Gradients that wait for a step follow the scale; against training without any scale."""

import gc
import math
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.training import assert_same, batches, one_parameter, take_step
from torch.utils.checkpoint import checkpoint

from halfstep._scaler import GradScaler, unused
from halfstep._scaler.schedules import Dynamic
from halfstep._scaler.unused import NUM_LOSSES, NUM_UPDATES, Unused

KINDS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))


def growing(**kwargs: Any) -> GradScaler:
    """The scale doubles at each update."""
    return GradScaler(DEVICE, init_scale=1024.0, growth_interval=1, **kwargs)


def backward(scaler: GradScaler, *params: torch.Tensor) -> None:
    """Add 1 to the gradient of each."""
    scaler.scale(torch.stack([param.sum() for param in params]).sum()).backward()


def moved(param: torch.Tensor) -> float:
    return -param[0].item()


def to_number(scaler: GradScaler) -> None:
    scaler.update(4.0)


def to_tensor(scaler: GradScaler) -> None:
    scaler.update(torch.tensor(4.0))


def to_loaded(scaler: GradScaler) -> None:
    scaler.load_state_dict(GradScaler(init_scale=4.0).state_dict())


changes = pytest.mark.parametrize("change", [to_number, to_tensor, to_loaded])


@kinds
@changes
@pytest.mark.parametrize("is_known", [False, True])
def test_a_step_after_the_scale_was_set(
    kind: dict[str, Any], change: Callable[[GradScaler], None], is_known: bool
) -> None:
    param, optimizer = one_parameter(torch.zeros(3), **kind)
    scaler = GradScaler(init_scale=1024.0)
    if is_known:
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    backward(scaler, param)
    change(scaler)
    scaler.step(optimizer)
    assert moved(param) == 1.0 + is_known


@kinds
@pytest.mark.parametrize("is_known", [False, True])
def test_one_accumulates_over_the_updates_of_another(kind: dict[str, Any], is_known: bool) -> None:
    (a, often), (b, rarely) = one_parameter(torch.zeros(3)), one_parameter(torch.zeros(3), **kind)
    scaler = growing()
    if is_known:
        backward(scaler, b)
        scaler.step(rarely)
        scaler.update()
        rarely.zero_grad()
    for number in range(4):
        often.zero_grad()
        backward(scaler, a, b)
        scaler.step(often)
        if number == 3:
            scaler.step(rarely)
        scaler.update()
    assert (moved(a), moved(b)) == (4.0, 4.0 + is_known)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradients_are_zero(set_to_none: bool) -> None:
    """Two networks, one of which gives the other gradients that it does not want."""
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    scaler = growing()
    for _ in range(5):
        for optimizer, params in ((first, (a, b)), (second, (b,))):
            optimizer.zero_grad(set_to_none)
            backward(scaler, *params)
            scaler.step(optimizer)
            scaler.update()
    assert (moved(a), moved(b)) == (5.0, 5.0)


def test_a_gradient_that_came_after_the_step() -> None:
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    scaler = growing()
    backward(scaler, a)
    scaler.step(first)
    first.zero_grad()
    backward(scaler, a, b)  # for the next step of the first one
    scaler.step(second)
    scaler.update()
    scaler.step(first)
    assert (moved(a), moved(b)) == (2.0, 1.0)


@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_the_gradients_of_a_taken_step_stay(max_norm: float | None) -> None:
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    scaler = growing()
    backward(scaler, a)
    scaler.step(first, max_norm=max_norm)
    scaler.update()
    backward(scaler, b)
    scaler.step(second)
    scaler.update()
    scaler.update(8.0)
    assert a.grad is not None
    assert a.grad[0] == 1.0
    assert scaler.outcome(first).norm == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("how", ["unscale_", "clip_grad_norm_"])
def test_gradients_that_were_unscaled_and_not_used(how: str) -> None:
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    scaler = growing()
    backward(scaler, a, b)
    if how == "unscale_":
        scaler.unscale_(second)
    if how == "clip_grad_norm_":
        scaler.clip_grad_norm_([b], math.inf)
    scaler.step(first)
    scaler.update()
    backward(scaler, b)
    scaler.step(second)
    assert moved(b) == 2.0


@pytest.mark.parametrize("how", ["unscale_", "clip_grad_norm_"])
def test_unscaled_after_another_optimizer_has_stepped(how: str) -> None:
    """That one shares a parameter, and has used an earlier gradient of it."""
    shared, first = one_parameter(torch.zeros(3))
    second = torch.optim.SGD([shared], lr=1.0)
    scaler = growing()
    backward(scaler, shared)
    scaler.step(first)
    first.zero_grad()
    backward(scaler, shared)
    if how == "unscale_":
        scaler.unscale_(second)
    if how == "clip_grad_norm_":
        scaler.clip_grad_norm_([shared], math.inf)
    scaler.update()
    backward(scaler, shared)
    scaler.step(second)
    assert moved(shared) == 1.0 + 2.0


def test_unscaled_together_with_what_another_optimizer_has_used() -> None:
    (shared, first), (own, other) = (one_parameter(torch.zeros(3)) for _ in range(2))
    both = torch.optim.SGD([shared, own], lr=1.0)
    scaler = growing()
    backward(scaler, own)
    scaler.step(other)
    other.zero_grad()
    backward(scaler, shared, own)
    scaler.unscale_(both)
    scaler.step(first)
    first.zero_grad()
    scaler.scale(torch.ones(()))  # the step is not the last that happens
    scaler.update()
    backward(scaler, own)
    scaler.step(both)
    assert moved(own) == 1.0 + 2.0


def test_unscaled_before_a_state_is_loaded() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    scaler = growing()
    backward(scaler, param)
    scaler.unscale_(optimizer)
    to_loaded(scaler)
    scaler.step(optimizer)
    assert moved(param) == 1.0


@pytest.mark.parametrize("layout", ["sparse", "complex", "expanded", "float16"])
def test_other_gradients(layout: str) -> None:
    dtype = {"complex": torch.complex64, "float16": torch.float16}.get(layout, torch.float32)
    param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=layout == "float16")
    scaler = GradScaler(init_scale=1024.0)
    scaler.scale(param.abs().sum())
    grad = torch.full_like(param, 1024.0)
    if layout == "sparse":
        indices, values = torch.tensor([[0, 0, 1, 2]]), torch.tensor([512.0, 512, 1024, 1024])
        grad = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    if layout == "expanded":
        grad = torch.tensor(1024.0).expand(3)
    if layout == "complex":
        grad = grad.conj()
    param.grad = grad
    scaler.update(16.0)
    scaler.step(optimizer)
    assert torch.equal(param.detach(), torch.full_like(param, -1.0))


def test_a_layout_that_no_scaler_reads_does_not_stop_an_update() -> None:
    with warnings.catch_warnings(action="ignore"):
        param = torch.nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
        scaler = GradScaler(init_scale=1024.0)
        scaler.scale(torch.mv(param, torch.ones(2)).sum())
        param.grad = torch.ones(2, 2).to_sparse_csr()
    scaler.update(16.0)
    assert param.grad is not None


def test_a_disabled_one_changes_nothing() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    scaler = GradScaler(enabled=False)
    backward(scaler, param)
    scaler.update(4.0)
    scaler.step(optimizer)
    assert moved(param) == 1.0


def test_a_usual_iteration_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    scaler = growing()

    def iterate() -> None:
        backward(scaler, a, b)
        for optimizer in (first, second):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    for _ in range(NUM_LOSSES):
        iterate()
    monkeypatch.delattr(Unused, "_candidates")
    monkeypatch.delattr(unused, "leaves_of")
    iterate()


def test_a_parameter_of_no_optimizer_is_followed_for_a_while() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    stray = torch.nn.Parameter(torch.zeros(()))
    scaler = GradScaler(init_scale=2.0, schedule=Dynamic(growth_interval=1000))
    seen = []
    for number in range(NUM_UPDATES + 1):
        optimizer.zero_grad()
        stray.grad = None
        backward(scaler, param, stray)
        scaler.step(optimizer)
        scaler.update(4.0 if number % 2 else 2.0)
        seen.append(bool(scaler._engine.unused.waiting))
    assert all(seen[: NUM_UPDATES - 1])
    assert not any(seen[NUM_UPDATES:])


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    """Each optimizer accumulates as long as it likes; the scale moves when it likes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mine, plain = ([torch.nn.Parameter(torch.ones(3)) for _ in range(3)] for _ in range(2))
    kind = rng.choice(KINDS)
    ours = [torch.optim.SGD([param], lr=0.01, momentum=0.9, **kind) for param in mine]
    theirs = [torch.optim.SGD([param], lr=0.01, momentum=0.9) for param in plain]
    scaler = growing()
    for _ in range(12):
        which = rng.sample(range(3), rng.randint(1, 3))
        weights = torch.randn(3)
        losses = [[(params[k] * weights).square().sum() for k in which] for params in (mine, plain)]
        scaler.scale(torch.stack(losses[0]).sum()).backward()
        torch.stack(losses[1]).sum().backward()
        stepping = [k for k in which if rng.random() < 0.5]
        for k in which:
            if rng.random() < 0.3:
                scaler.unscale_(ours[k])
        set_to_none = rng.random() < 0.7
        for k in stepping:
            scaler.step(ours[k])
            theirs[k].step()
            theirs[k].zero_grad(set_to_none)
        if rng.random() < 0.3 or not stepping:
            scaler.update(scaler.get_scale() * rng.choice([0.25, 1.0, 2.0]))
        else:
            scaler.update()
        for k in stepping:
            ours[k].zero_grad(set_to_none)
    torch.testing.assert_close(mine, plain)


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
            assert param.grad is not None
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
            assert param.grad is not None
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


@pytest.mark.parametrize("loop", RIGHT)
def test_what_torch_amp_does_right_stays_equal(loop: Loop) -> None:
    theirs = loop(torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=1))
    assert_same(loop(growing()), theirs)


def test_a_reentrant_backward_pass_is_part_of_that_of_the_loss() -> None:
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    scaler = growing()
    for number in range(4):
        first.zero_grad()
        product = checkpoint(
            lambda x: x * 1 + b, torch.ones(3).requires_grad_(), use_reentrant=True
        )
        scaler.scale((product + a).sum()).backward()
        scaler.step(first)
        if number in (0, 3):
            scaler.step(second)
        scaler.update()
        if number == 0:
            second.zero_grad()
    assert (moved(a), moved(b)) == (4.0, 4.0)


def test_hooks_go_with_what_waits_and_keep_no_scaler() -> None:
    param, optimizer = one_parameter(torch.zeros(3))
    scaler = growing()
    backward(scaler, param)
    scaler.update(4.0)
    assert param._backward_hooks
    optimizer.zero_grad()
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    assert not param._backward_hooks
    backward(scaler, param)
    scaler.update(8.0)
    engine = weakref.ref(scaler._engine.unused)
    del scaler
    gc.collect()
    assert engine() is None
    param.sum().backward()


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


def test_gradients_that_are_moved_to_other_buckets() -> None:
    (a, first), (b, second) = (one_parameter(torch.zeros(3)) for _ in range(2))
    b.grad = torch.zeros(6)[:3]
    scaler = growing()
    backward(scaler, a, b)
    scaler.step(first)
    scaler.update()
    moved_to = torch.zeros(6)[3:]
    b.grad = moved_to.copy_(b.grad)
    backward(scaler, b)
    scaler.step(second)
    assert moved(b) == 2.0
