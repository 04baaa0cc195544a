"""with scaler.accumulate(optimizer), against sums of plain float32 gradients, written out."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.scaler.containers import Wrapper
from tests.training import Overflow, assert_same, batches, fused_or_not, mlp, one_parameter, quiet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError, SkippedStepsWarning

SCALE = 2.0**10
GOOD, OVERFLOW, BAD_LOSS = "good", "overflow", "loss"


def spoil(loss: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == OVERFLOW:
        return Overflow.apply(loss)
    return loss * math.nan if kind == BAD_LOSS else loss


class Training:
    """A small model; its gradients are accumulated over blocks."""

    def __init__(self, fused: bool = False, scale: float = SCALE, **kwargs: Any) -> None:
        self.model = mlp(3, 4, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, fused=fused)
        kwargs = {"on_skips": lambda report: None} | kwargs
        self.scaler = GradScaler(init_scale=scale, **kwargs)
        self.scaler.watch(self.model)

    def loss(self, batch: torch.Tensor, count: int) -> torch.Tensor:
        return self.model(batch).square().mean() / count

    def block(self, batch: torch.Tensor, count: int, kind: str = GOOD) -> None:
        with self.scaler.accumulate(self.optimizer):
            self.scaler.scale(spoil(self.loss(batch, count), kind)).backward()

    def blocks(self, *kinds: str) -> None:
        for batch, kind in zip(batches(len(kinds), 6, 3), kinds, strict=True):
            self.block(batch, len(kinds), kind)

    def finish(self, **kwargs: Any) -> None:
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()
        self.optimizer.zero_grad()

    def iterate(self, *kinds: str, **kwargs: Any) -> None:
        self.blocks(*kinds)
        self.finish(**kwargs)

    def grads(self) -> list[torch.Tensor]:
        return [param.grad.clone() for param in self.model.parameters()]

    def params(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def plain(self, *kinds: str) -> list[torch.Tensor]:
        """The average of the gradients of the good batches, in float32 without a scaler."""
        self.optimizer.zero_grad()
        good = kinds.count(GOOD)
        for batch, kind in zip(batches(len(kinds), 6, 3), kinds, strict=True):
            if kind == GOOD:
                self.loss(batch, good).backward()
        grads = self.grads()
        self.optimizer.zero_grad()
        return grads


assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-8)


# --- nothing is bad ----------------------------------------------------------------------------


@fused_or_not
@pytest.mark.parametrize(("scale", "same"), [(SCALE, assert_same), (1234.5, assert_close)])
def test_as_without_blocks(fused: bool, scale: float, same: Any) -> None:
    """Bit for bit if the scale is a power of two, else but for rounding."""
    mine, without, plain = Training(fused, scale), Training(fused, scale), Training(fused, scale)
    for _ in range(3):
        for batch in batches(4, 6, 3):
            mine.block(batch, 4)
            without.scaler.scale(without.loss(batch, 4)).backward()
            plain.loss(batch, 4).backward()
            same(mine.grads(), plain.grads())
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        mine.finish()
        without.finish()
        same(mine.params(), plain.params())
        same(mine.params(), without.params())
    assert mine.scaler.counts() == (3, 0, 0, None)
    assert mine.scaler.get_scale() == scale


def test_the_scale_grows_by_iterations() -> None:
    training = Training(growth_interval=2)
    scales = []
    for _ in range(4):
        training.iterate(GOOD, GOOD, GOOD)
        scales.append(training.scaler.get_scale())
    assert scales == [SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE]


def test_parameters_without_a_gradient_in_some_blocks() -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler(init_scale=SCALE)
    for loss in (params[0].sum(), params[1].sum() * 2, params[0].sum() * 3):
        with scaler.accumulate(optimizer):
            scaler.scale(loss).backward()
    assert params[2].grad is None
    scaler.step(optimizer)
    scaler.update()
    assert [param[0].item() for param in params] == [-4.0, -2.0, 0.0]


@pytest.mark.parametrize("order", ["ss", "sd", "ds", "sds", "dds"])
def test_sparse_gradients(order: str) -> None:
    """An embedding, in each block with a sparse gradient or with a dense one."""
    rows = torch.tensor([0, 2, 2])
    param, optimizer = one_parameter(torch.zeros(3, 2))
    scaler = GradScaler(init_scale=SCALE)
    expected = torch.zeros(3, 2)
    for number, kind in enumerate([*order, "b"], start=1):
        with scaler.accumulate(optimizer):
            out = torch.nn.functional.embedding(rows, param, sparse=kind == "s")
            loss = out.sum() * number / (len(order) + 1)
            scaler.scale(spoil(loss, OVERFLOW if kind == "b" else GOOD)).backward()
        if kind != "b":
            expected += number / len(order) * torch.tensor([[1.0], [0.0], [2.0]])
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(-param.detach(), expected)


class Storages(TorchDispatchMode):
    """Counts the memory of a certain size that is in use."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() == 4 * self.size:
                ref = StorageWeakRef(x.untyped_storage())
                self.seen[ref.cdata] = ref
        return result

    def count(self) -> int:
        return sum(not ref.expired() for ref in self.seen.values())


