"""Unmodified loops in a block of ``mixed_precision``, against the same loops written by hand."""

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.scaler.containers import Facade, Parts
from tests.training import mlp, step_on
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR

import halfstep
from halfstep._tools.run.amp import mixed_precision

DTYPES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Explosive(Net):
    """Its gradients are inf in the iterations that are told."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad = bad
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        if self.calls in self.bad:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


class Script:
    """The calls of a script; with a dtype those that do by hand what ``mixed_precision`` does."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.scaler = halfstep.GradScaler(enabled=dtype is torch.float16)

    def autocast(self) -> AbstractContextManager[None]:
        return halfstep.autocast("cpu", self.dtype) if self.dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.dtype else loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.dtype:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *closure: Callable[[], Tensor]) -> Any:
        if not self.dtype:
            return optimizer.step(*closure)
        result = self.scaler.step(optimizer, *closure)
        self.scaler.update()
        return result


def labelled(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator))
        for _ in range(count)
    ]


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def quiet(_: str) -> None:
    pass


def under_amp(script: Callable[[], Any], dtype: torch.dtype = torch.float16) -> Any:
    with mixed_precision(dtype, quiet):
        return script()


# --- the plain loop -------------------------------------------------------------------------------


def plain(
    script: Script,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    clip: Callable[[Any], object] | None = None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Net:
    model = seeded(Net)
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    for x, y in labelled(8):
        optimizer.zero_grad()
        with script.autocast():
            loss = loss_of(model(x).float(), y)
        script.backward(loss)
        if clip:
            script.unscale(optimizer)
            clip(model.parameters())
        script.step(optimizer)
    return model


def test_a_model_may_list_its_parameters_itself() -> None:
    """As the event functions of torchdiffeq's examples do."""

    class Listed(nn.Linear):
        def parameters(self) -> list[nn.Parameter]:
            return [self.weight, self.bias]

    y = under_amp(lambda: Listed(2, 2)(torch.ones(1, 2)))
    assert y.grad_fn.name() == "ToCopyBackward0"  # of a result in float16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "optimizer_of",
    [torch.optim.SGD, torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr, fused=True)],
)
def test_a_plain_loop_is_that_by_hand(dtype: torch.dtype, optimizer_of: Any) -> None:
    trained = under_amp(lambda: plain(Script(), optimizer_of), dtype)

    assert same(trained, plain(Script(dtype), optimizer_of))
    assert not same(trained, plain(Script(), optimizer_of))  # in float32 it is another


@pytest.mark.parametrize(
    "loss_of", [nn.CrossEntropyLoss(), lambda x, y: -x.log_softmax(1)[:, 1].mean()]
)
def test_losses_of_other_kinds(loss_of: Any) -> None:
    trained = under_amp(lambda: plain(Script(), loss_of=loss_of))

    # By hand, autocast takes log_softmax and the mean in float32 too.
    assert same(trained, plain(Script(torch.float16), loss_of=loss_of))


def clamp(params: Any) -> None:
    for param in params:
        param.grad.data.clamp_(-1e-2, 1e-2)


@pytest.mark.parametrize(
    "clip", [lambda p: clip_grad_norm_(p, 0.1), lambda p: clip_grad_value_(p, 0.01), clamp]
)
def test_clipping_of_any_kind_sees_unscaled_gradients(clip: Any) -> None:
    trained = under_amp(lambda: plain(Script(), clip=clip))

    assert same(trained, plain(Script(torch.float16), clip=clip))
    assert not same(trained, plain(Script(torch.float16)))


def test_gradients_are_unscaled_whoever_looks() -> None:
    model, x = nn.Linear(4, 1, bias=False), torch.ones(2, 4, requires_grad=True)
    nn.init.ones_(model.weight)

    def script() -> list[Tensor]:
        (model(x).sum() / 4).backward()
        return [model.weight.grad.clone(), x.grad.clone()]

    assert [grad.unique().item() for grad in under_amp(script)] == [0.5, 0.25]


def test_gradients_of_tensors_that_are_no_leaves() -> None:
    model = nn.Linear(4, 1)
    nn.init.ones_(model.weight)

    def script() -> list[float]:
        found = []
        for _ in range(2):
            hidden = torch.ones(2, 4, requires_grad=True) * 2
            hidden.retain_grad()
            (model(hidden).sum() / 4).backward(retain_graph=True)
            (model(hidden).sum() / 4).backward()
            found.append(hidden.grad.unique().item())
        return found

    assert under_amp(script) == [0.5, 0.5]