def test_one_more_set_of_gradients() -> None:
    """While a block is open, and never more."""
    param, optimizer = one_parameter(torch.zeros(1237))
    scaler = GradScaler(init_scale=SCALE)
    counts = []
    with Storages(1237) as storages:
        for kind in (GOOD, GOOD, OVERFLOW, BAD_LOSS, GOOD):
            with scaler.accumulate(optimizer):
                counts.append(storages.count())
                scaler.scale(spoil(param.sum(), kind)).backward()
                counts.append(storages.count())
            counts.append(storages.count())
    assert counts == [0, 1, 1, *[1, 2, 1] * 4]


# --- something is bad --------------------------------------------------------------------------


@fused_or_not
@pytest.mark.parametrize(
    "kinds",
    [
        (GOOD, GOOD, OVERFLOW, GOOD),
        (OVERFLOW, GOOD, GOOD, GOOD),
        (GOOD, GOOD, GOOD, OVERFLOW),
        (OVERFLOW, OVERFLOW, GOOD, OVERFLOW),
        (GOOD, BAD_LOSS, GOOD),
        (BAD_LOSS, GOOD, OVERFLOW),
    ],
    ids="-".join,
)
def test_a_bad_block_is_dropped_alone(fused: bool, kinds: tuple[str, ...]) -> None:
    """A8."""
    mine, plain = Training(fused), Training(fused)
    for iteration in range(2):
        expected = plain.plain(*kinds)
        mine.blocks(*kinds)
        before = mine.scaler.get_scale()
        mine.scaler.step(mine.optimizer)
        assert_close(mine.grads(), expected)
        mine.scaler.update()
        assert mine.scaler.get_scale() == before / (2 if OVERFLOW in kinds else 1)
        assert mine.scaler.outcome(mine.optimizer).taken
        assert mine.scaler.outcome(mine.optimizer).scale == before
        mine.optimizer.zero_grad()
        for param, grad in zip(plain.model.parameters(), expected, strict=True):
            param.grad = grad
        plain.optimizer.step()
        torch.testing.assert_close(mine.params(), plain.params(), rtol=1e-4, atol=1e-5)
        assert [entry.taken for entry in mine.scaler.history()] == [True] * (iteration + 1)


@fused_or_not
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ((OVERFLOW, OVERFLOW), "overflow"),
        ((BAD_LOSS, BAD_LOSS), "loss"),
        ((BAD_LOSS, OVERFLOW), "overflow"),
        ((OVERFLOW, BAD_LOSS), "overflow"),
        ((OVERFLOW,), "overflow"),
        ((BAD_LOSS,), "loss"),
    ],
)
def test_all_blocks_are_bad(
    fused: bool, max_norm: float | None, kinds: tuple[str, ...], reason: str
) -> None:
    training = Training(fused)
    training.iterate(GOOD)
    before = training.params()
    training.blocks(*kinds)
    training.scaler.step(training.optimizer, max_norm=max_norm)
    training.scaler.update()
    outcome = training.scaler.outcome(training.optimizer)
    assert outcome.reason == reason
    assert outcome.culprits == [name for name, _ in training.model.named_parameters()]
    assert not math.isfinite(outcome.norm)
    assert_same(training.params(), before)
    assert training.scaler.get_scale() == SCALE / 2
    assert training.scaler.counts() == (1, 1, 1, 2)
    training.optimizer.zero_grad()
    training.iterate(GOOD, GOOD)
    assert training.scaler.outcome(training.optimizer).taken
    assert training.scaler.get_scale() == SCALE / (2 if reason == "overflow" else 1)
    assert training.scaler.counts() == (2, 1, 0, None)