def test_only_the_inputs_that_were_asked_for() -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)
    nn.init.ones_(model.weight)

    def script() -> float:
        (model(x).sum() / 4).backward(inputs=[x])
        assert model.weight.grad is None
        return x.grad.unique().item()

    assert under_amp(script) == 0.25


def test_what_the_script_drops_is_gone() -> None:
    model = seeded(Net)
    refs: list[weakref.ref[Tensor]] = []

    def script() -> None:
        for _ in range(2):
            x = labelled(1)[0][0].requires_grad_()
            hidden = x * 2
            hidden.retain_grad()
            model(hidden).mean().backward()
            refs.extend(weakref.ref(t) for t in (x, hidden, x.grad, model.head.weight.grad))
            model.zero_grad()
            x = hidden = None  # type: ignore[assignment]
            assert [ref() for ref in refs] == [None] * len(refs)

    under_amp(script)


@pytest.mark.parametrize("optimizer_of", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients(optimizer_of: Any) -> None:
    def train(script: Script) -> Tensor:
        torch.manual_seed(0)
        model = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        optimizer = optimizer_of(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                script.backward(model(torch.tensor([[1, 2, 2 + step + part]])).square().mean())
            script.step(optimizer)
        return model.weight.detach()

    # The rows are added up after each part and not at the end: in another order.
    ours, by_hand = under_amp(lambda: train(Script())), train(Script(torch.float16))
    assert torch.allclose(ours, by_hand, rtol=0, atol=1e-6)


def test_small_gradients_survive() -> None:
    """Without a scale they would be zero in float16."""

    def script() -> Tensor:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        _optimizer = torch.optim.SGD(model.parameters())
        (model(torch.ones(1, 4)).sum() * 1e-8).backward()
        return model[0].weight.grad

    assert under_amp(script).abs().min() > 0
    with halfstep.autocast("cpu", torch.float16):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        loss = model(torch.ones(1, 4)).float().sum() * 1e-8
    loss.backward()
    assert model[0].weight.grad.abs().max() == 0


# --- several backward passes, optimizers, models --------------------------------------------------


def sgd_by_hand(model: nn.Module, steps: int = 60) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - 10 * x[:, :3]).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.05 * param.grad
                param.grad = None
        losses.append(loss.item())
    return losses


def test_steps_by_hand_write_no_nan_into_the_weights() -> None:
    said: list[str] = []
    model = seeded(Net)
    with mixed_precision(torch.float16, said.append):
        losses = sgd_by_hand(model)
    assert all(param.isfinite().all() for param in model.parameters())
    in_float32 = sgd_by_hand(seeded(Net))
    assert losses[-1] == pytest.approx(in_float32[-1], rel=0.05)
    (message,) = said
    assert "no optimizer of torch.optim was made" in message
    assert "models run in float32 from here on" in message


def test_bad_gradients_of_steps_by_hand_are_zero() -> None:
    said: list[str] = []
    model = seeded(lambda: Explosive({1}))
    before = copy.deepcopy(model.state_dict())
    with mixed_precision(torch.float16, said.append):
        sgd_by_hand(model, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert said[1].endswith("were inf or NaN in float16, and were set to zero")


def test_a_first_optimizer_brings_the_lower_precision_back() -> None:
    dtypes = []

    def script() -> None:
        model = seeded(Net)
        model.head.register_forward_hook(lambda _, args, y: dtypes.append(y.dtype))
        sgd_by_hand(model, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step_on(optimizer, model(torch.ones(2, 8)).mean())

    under_amp(script)
    assert dtypes == [torch.float16, torch.float32, torch.float16]


def test_a_model_beside_one_with_an_optimizer_is_not_scaled() -> None:
    said: list[str] = []
    first, second = seeded(Net), seeded(Net)
    with mixed_precision(torch.float16, said.append):
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            step_on(optimizer, first(torch.ones(2, 8)).square().mean())
            sgd_by_hand(second, 1)
    assert all(param.isfinite().all() for param in second.parameters())
    assert any("no optimizer has the parameters of a backward pass" in each for each in said)


def test_gradients_that_no_backward_pass_makes() -> None:
    """torch.autograd.grad is not scaled: a script that steps by it alone is in float32."""
    said: list[str] = []
    dtypes = []
    model = seeded(Net)
    model.head.register_forward_hook(lambda _, args, y: dtypes.append(y.dtype))
    with mixed_precision(torch.float16, said.append):
        for _ in range(2):
            loss = model(torch.ones(2, 8)).mean()
            torch.autograd.grad(loss, list(model.parameters()))
    assert dtypes == [torch.float16, torch.float32]
    assert len(said) == 1


def accumulated(script: Script) -> nn.Module:
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(labelled(12)):
        with script.autocast():
            loss = F.cross_entropy(model(x).float(), y) / 3
        with torch.set_grad_enabled(script.dtype is not None or index != 1):  # as SAMs do it
            script.backward(loss)
        if index % 3 == 2:
            script.unscale(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            script.step(optimizer)
            optimizer.zero_grad(set_to_none=index % 2 == 0)
    return model


def gan(script: Script) -> nn.Module:
    g = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    d = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (g, d))
    bce = nn.BCELoss()
    for real, _ in labelled(5):
        opt_d.zero_grad()
        # By hand the sigmoid and the loss are kept out of autocast, where BCELoss is refused.
        with script.autocast():
            fake = g(torch.ones(16, 4)).float()
            on_real, on_fake = d(real), d(fake.detach())
        loss = bce(on_real.float().sigmoid(), torch.ones(16, 1))
        script.backward(loss + bce(on_fake.float().sigmoid(), torch.zeros(16, 1)))
        script.step(opt_d)
        opt_g.zero_grad()
        with script.autocast():
            on_fake = d(fake)
        script.backward(bce(on_fake.float().sigmoid(), torch.ones(16, 1)))
        script.step(opt_g)
    return nn.ModuleList([g, d])


def in_the_backward_pass(script: Script) -> nn.Module:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = seeded(Net)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in [] if script.dtype else model.parameters():
        param.register_post_accumulate_grad_hook(step)
    together = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in labelled(4):
        with script.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        script.backward(loss)
        if script.dtype:
            script.step(together)
            together.zero_grad()
    return model


@pytest.mark.parametrize("train", [accumulated, gan, in_the_backward_pass])
def test_loops_of_other_kinds_are_those_by_hand(train: Callable[[Script], nn.Module]) -> None:
    assert same(under_amp(lambda: train(Script())), train(Script(torch.float16)))


def two() -> tuple[nn.Linear, nn.Linear, Callable[[], list[Any]]]:
    """Return two layers, and what makes their optimizers."""
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    return a, b, lambda: [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]


def loss_of_both(a: nn.Module, b: nn.Module) -> Tensor:
    return (a(torch.ones(1, 2)) + b(torch.ones(1, 2))).sum()


def test_an_overflow_of_one_optimizer_does_not_skip_the_other() -> None:
    a, b, optimizers = two()
    b.weight.register_hook(lambda grad: grad * float("inf"))
    before = [p.clone() for m in (a, b) for p in m.parameters()]

    with mixed_precision(torch.float16, quiet) as scaler:
        opt_a, opt_b = optimizers()
        step_on(opt_a, loss_of_both(a, b) / 4)
        assert scaler.get_scale() == 2.0**16  # b belongs to the same iteration
        opt_b.step()
        assert scaler.get_scale() == 2.0**15
        assert [entry.taken for entry in scaler.history()] == [True, False]

    after = [p for m in (a, b) for p in m.parameters()]
    assert [torch.equal(p, q) for p, q in zip(before, after, strict=True)] == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [Parts, Facade])
def test_a_container_of_optimizers(kind: Any) -> None:
    """One whose ``step`` PyTorch knows decides for all; in another each decides for itself."""

    def script(scaler: halfstep.GradScaler) -> tuple[list[list[bool]], list[float]]:
        model = Net()
        factors = iter([1.0, float("inf"), 1.0])
        model.head.weight.register_hook(lambda grad: grad * next(factors))
        optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model.children()]
        container = kind(optimizers)
        schedules = [LambdaLR(each, lambda count: 0.5**count) for each in optimizers]
        moved = []
        for x, y in labelled(3):
            container.zero_grad()
            F.cross_entropy(model(x), y).backward()
            before = [weight.clone() for weight in (model.body[0].weight, model.head.weight)]
            container.step()
            assert scaler.get_scale() == 2.0 ** (16 if not moved else 15)  # it has moved at once
            for schedule in schedules:
                schedule.step()
            weights = (model.body[0].weight, model.head.weight)
            moved.append([not torch.equal(*pair) for pair in zip(before, weights, strict=True)])
        return moved, [each.param_groups[0]["lr"] for each in optimizers]

    with mixed_precision(torch.float16, quiet) as scaler:
        moved, rates = seeded(lambda: script(scaler))
    if kind is Parts:
        assert moved == [[True, True], [False, False], [True, True]]
        assert rates == [0.25, 0.25]
    else:
        assert moved == [[True, True], [True, False], [True, True]]
        assert rates == [0.125, 0.25]


def test_the_scale_moves_once_for_all_optimizers_of_a_loss() -> None:
    a, b, optimizers = two()

    with mixed_precision(torch.float16, quiet) as scaler:
        opt_a, opt_b = optimizers()
        loss_of_both(a, b).backward()  # overflows
        opt_a.step()
        opt_b.step()
        assert scaler.get_scale() == 2.0**15


def test_the_scale_moves_once_if_an_optimizer_is_made_after_the_backward_pass() -> None:
    a, b, _ = two()
    before = b.weight.detach().clone()

    with mixed_precision(torch.float16, quiet) as scaler:
        opt_a = torch.optim.SGD(a.parameters(), lr=0.1)
        loss_of_both(a, b).backward()  # overflows
        opt_a.step()
        torch.optim.SGD(b.parameters(), lr=0.1).step()
        assert scaler.get_scale() == 2.0**15

    assert torch.equal(b.weight, before)


def test_gradients_that_were_replaced_before_another_step() -> None:
    a, b, optimizers = two()
    before = b.weight.detach().clone()

    with mixed_precision(torch.float16, quiet):
        opt_a, opt_b = optimizers()
        (loss_of_both(a, b) / 4).backward()
        for param in b.parameters():
            param.grad = param.grad * float("inf")
        opt_a.step()
        opt_b.step()

    assert torch.equal(b.weight, before)


def test_the_scale_moves_before_the_next_loss_at_the_latest() -> None:
    a, b, optimizers = two()

    with mixed_precision(torch.float16, quiet) as scaler:
        opt_a, _ = optimizers()
        loss_of_both(a, b).backward()  # overflows
        opt_a.step()
        assert scaler.get_scale() == 2.0**16
        a(torch.ones(1, 2)).sum().backward()
        assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_a_generators_loss_leaves_in_its_discriminator_does_not_count(set_to_none):
    d, g = seeded(lambda: nn.Linear(2, 1)), nn.Linear(2, 2)
    x = torch.ones(1, 2)

    with mixed_precision(torch.float16, quiet) as scaler:
        opt_d, opt_g = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (d, g))
        overflow = d.weight.register_hook(lambda grad: grad * torch.inf)
        (d(g(x)).sum() * 2**-10).backward()
        overflow.remove()
        opt_g.step()
        assert scaler.outcome(opt_g).taken
        opt_d.zero_grad(set_to_none=set_to_none)
        step_on(opt_d, d(g(x).detach()).sum() * 2**-10)
        assert scaler.outcome(opt_d).taken
        assert scaler.get_scale() == 2.0**16


def test_an_optimizer_that_accumulates_while_another_steps() -> None:
    a, b = seeded(lambda: nn.Linear(2, 1)), nn.Linear(2, 1)

    def script() -> Tensor:
        opt_a, opt_b = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (a, b))
        start = a.weight.detach().clone()
        for _ in range(4):
            (a(torch.ones(1, 2)).sum() / 4).backward()
            step_on(opt_b, b(torch.ones(1, 2)).sum() / 4)
            opt_b.zero_grad()
        opt_a.step()
        return start - a.weight

    assert torch.allclose(under_amp(script), torch.full((1, 2), 1.0))


# --- skipped steps and schedules ------------------------------------------------------------------


def test_a_skipped_step_changes_nothing() -> None:
    model = seeded(lambda: Explosive({2}))
    x, y = labelled(1)[0]
    rates, weights = [], []
    with mixed_precision(torch.float16, quiet) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda i: 1 / (1 + i))
        for _ in range(3):
            optimizer.zero_grad()
            step_on(optimizer, F.cross_entropy(model(x), y))
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
            weights.append(model.head.weight.detach().clone())

    assert rates == [1 / 2, 1 / 2, 1 / 3]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert [entry.taken for entry in scaler.history()] == [True, False, True]
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_is_skipped_needs_no_warning(fused: bool) -> None:
    model = seeded(lambda: Explosive({1, 2}))
    x, y = labelled(1)[0]

    def script() -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
        schedule = LambdaLR(optimizer, lambda i: 1 / (1 + i))
        rates = []
        for _ in range(3):
            optimizer.zero_grad()
            step_on(optimizer, F.cross_entropy(model(x), y))
            schedule.step()
            rates += schedule.get_last_lr()
        return rates

    assert under_amp(script) == [1, 1, 1 / 2]