def test_a_parameter_that_only_a_dropped_block_had() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    scaler = quiet(init_scale=SCALE)
    for order in [(OVERFLOW, GOOD), (GOOD, OVERFLOW)]:
        for kind in order:
            with scaler.accumulate(optimizer):
                loss = first.sum() if kind == GOOD else first.sum() + second.sum()
                scaler.scale(spoil(loss / 2, kind)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert second.grad is None
        optimizer.zero_grad()
    assert torch.equal(first, torch.full((2,), -2.0))
    assert torch.equal(second, torch.zeros(2))


def test_gradients_that_overflow_only_when_they_are_added() -> None:
    """No block is bad, but the sum is: the step is not taken."""
    param, optimizer = one_parameter(torch.zeros(2))
    scaler = quiet(init_scale=1.0)
    for _ in range(2):
        with scaler.accumulate(optimizer):
            scaler.scale((param * 2.0**127).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.zeros(2))


def test_a_scale_below_one() -> None:
    """A gradient that is finite until it is divided by the scale."""
    param, optimizer = one_parameter(torch.full((2,), 2.0**-20))
    scaler = quiet(init_scale=2.0**-20)
    for factor in (2.0**40, 2.0**-100):
        with scaler.accumulate(optimizer):
            scaler.scale((param * 2.0**100).sum() * factor).backward()
    scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), 2.0**-20 - 2.0))
    scaler.update()


# --- several optimizers ------------------------------------------------------------------------


class Pair:
    """Two parameters, two optimizers, and a loss of both."""

    def __init__(self, fused: bool = False, shared: bool = False) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        first, second = self.params
        self.a = torch.optim.SGD([first], lr=1.0, fused=fused)
        self.b = torch.optim.SGD([first, second] if shared else [second], lr=1.0, fused=fused)
        self.scaler = quiet(init_scale=SCALE)

    def loss(self) -> torch.Tensor:
        return self.params[0].sum() + 2.0 * self.params[1].sum()

    def finish(self) -> list[float]:
        self.scaler.step(self.a)
        self.scaler.step(self.b)
        self.scaler.update()
        return [param[0].item() for param in self.params]


@fused_or_not
def test_blocks_of_two_optimizers(fused: bool) -> None:
    pair = Pair(fused)
    for kind in (GOOD, OVERFLOW, GOOD, GOOD):
        with pair.scaler.accumulate(pair.a), pair.scaler.accumulate(pair.b):
            pair.scaler.scale(spoil(pair.loss() / 4, kind)).backward()
    assert pair.finish() == [-1.0, -2.0]
    assert pair.scaler.get_scale() == SCALE / 2


@fused_or_not
def test_a_bad_loss_in_blocks_of_two_optimizers(fused: bool) -> None:
    """Both blocks see that the loss was bad."""
    pair = Pair(fused)
    for kinds in [(GOOD, BAD_LOSS), (BAD_LOSS, BAD_LOSS)]:
        for kind in kinds:
            with pair.scaler.accumulate(pair.a), pair.scaler.accumulate(pair.b):
                pair.scaler.scale(spoil(pair.loss() / 2, kind)).backward()
        assert pair.finish() == [-1.0, -2.0]
        assert pair.scaler.get_scale() == SCALE / (1 if GOOD in kinds else 2)
        pair.a.zero_grad()
        pair.b.zero_grad()
    assert [entry.reason for entry in pair.scaler.history()] == [None, None, "loss", "loss"]