def test_a_schedule_of_epochs_is_not_lost_with_the_last_step() -> None:
    model = seeded(lambda: Explosive({3, 4, 5, 6}))
    x, y = labelled(1)[0]

    def script() -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda i: 1 / (1 + i))
        rates = []
        for _ in range(3):
            for _ in range(3):
                optimizer.zero_grad()
                step_on(optimizer, F.cross_entropy(model(x), y))
            schedule.step()
            rates += schedule.get_last_lr()
        return rates

    # The last step of the first epoch was skipped, and all of the second.
    assert under_amp(script) == [1 / 2, 1 / 2, 1 / 3]


def test_other_schedulers_wait_too() -> None:
    model = seeded(lambda: Explosive({1}))
    x, y = labelled(1)[0]

    class Own(LambdaLR):
        def step(self, epoch: Any = None) -> None:
            super().step()

    def script() -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        own = Own(optimizer, lambda i: 1.0)

        class Late(LambdaLR):
            def step(self, epoch: Any = None) -> None:
                self.last_epoch += 1

        late = Late(optimizer, lambda i: 1.0)
        plateau = ReduceLROnPlateau(optimizer)
        parts = [LambdaLR(optimizer, lambda i: 1.0) for _ in range(2)]
        sequence = SequentialLR(optimizer, parts, [5])
        counts = []
        for _ in range(2):
            optimizer.zero_grad()
            step_on(optimizer, F.cross_entropy(model(x), y))
            for schedule in (own, late, sequence):
                schedule.step()
            plateau.step(1.0)
            counts.append([s.last_epoch for s in (own, late, plateau, sequence, parts[0])])
        return counts

    assert under_amp(script) == [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_what_overflowed_is_skipped_though_more_was_added() -> None:
    model = seeded(lambda: Explosive({1}))
    x, y = labelled(1)[0]

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        F.cross_entropy(model(x), y).backward()
        clamp(model.parameters())
        for param in model.parameters():
            param.grad.nan_to_num_()
        step_on(optimizer, F.cross_entropy(model(x), y))

    under_amp(script)
    assert same(model, seeded(Net))


@pytest.mark.parametrize("change", [clamp, lambda ps: [p.grad.nan_to_num_(0, 1, -1) for p in ps]])
def test_what_overflowed_is_skipped_though_it_was_made_finite(change: Any) -> None:
    model = seeded(lambda: Explosive({1}))
    x, y = labelled(1)[0]
    before = model.head.weight.detach().clone()

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        F.cross_entropy(model(x), y).backward()
        change(model.parameters())
        optimizer.step()

    under_amp(script)
    assert torch.equal(model.head.weight, before)


def test_gradients_that_a_script_replaces_are_checked() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def script(factor: float) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() / 4).backward()
        for param in model.parameters():
            param.grad = param.grad * factor
        optimizer.step()
        return before - model.weight

    assert under_amp(lambda: script(float("inf"))).abs().max() == 0
    assert torch.allclose(under_amp(lambda: script(4.0)), torch.ones(1, 2))