@fused_or_not
@pytest.mark.parametrize("count", [1, 3])
def test_a_parameter_of_two_optimizers(fused: bool, count: int) -> None:
    """A5: it is unscaled once, and both step with it."""
    pair = Pair(fused, shared=True)
    for _ in range(count):
        with pair.scaler.accumulate(pair.a), pair.scaler.accumulate(pair.b):
            pair.scaler.scale(pair.loss()).backward()
    assert pair.finish() == [-2.0 * count, -2.0 * count]


@fused_or_not
def test_another_optimizer_without_blocks(fused: bool) -> None:
    """Its gradients add up as without blocks, scaled as the loss in the blocks was."""
    pair = Pair(fused)
    pair.scaler.scale(torch.ones(()))
    pair.scaler.update(8.0)
    for _ in range(3):
        with pair.scaler.accumulate(pair.a):
            pair.scaler.scale(pair.loss()).backward()
    assert pair.finish() == [-3.0, -6.0]


def test_a_bad_loss_outside_is_not_forgotten() -> None:
    """One optimizer is skipped for its loss, the other has blocks."""
    pair = Pair()
    pair.scaler.scale(pair.params[1].sum() * math.nan).backward()
    with pair.scaler.accumulate(pair.a):
        pair.scaler.scale(pair.params[0].sum()).backward()
    assert pair.finish() == [-1.0, 0.0]
    assert pair.scaler.outcome(pair.b).reason == "loss"
    assert pair.scaler.get_scale() == SCALE / 2
    # And the other way round: the loss in a block is not taken for a bad one.
    pair.a.zero_grad()
    pair.b.zero_grad()
    pair.scaler.scale(pair.params[1].sum() * math.nan).backward()
    pair.b.zero_grad()
    for kind in (OVERFLOW, GOOD):
        with pair.scaler.accumulate(pair.a):
            pair.scaler.scale(spoil(pair.params[0].sum(), kind)).backward()
    pair.scaler.step(pair.a)


# --- and then ----------------------------------------------------------------------------------


def clipped_by_step(training: Training, max_norm: float) -> float:
    training.scaler.step(training.optimizer, max_norm=max_norm)
    return training.scaler.outcome(training.optimizer).norm


def clipped_by_optimizer(training: Training, max_norm: float) -> float:
    norm = training.scaler.clip_grad_norm_(training.optimizer, max_norm).item()
    training.scaler.step(training.optimizer)
    return norm


def clipped_by_parameters(training: Training, max_norm: float) -> float:
    norm = training.scaler.clip_grad_norm_(training.model.parameters(), max_norm).item()
    training.scaler.step(training.optimizer)
    return norm


def clipped_by_torch(training: Training, max_norm: float) -> float:
    training.scaler.unscale_(training.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), max_norm).item()
    training.scaler.step(training.optimizer)
    return norm


@fused_or_not
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
@pytest.mark.parametrize("kinds", [(GOOD, GOOD), (GOOD, OVERFLOW, GOOD)], ids="-".join)
@pytest.mark.parametrize(
    "clipped", [clipped_by_step, clipped_by_optimizer, clipped_by_parameters, clipped_by_torch]
)
def test_clipping(
    clipped: Callable[[Training, float], float],
    kinds: tuple[str, ...],
    max_norm: float,
    fused: bool,
) -> None:
    """The norm is that of the average over the good blocks."""
    mine, plain = Training(fused), Training(fused)
    for param, grad in zip(plain.model.parameters(), plain.plain(*kinds), strict=True):
        param.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), max_norm).item()
    plain.optimizer.step()
    mine.blocks(*kinds)
    assert clipped(mine, max_norm) == pytest.approx(expected, rel=1e-5)
    mine.scaler.update()
    torch.testing.assert_close(mine.params(), plain.params(), rtol=1e-4, atol=1e-5)
    if clipped is not clipped_by_step:
        norm = math.hypot(*(grad.norm().item() for grad in mine.grads()))
        assert norm == pytest.approx(min(expected, max_norm), rel=1e-4)