def test_gradients_of_the_script_itself_are_left_alone() -> None:
    """``torch.autograd.grad`` is not scaled, and a step of what it returned is PyTorch's own."""
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def script() -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        grads = torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
        return before - model.weight

    assert torch.allclose(under_amp(script), torch.ones(1, 2))


def test_a_gradient_penalty_has_the_unit_of_the_loss() -> None:
    def script() -> list[Tensor]:
        model = mlp(4, 8, 1)
        x = torch.ones(2, 4, requires_grad=True)
        y = model(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        ((y + grad.square().sum()) / 64).backward()
        return [p.grad for p in model.parameters()]

    for ours, exact in zip(under_amp(script), script(), strict=True):
        assert torch.allclose(ours, exact, atol=1e-4, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_a_backward_pass_that_is_differentiated_again() -> None:
    weight = nn.Parameter(torch.full((1,), 3.0))

    def script() -> float:
        (weight**3).sum().backward(create_graph=True)
        grad = weight.grad
        weight.grad = None
        grad.sum().backward()
        return weight.grad.item()

    assert under_amp(script) == 18.0


# --- closures -------------------------------------------------------------------------------------


def lbfgs(script: Script, model: nn.Module) -> list[float | None]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    losses = []
    for x, y in labelled(3):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            with script.autocast():
                loss = F.cross_entropy(model(x).float(), y)
            script.backward(loss)
            return loss

        loss = script.step(optimizer, closure)
        losses.append(loss.item() if loss is not None else None)
    return losses


def test_lbfgs_is_that_by_hand() -> None:
    ours, by_hand = seeded(Net), seeded(Net)

    assert under_amp(lambda: lbfgs(Script(), ours)) == lbfgs(Script(torch.float16), by_hand)
    assert same(ours, by_hand)


def test_a_skipped_step_with_a_closure_returns_the_loss() -> None:
    model, start = seeded(lambda: Explosive({1, 2, 3})), seeded(Net)

    losses = under_amp(lambda: lbfgs(Script(), model))

    assert same(model, start)
    assert all(isinstance(loss, float) for loss in losses)


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_adds_to_gradients_from_before(keyword: bool) -> None:
    """As Lightning does it when it accumulates."""
    model = seeded(lambda: nn.Linear(2, 1))
    before = model.weight.detach().clone()

    def closure() -> Tensor:
        loss = model(torch.ones(1, 2)).sum() / 2
        loss.backward()
        return loss

    def script() -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        closure()
        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert isinstance(loss, Tensor)
        return before - model.weight

    assert torch.allclose(under_amp(script), torch.ones(1, 2))


class Sharpness(torch.optim.Optimizer):
    """SAM: a step up with the gradients, then the closure, then the step of another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        before = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=0.1)
        with torch.enable_grad():
            closure()
        for p, old in zip(params, before, strict=True):
            p.copy_(old)
        self.inner.step()


def test_an_optimizer_around_another_switches_the_scaling_off() -> None:
    def script() -> Net:
        model = seeded(Net)
        optimizer = Sharpness(model.parameters(), lr=0.1)
        for x, y in labelled(4):

            def closure(x: Tensor = x, y: Tensor = y) -> None:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()

            closure()
            optimizer.step(closure)
        return model

    said: list[str] = []
    with mixed_precision(torch.float16, said.append) as scaler:
        ours = script()
    exact = script()

    assert scaler.history() == []
    assert [text.partition(" uses")[0] for text in said] == ["--amp fp16: Sharpness.step(closure)"]
    for p, q in zip(ours.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-3)


class OwnPasses(torch.optim.Optimizer):
    """Such as GSAM: ``step`` takes no closure, and runs backward passes in it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.loss_of: Callable[[], Tensor]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.zero_grad()
        for _ in range(2):
            with torch.enable_grad():
                loss = self.loss_of()
            loss.backward()
        self.inner.step()


@pytest.mark.parametrize("calls", [set(), {1}])
def test_an_optimizer_with_backward_passes_of_its_own_is_not_scaled(calls: set[int]) -> None:
    def script() -> nn.Module:
        model = seeded(lambda: Explosive(calls) if calls else Net())
        optimizer = OwnPasses(model.parameters(), lr=0.1)
        for x, y in labelled(3):
            optimizer.loss_of = lambda x=x, y=y: F.cross_entropy(model(x), y)  # type: ignore[misc]
            optimizer.step()
        return model

    said: list[str] = []
    with mixed_precision(torch.float16, said.append):
        ours = script()
    assert [text.partition(" runs")[0] for text in said] == ["--amp fp16: OwnPasses.step()"]
    assert all(p.isfinite().all() for p in ours.parameters())
    for p, q in zip(ours.parameters(), script().parameters(), strict=True):
        assert calls or torch.allclose(p, q, atol=2e-3)


def test_an_optimizer_around_another_takes_no_step_with_inf() -> None:
    model = seeded(lambda: Explosive({1}))
    x, y = labelled(1)[0]

    def closure() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    with mixed_precision(torch.float16, quiet):
        optimizer = Sharpness(model.parameters(), lr=0.1)
        closure()
        optimizer.step(closure)
        assert same(model, seeded(Net))
        closure()
        optimizer.step(closure)
        assert not same(model, seeded(Net))


def test_an_optimizer_that_steps_at_each_gradient() -> None:
    def script() -> nn.Module:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(_: nn.Parameter) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            (model(torch.ones(2, 4)).mean() / 100).backward()
        return model

    for ours, theirs in zip(under_amp(script).parameters(), script().parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