@fused_or_not
@pytest.mark.parametrize("kinds", [(GOOD, GOOD), (OVERFLOW, GOOD), (OVERFLOW, OVERFLOW)])
def test_a_wrapper_and_what_it_wraps(fused: bool, kinds: tuple[str, ...]) -> None:
    """A6: accelerate accumulates with its wrapper and steps with the optimizer inside."""
    training = Training(fused)
    inner = training.optimizer
    before = training.params()
    expected = None if GOOD not in kinds else training.plain(*kinds)
    training.optimizer = Wrapper(inner)
    training.blocks(*kinds)
    training.scaler.step(inner)
    training.scaler.update()
    if expected is None:
        assert_same(training.params(), before)
        assert training.scaler.outcome(inner).reason == "overflow"
    else:
        assert_close(training.grads(), expected)
        assert training.scaler.outcome(inner).taken


def test_the_outcome() -> None:
    training = Training()
    training.blocks(GOOD, OVERFLOW, GOOD)
    expected = training.grads()
    training.scaler.step(training.optimizer, max_norm=math.inf)
    training.scaler.update()
    outcome = training.scaler.outcome(training.optimizer)
    norms = [grad.norm().item() * 1.5 for grad in expected]
    assert list(outcome.norms.values()) == pytest.approx(norms, rel=1e-5)
    assert outcome.norm == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert repr(outcome) == f"Outcome(Adam: taken; scale 2^10 -> 2^9; norm {outcome.norm:.4g})"
    (entry,) = training.scaler.history()
    assert entry == (1, "Adam", True, None, SCALE, outcome.norm)
    assert outcome.culprits == []


def test_blocks_that_are_dropped_for_long_are_told_though_steps_are_taken() -> None:
    reports: list[Any] = []
    training = Training(max_consecutive_skips=2, on_skips=reports.append)
    for _ in range(5):
        training.iterate(GOOD, OVERFLOW)
    assert [report.skipped_in_a_row for report in reports] == [2, 4]
    assert {report.optimizers for report in reports} == {()}
    assert "steps 1 to 2 were skipped or taken without some blocks of accumulate()" in str(
        reports[0]
    )
    for _ in range(3):
        training.iterate(OVERFLOW, OVERFLOW)
    assert reports[-1].skipped_in_a_row == 8
    assert len(reports[-1].optimizers) == 1


def test_dropped_blocks_alone_are_no_error() -> None:
    training = Training(max_consecutive_skips=2, on_skips="raise")
    training.iterate(GOOD, OVERFLOW)
    with pytest.warns(SkippedStepsWarning, match="without some blocks"):
        training.iterate(GOOD, OVERFLOW)


def test_with_retry() -> None:
    """All blocks overflow at the first scale, and none at the next."""
    training = Training()
    expected = training.plain(GOOD, GOOD)
    for attempt in training.scaler.retry(training.optimizer, times=3):
        training.blocks(*[OVERFLOW if attempt < 2 else GOOD] * 2)
        if attempt == 2:
            assert_same(training.grads(), expected)
        training.scaler.step(training.optimizer)
        training.scaler.update()
    assert attempt == 2
    assert training.scaler.get_scale() == SCALE / 4


# --- wrong use ---------------------------------------------------------------------------------


class Simple:
    """One parameter whose gradient is 1 in every block."""

    def __init__(self, fused: bool = False) -> None:
        self.param, self.optimizer = one_parameter(torch.zeros(2), fused=fused)
        self.scaler = GradScaler(init_scale=SCALE)

    def block(self, then: Callable[["Simple"], Any] = lambda simple: None) -> None:
        with self.scaler.accumulate(self.optimizer):
            self.backward()
            then(self)

    def backward(self) -> None:
        self.scaler.scale(self.param.sum()).backward()

    def finish(self, expected: float) -> None:
        """Step and update; then a whole iteration without blocks works too."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert torch.equal(self.param, torch.full((2,), expected))
        self.optimizer.zero_grad()
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert torch.equal(self.param, torch.full((2,), expected - 1.0))
        assert self.scaler.get_scale() == SCALE


CALLS: dict[str, Callable[[Simple], Any]] = {
    "unscale_": lambda simple: simple.scaler.unscale_(simple.optimizer),
    "clip_grad_norm_": lambda simple: simple.scaler.clip_grad_norm_(simple.optimizer, 1.0),
    "step": lambda simple: simple.scaler.step(simple.optimizer),
    "step with a closure": lambda simple: simple.scaler.step(
        simple.optimizer, lambda: simple.param.sum()
    ),
    "accumulate": lambda simple: simple.block(),
    "update": lambda simple: simple.scaler.update(),
}
WORDS = {
    "accumulate": r"accumulate\(SGD\): a block of this optimizer is already open",
    "update": r"update\(\): no gradients were checked since",
}


@fused_or_not
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_calls_inside_a_block(call: str, num_before: int, fused: bool) -> None:
    """Nothing happens; whoever catches the error goes on with the block, or leaves it."""
    simple = Simple(fused)
    words = WORDS.get(call, r"a block of accumulate\(SGD\) is open: .* Leave the block before")
    for _ in range(num_before):
        simple.block()
    with pytest.raises(CallOrderError, match=words):
        simple.block(CALLS[call])
    assert torch.equal(simple.param, torch.zeros(2))
    with simple.scaler.accumulate(simple.optimizer):
        simple.backward()
        with pytest.raises(CallOrderError, match=words):
            CALLS[call](simple)
    simple.finish(-1.0 - num_before)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_new_scale_inside_a_block(num_before: int) -> None:
    simple = Simple()
    for _ in range(num_before):
        simple.block()
    with pytest.raises(CallOrderError, match=r"accumulate\(SGD\): update\(\) was called in the"):
        simple.block(lambda simple: simple.scaler.update(SCALE))
    copy.deepcopy(simple.scaler)  # not in the middle of an iteration: it has ended
    simple.optimizer.zero_grad()
    simple.block()
    simple.finish(-1.0)


@fused_or_not
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "step"])
def test_a_block_after_another_call(call: str, fused: bool) -> None:
    simple = Simple(fused)
    simple.block()
    if call != "step":
        CALLS[call](simple)
        words = "its gradients have already been unscaled"
    else:
        simple.scaler.step(simple.optimizer)
        words = r"step\(\) has already been called"
    with pytest.raises(CallOrderError, match=rf"accumulate\(SGD\): {words}"):
        simple.block()
    if call != "step":
        simple.scaler.step(simple.optimizer)
    simple.scaler.update()
    simple.optimizer.zero_grad()
    factor = 1.0 / math.sqrt(2.0) if call == "clip_grad_norm_" else 1.0
    torch.testing.assert_close(simple.param.detach(), torch.full((2,), -factor))


def test_gradients_from_before_the_first_block() -> None:
    simple = Simple()
    simple.backward()
    with pytest.raises(CallOrderError, match=r"from before the first block.*zero_grad"):
        simple.block()
    simple.optimizer.zero_grad()
    simple.block()
    simple.finish(-1.0)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_block_without_backward(num_before: int) -> None:
    simple = Simple()
    for _ in range(num_before):
        simple.block()
    with (
        pytest.raises(CallOrderError, match=r"no loss was scaled in the block\. Call scaler"),
        simple.scaler.accumulate(simple.optimizer),
    ):
        pass
    with (
        pytest.raises(CallOrderError, match="no loss was scaled in the block"),
        simple.scaler.accumulate(simple.optimizer),
    ):
        simple.param.sum().backward()
    with (
        pytest.raises(CallOrderError, match="the block left no gradient"),
        simple.scaler.accumulate(simple.optimizer),
    ):
        simple.scaler.scale(simple.param.sum())
    simple.block()
    simple.finish(-1.0 - num_before)


@pytest.mark.parametrize("num_before", [0, 2])
def test_an_exception_in_a_block(num_before: int) -> None:
    """Even one after a bad loss: the gradients are those of the blocks before."""
    simple = Simple()
    for _ in range(num_before):
        simple.block()
    before = simple.param.grad
    with pytest.raises(ZeroDivisionError):
        simple.block(lambda simple: simple.scaler.scale(simple.param.sum() * math.nan) / (1 // 0))
    assert simple.param.grad is before
    with simple.scaler.accumulate(simple.optimizer):
        simple.scaler.scale(Overflow.apply(simple.param.sum())).backward()
    simple.scaler.step(simple.optimizer)
    simple.scaler.update()
    assert simple.scaler.get_scale() == SCALE / 2  # no bad loss is left behind


def test_float16_gradients() -> None:
    simple = Simple()
    half, optimizer = one_parameter(torch.ones(2, dtype=torch.float16))
    with (
        pytest.raises(ValueError, match="SGD has float16 gradients"),
        simple.scaler.accumulate(optimizer),
    ):
        simple.scaler.scale(half.sum()).backward()
    assert half.grad is None
    simple.block()
    simple.finish(-1.0)


def test_a_backward_outside_the_blocks_is_refused() -> None:
    """It would add scaled gradients to unscaled ones."""
    param, optimizer = one_parameter(torch.zeros(1))
    scaler = GradScaler(init_scale=1024.0)
    with scaler.accumulate(optimizer):
        scaler.scale(param.sum() / 2).backward()
    scaler.scale(param.sum() / 2).backward()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(CallOrderError, match="adds scaled gradients to unscaled ones"):
            call(optimizer)
    assert param.item() == 0.0


def test_no_hook_stays_after_an_update_in_a_block() -> None:
    """Those that notice what is added to gradients unscaled before the block."""
    scaler, param = GradScaler(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    unscaled = torch.nn.Parameter(torch.ones(2))
    scaler.scale(unscaled.sum()).backward()
    scaler.unscale_(torch.optim.SGD([unscaled], lr=1.0))

    def update_in_a_block() -> None:
        with scaler.accumulate(optimizer):
            scaler.scale(param.sum()).backward()
            assert unscaled._post_accumulate_grad_hooks
            scaler.update(2.0)

    with pytest.raises(CallOrderError, match="in the block"):
        update_in_a_block()
    assert not unscaled._post_accumulate_grad_hooks


def test_a_block_that_adds_to_gradients_unscaled_before_it() -> None:
    scaler, (param, other) = GradScaler(), (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = torch.optim.SGD([other], lr=1.0), torch.optim.SGD([param], lr=1.0)
    scaler.scale(other.sum()).backward()
    scaler.unscale_(first)
    with scaler.accumulate(second):
        scaler.scale((param * other).sum()).backward()
    with pytest.raises(CallOrderError, match="1 of 1 are new and still scaled"):
        scaler.step(first)


@pytest.mark.parametrize("is_added_to", [False, True])
def test_a_backward_after_a_block_inside(is_added_to: bool) -> None:
    """Two blocks inside, then a backward pass of the block around them."""
    scaler, (own, shared) = GradScaler(), (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    around = torch.optim.SGD([own, shared], lr=1.0)
    inside = torch.optim.SGD([shared], lr=0.0)

    def accumulate() -> None:
        with scaler.accumulate(around):
            for _ in range(2):
                with scaler.accumulate(inside):
                    scaler.scale(shared.sum()).backward()
            scaler.scale((own + shared if is_added_to else own).sum()).backward()

    if is_added_to:
        with pytest.raises(CallOrderError, match="added scaled gradients"):
            accumulate()
        return
    accumulate()
    scaler.step(around)
    assert [own.tolist(), shared.tolist()] == [[0.0, 0.0], [-1.0, -1.0]]


def test_gradients_put_aside_during_a_block() -> None:
    """What the block adds to them is dropped, as in a GAN that is trained so."""
    scaler, (own, other) = GradScaler(), (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = torch.optim.SGD([other], lr=1.0), torch.optim.SGD([own], lr=1.0)
    scaler.scale(other.sum()).backward()
    scaler.unscale_(first)
    aside, other.grad = other.grad, None
    with scaler.accumulate(second):
        scaler.scale((own * other).sum()).backward()
    other.grad = aside
    scaler.step(first)
    assert other.tolist() == [0.0, 0.0]
