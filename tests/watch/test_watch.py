"""Training loops that are watched: which steps are diagnosed, and what is replayed of them."""

from __future__ import annotations

import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.training import quiet, take_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep._tools.diagnose.diagnosis import Cure
from halfstep._tools.diagnose.trials import CureTrial
from halfstep._tools.replay.replay import is_replaying
from halfstep._tools.watch import skips
from halfstep._tools.watch.watch import Watch
from halfstep.errors import DiagnosisWarning

pytestmark = pytest.mark.slow

Losses = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Overflows in ``last`` if a batch is large; has batch norm, dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(16, 4)
        self.is_large = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        if self.is_large:
            hidden = hidden * 1e5
        return self.last(hidden)


class Loop:
    """A training loop with a scaler."""

    def __init__(self, loss: Losses = F.cross_entropy, **options: Any) -> None:
        self.model, self.loss = Net(), loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scaler = halfstep.GradScaler(**{"init_scale": 256.0} | options)
        self.told: list[tuple[int, str]] = []
        self.x, self.y = torch.randn(4, 8), torch.arange(4)

    def step(self, *, large: bool = False, num_batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for index in range(num_batches):
            self.model.is_large = large and index == num_batches - 1
            with halfstep.autocast(DEVICE, torch.float16):
                loss = self.loss(self.model(self.x), self.y) / num_batches
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def watched(self, model: nn.Module | None = None) -> Watch:
        def tell(found: object, step: int) -> None:
            self.told.append((step, found.verdict))  # type: ignore[attr-defined]

        return halfstep.diagnose(self.scaler, model=model or self.model, tell=tell)


def large_steps(loop: Loop, large: Iterable[bool]) -> Watch:
    with loop.watched() as watch:
        for is_large in large:
            loop.step(large=is_large)
    return watch


def scaled_losses(
    model: nn.Module, scaler: halfstep.GradScaler, losses: Iterable[Callable[[], Tensor]]
) -> Watch:
    """Do a step with each of the losses, under float16 and a scaler that is watched."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with (
        halfstep.diagnose(scaler, model=model, tell=lambda *_: None) as watch,
        warnings.catch_warnings(action="ignore"),
    ):
        for loss_of in losses:
            with halfstep.autocast(DEVICE, torch.float16):
                loss = loss_of()
            take_step(scaler, optimizer, loss)
    return watch


def scaled_steps(loss: Callable[[Tensor, int], Tensor], num: int, **options: Any) -> Watch:
    """Train a layer, whose step ``i`` has the loss ``loss(out, i)``."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 4), quiet(**options)
    losses = [partial(lambda i: loss(model(torch.ones(2, 4)), i), i) for i in range(num)]
    return scaled_losses(model, scaler, losses)


LOSSES: list[Losses] = [
    F.cross_entropy,
    lambda out, y: F.cross_entropy(out.float(), y),
    lambda out, y: F.cross_entropy(out.view(-1, 4), y) * 0.5,
    nn.CrossEntropyLoss(),
    lambda out, y: (out.float() - 1).square().mean(),
]


@pytest.mark.whole_trials
@pytest.mark.parametrize("loss", LOSSES)
def test_a_bad_step_is_replayed_with_its_loss(loss: Losses) -> None:
    loop = Loop(loss)
    watch = large_steps(loop, [False, False, True, False])
    (found,) = watch.found
    assert loop.told == [(3, "range")]
    assert (found.bad.op, found.bad.module) == ("mul", "")
    assert found.cure.is_finite
    assert found.num_replays > 0


def test_training_is_what_it_is_without_a_watch() -> None:
    def left_by(watched: bool) -> list[Tensor]:
        loop = Loop()
        random.seed(0)
        torch.manual_seed(1)
        steps = [False, True, False, True, True, False]
        if watched:
            assert len(large_steps(loop, steps).found) == 1
        else:
            with warnings.catch_warnings(action="ignore"):
                for is_large in steps:
                    loop.step(large=is_large)
        tensors = [*loop.model.parameters(), *loop.model.buffers(), torch.get_rng_state()]
        tensors += [p.grad for p in loop.model.parameters() if p.grad is not None]
        return [tensor.detach().clone() for tensor in tensors]

    with_watch, without = left_by(True), left_by(False)
    for one, other in zip(with_watch, without, strict=True):
        flat = [each.reshape(-1).view(torch.uint8) for each in (one, other)]
        assert torch.equal(*flat)


def test_each_batch_of_an_accumulation_is_replayed() -> None:
    loop = Loop()
    with loop.watched() as watch:
        loop.step(num_batches=3)
        loop.step(large=True, num_batches=3)
    (found,) = watch.found
    assert found.verdict == "range"


def test_a_loss_that_outgrows_the_scale_is_cured_by_a_smaller_one(monkeypatch):
    monkeypatch.setattr(skips, "SETTLED", 1)
    monkeypatch.setattr(skips, "MOST_FALLS", 0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), torch.ones(5, 4)
    losses = [
        partial(lambda y: F.mse_loss(model(x), y), torch.full((5, 1), target))
        for target in (1.0, 1000.0)
    ]
    watch = scaled_losses(model, halfstep.GradScaler(init_scale=4096.0), losses)
    (found,) = watch.found
    assert (found.verdict, found.scale) == ("scale", 4096.0)
    assert found.cure.is_finite
    assert found.cure.scale is not None
    assert found.cure.scale < 4096


class Pair(tuple[Tensor, ...]):
    """Is not made from an iterable, as a tuple is."""

    def __new__(cls, one: Tensor, other: Tensor) -> Pair:
        return super().__new__(cls, (one, other))


class Named(list[Tensor]):
    def __init__(self, items: Iterable[Tensor], name: str) -> None:
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize(
    "batch", [lambda x: Pair(x, x), lambda x: Named([x], "a"), lambda x: [x], lambda x: (x, None)]
)
def test_batches_in_containers_of_the_user(batch: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, given: Any) -> Tensor:
            out: Tensor = self.layer(given[0])
            return out

    model = Model()
    losses = [
        partial(lambda x: F.mse_loss(model(batch(x)), torch.ones(2, 1)), torch.full((2, 4), value))
        for value in (1.0, math.inf)
    ]
    watch = scaled_losses(model, halfstep.GradScaler(init_scale=16.0), losses)
    (found,) = watch.found
    assert found.verdict == "data"


@pytest.mark.parametrize("num_good", [0, 2])
def test_what_a_hook_keeps_is_made_again_and_put_back(num_good: int) -> None:
    model, kept, seen = nn.Linear(4, 1), dict[str, Tensor](), list[Tensor]()
    signs = iter([1.0] * num_good + [-1.0] * 99)

    def keep(*given: Any) -> None:
        kept["log"] = (next(signs) * given[-1].square()).log()

    model.register_forward_hook(keep)

    def loss_of() -> Tensor:
        model(torch.ones(2, 4))
        seen[:] = [kept["log"]]
        return kept["log"].mean()

    scaler, losses = halfstep.GradScaler(init_scale=16.0), [loss_of] * (num_good + 1)
    (found,) = scaled_losses(model, scaler, losses).found
    assert (found.verdict, found.bad and found.bad.op) == ("maths", "log")
    assert kept["log"] is seen[0]


class Store:
    kept: Tensor


def test_what_a_hook_keeps_in_a_class_is_read_as_data() -> None:
    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda *given: setattr(Store, "kept", -given[-1].square()))

    def loss_of() -> Tensor:
        return (model(torch.ones(2, 4)) * 0 + Store.kept).log().mean()

    (found,) = scaled_losses(model, halfstep.GradScaler(init_scale=16.0), [loss_of]).found
    assert (found.verdict, found.bad and found.bad.op) == ("maths", "log")
    assert isinstance(Store.kept, Tensor)  # the namespace of a class is not written to


def test_a_scale_that_finds_its_place_is_no_fault() -> None:
    loop = Loop(init_scale=2.0**24, growth_interval=4)
    with loop.watched() as watch:
        for _ in range(30):
            loop.step()
    skipped = [entry for entry in loop.scaler.history() if not entry.taken]
    assert skipped  # at the start, and after the scale has grown
    assert watch.found == []


def test_an_overflow_that_no_smaller_scale_cures_is_a_fault_at_the_start_too():
    watch = scaled_steps(lambda out, _: (out.float() * 0).sqrt().sum(), 2, init_scale=16.0)
    (found,) = watch.found
    assert (found.verdict, found.bad.phase, found.bad.forward_op) == ("maths", "backward", "sqrt")


def skipped_in(watch: Watch) -> list[int]:
    """Return the numbers of the skipped steps of the scaler that is watched."""
    (scaler,) = watch._skips
    return [entry.step for entry in scaler.history() if not entry.taken]


def test_a_nan_gradient_of_a_finite_loss_is_told_in_the_first_skip() -> None:
    def loss(out: Tensor, i: int) -> Tensor:
        return (out.float() * float(i != 2)).square().sum(dim=1).sqrt().mean()

    watch = scaled_steps(loss, 4, init_scale=16.0)
    (found,) = watch.found
    assert found.verdict == "maths"
    assert (found.bad.phase, found.ends) == ("backward", ("weight", "bias"))
    assert ".sqrt()" in found.bad.forward_line.text


@pytest.mark.parametrize("late", [0, 1, 9])
def test_an_overflow_long_after_growth_is_no_fault(late: int) -> None:
    def loss(out: Tensor, i: int) -> Tensor:
        is_large = i in (12 + late, 40 + late)  # the scale doubles after each 12 steps
        return out.float().square().mean() * (2.0**15 if is_large else 1.0)

    watch = scaled_steps(loss, 60, init_scale=16.0, growth_interval=12)
    assert skipped_in(watch) == [13 + late, 41 + late]
    assert watch.found == []


def test_gradients_that_have_become_larger_are_no_fault() -> None:
    def loss(out: Tensor, i: int) -> Tensor:
        return out.float().mean() * (2.4e4 if i >= 15 else 1.0)

    watch = scaled_steps(loss, 30, init_scale=64.0)
    assert skipped_in(watch) == [16, 17, 18]
    assert watch.found == []


def test_a_scale_that_falls_on_and_on_is_a_fault() -> None:
    def loss(out: Tensor, i: int) -> Tensor:
        return out.float().mean() * 2.0 ** max(i - 4, 0)  # overflows from step 13 on

    watch = scaled_steps(loss, 16 + skips.MOST_FALLS, init_scale=2.0**10)
    assert len(skipped_in(watch)) > skips.MOST_FALLS
    assert watch.found
    assert watch.found[0].verdict == "scale"


def test_a_late_overflow_that_no_smaller_scale_cures_is_a_fault() -> None:
    def loss(out: Tensor, i: int) -> Tensor:
        return out.float().sum() * (1e6 if i == 15 else 1.0)

    watch = scaled_steps(loss, 20, init_scale=16.0)
    (found,) = watch.found
    assert (found.verdict, found.bad is not None and found.bad.phase) == ("range", "backward")


def test_most_steps_skipped_is_no_search_for_a_scale() -> None:
    def loss(out: Tensor, i: int) -> Tensor:
        return (out.float() * 30).square().mean()  # overflows at half of the scales

    options = {"init_scale": 4096.0, "growth_factor": 256.0, "growth_interval": 1}
    watch = scaled_steps(loss, 60, backoff_factor=0.5, **options)
    assert {found.verdict for found in watch.found} == {"scale"}


def test_without_a_scaler_a_step_is_diagnosed_before_it_is_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    x[1, 1] = math.nan
    with Watch(tell=lambda *_: None) as watch:
        for batch in (torch.ones(2, 4), x):
            optimizer.zero_grad()
            with halfstep.autocast(DEVICE, torch.bfloat16):
                loss = F.mse_loss(model(batch), torch.zeros(2, 1))
            loss.backward()
            optimizer.step()
    (found,) = watch.found
    assert found.verdict == "data"
    # The parameters were good when it was replayed: the batch is named, not a parameter.
    assert found.tensor not in dict(model.named_parameters())
    assert any("the optimizer step before it was finite" in note for note in found.notes)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_whose_closure_makes_the_gradients(make: Any, by_name: bool) -> None:
    """As Lightning steps without a scaler."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = make(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    x[1, 1] = math.nan
    told: list[int] = []
    results = []
    with Watch(tell=lambda _, step: told.append(step)) as watch:
        for batch in (torch.ones(2, 4), x, torch.ones(2, 4)):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch), torch.zeros(2, 1))
                loss.backward()
                return loss

            results.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))
    first = watch.found[0]
    assert told[0] == 2
    assert first.verdict == "data"
    assert first.tensor not in dict(model.named_parameters())
    assert [bool(result.isnan()) for result in results[:2]] == [False, True]


class Ignoring(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class SecondArgument(torch.optim.SGD):
    def step(self, metric: float, closure: Any) -> None:  # type: ignore[override]
        super().step(closure)


def test_a_closure_that_is_never_evaluated() -> None:
    model = nn.Linear(4, 1)
    optimizer = Ignoring(model.parameters(), lr=0.1)
    told: list[int] = []
    with Watch(tell=lambda _, step: told.append(step)) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), math.nan)).mean().backward()
            optimizer.step(lambda: None)
    assert told[0] == 1
    assert watch.found[0].verdict == "data"


def test_calls_of_a_closure_that_is_not_known_are_not_kept() -> None:
    model = nn.Linear(4, 1)
    optimizer = SecondArgument(model.parameters(), lr=0.1)
    with Watch() as watch:
        for _ in range(3):
            optimizer.step(1.0, lambda: model(torch.ones(2, 4)).mean().backward())
        assert not watch._capture.ends


def test_a_forward_that_stood_there_for_one_call() -> None:
    """As Lightning sends a call of DistributedDataParallel to training_step."""

    class Model(nn.Module):  # no forward
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, x: Tensor) -> Tensor:
            return self.net(x).square().mean().sqrt()

    model, watch = Model(), Watch(tell=lambda *_: None)
    original = model.forward

    def redirected(x: Tensor) -> Tensor:
        model.forward = original
        return model.training_step(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch:
        for value in (1.0, math.nan):
            model.forward = redirected
            model(torch.full((2, 4), value)).backward()
            optimizer.step()
    (found,) = watch.found
    assert found.verdict == "data"
    assert found.bad.module == "net"
    assert model.forward == original


def test_what_cannot_be_replayed_is_traced_live_in_the_next_bad_step() -> None:
    class Once(Net):
        """Is large in the second and the third call, and in no replay of them."""

        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Once.num_calls += not is_replaying()
            self.is_large = not is_replaying() and Once.num_calls in (2, 3)
            return super().forward(x)

    loop = Loop()
    loop.model = Once()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    watch = large_steps(loop, [False, False, False, False])
    (found,) = watch.found
    assert loop.told == [(3, "range")]
    assert found.num_replays == 0
    assert found.bad.op == "mul"
    assert "hidden * 1e5" in found.bad.line.text
    assert any("live" in note for note in found.notes)
    assert any("its replay was finite" in note for note in found.notes)


def test_a_gradient_that_a_replay_did_not_write_is_not_its_result() -> None:
    """As of a weight that is frozen after its backward pass: at scale 1 nothing was bad."""
    loop, large = Loop(init_scale=2.0**16), torch.tensor([[100.0], [-100.0]]).half()
    model = nn.ParameterDict({"weight": torch.ones(8)})  # read by the loop itself
    loop.optimizer.add_param_group({"params": (weight := model["weight"])})
    with loop.watched(model) as watch, warnings.catch_warnings(action="ignore"):
        for _ in range(4):
            loop.optimizer.zero_grad()
            weight.requires_grad_(True)
            loss = (weight.half() * large).float().mean() + loop.model(loop.x).mean()
            loop.scaler.scale(loss).backward()
            weight.requires_grad_(False)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    assert (watch.found, loop.scaler.get_scale() < 2.0**16) == ([], True)


@pytest.mark.parametrize("kind", ["not replayed", "left out", "search for a scale"])
def test_buffers_that_a_skipped_step_made_bad_are_not_told_as_the_next_steps(kind: str) -> None:
    class Normed(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert is_search or not is_replaying()
            seen = self.norm(self.first(x))
            return self.last(self.first(x.nan_to_num()) if is_search else seen)

    is_search = kind == "search for a scale"
    loop = Loop(init_scale=2.0**24 if is_search else 256.0)
    loop.model, (x, told) = Normed(), (loop.x, loop.told)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    with loop.watched() as watch, warnings.catch_warnings(action="ignore"):
        for number in range(1, 15):
            loop.x = x.clone()
            loop.x[1] *= math.nan if number == 2 else 1.0
            if kind != "left out" or loop.model(loop.x).sum().isfinite():
                loop.step()
    (found,) = watch.found
    assert told == [(2, "data")]
    assert ("the loss of this step is finite" in str(found)) == is_search


def test_a_gradient_that_no_op_wrote_is_not_called_an_old_one() -> None:
    """As one that DistributedDataParallel writes: the iteration began without gradients."""

    def write(param: Tensor) -> None:
        bucket.numpy()[:] = values[-1]
        param.grad = bucket

    loop, values, bucket = Loop(), [1.0], torch.zeros(16, 8)
    loop.model.first.weight.register_post_accumulate_grad_hook(write)
    with loop.watched() as watch:
        loop.step()
        values.append(math.nan)
        loop.step()
    (found,) = watch.found
    assert (found.verdict, found.tensor, found.cure) == ("unknown", None, None)


def test_live_tracing_leaves_the_modes_of_the_user_alone() -> None:
    class Counting(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.num += 1
            return func(*args, **(kwargs or {}))

    loop = Loop(lambda out, y: F.cross_entropy(out, y))
    with Counting(), loop.watched() as watch:
        loop.step()
        loop.x.requires_grad_(False)
        loop.step(large=True)
    assert Counting.num > 0
    assert len(watch.found) == 1


def test_modes_for_functions_are_seen_by_replays_too() -> None:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    loop = Loop()
    with Doubling():
        assert len(large_steps(loop, [False, True]).found) == 1


def test_a_place_is_told_once() -> None:
    loop = Loop()
    large_steps(loop, [False, True, False, True, True])
    assert loop.told == [(2, "range")]


def _root(out: Tensor, i: int) -> Tensor:
    if i == 3:
        return (out.float() * 0).log().sum()  # another place, which is told
    return (out.float() * 0).sqrt().sum()


@pytest.mark.parametrize(
    ("loss", "verdicts"),
    [
        (_root, ["maths", "maths"]),
        (lambda out, i: (out.half() * 1e5).float().sum(), ["range"]),
        (lambda out, i: out.float().sum() * (1e3 if i else 1.0), ["scale"]),
    ],
)
def test_a_cure_is_searched_once_for_each_place(
    loss: Callable[[Tensor, int], Tensor], verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skips, "SETTLED", 1)
    monkeypatch.setattr(skips, "MOST_FALLS", 0)
    trials, judged = [0], CureTrial.judged

    def counted(self: CureTrial, cure: Cure, *args: Any, **changes: Any) -> Cure:
        trials[0] += 1
        return judged(self, cure, *args, **changes)

    monkeypatch.setattr(CureTrial, "judged", counted)
    before = dict[int, int]()  # trials before a step

    def noted(out: Tensor, i: int) -> Tensor:
        before.setdefault(i, trials[0])
        return loss(out, i)

    watch = scaled_steps(noted, 5, init_scale=2.0**14)
    nums = before[2], before[3], trials[0]
    assert [found.verdict for found in watch.found] == verdicts
    assert watch._num_tried >= 4
    assert nums[0] == nums[1] > 0
    assert (nums[1] == nums[2]) == (len(verdicts) == 1)


def test_without_a_tell_function_it_is_a_warning() -> None:
    loop = Loop()
    loop.step()
    with pytest.warns(DiagnosisWarning, match=r"step 1 went bad\nrange: `mul`"):
        watched_step(loop)


def watched_step(loop: Loop) -> None:
    with halfstep.diagnose(loop.scaler, model=loop.model):
        loop.step(large=True)


def test_after_the_block_everything_is_as_before() -> None:
    names = [(nn.Module, "__call__"), (F, "cross_entropy"), (torch.autograd, "backward")]
    before = [getattr(owner, name) for owner, name in names]
    loop = Loop()
    large_steps(loop, [False, True])
    assert [getattr(owner, name) for owner, name in names] == before


@pytest.mark.parametrize("is_watch_first", [True, False])
def test_a_record_and_a_watch_end_in_any_order(is_watch_first: bool, tmp_path: Path) -> None:
    """As callbacks of Lightning do."""
    before = torch.autograd.backward, nn.Module.__call__
    contexts = [Watch(tell=lambda *_: None), halfstep.record(tmp_path)]
    if not is_watch_first:
        contexts.reverse()
    for each in contexts:
        each.__enter__()
    for each in contexts:
        each.__exit__(None, None, None)
    assert (torch.autograd.backward, nn.Module.__call__) == before


@pytest.mark.parametrize(
    ("write", "verdict", "said"),
    [
        (lambda grad: grad.div_(0.0), "maths", "the loop wrote to bias.grad"),
        (lambda grad: torch._foreach_div_([grad], 0.0), "unknown", "between unscale_() and step()"),
    ],
)
def test_gradients_that_go_bad_after_unscale_are_reported_at_that_step(
    write: Any, verdict: str, said: str
) -> None:
    """A replay ends with the backward pass, and would be finite."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler(module=model)
    told: list[int] = []
    with halfstep.diagnose(scaler, tell=lambda _, step: told.append(step)) as watch:
        for step in range(1, 7):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step == 5:
                write(model.bias.grad)
            scaler.step(optimizer)
            scaler.update()
    (found,) = watch.found
    assert told == [5]
    assert (found.verdict, found.ends) == (verdict, ("bias",))
    assert said in str(found)


def test_the_norms_of_a_clip_are_not_from_before_the_step() -> None:
    """Of finite gradients it is inf, and inf / inf is NaN. PyTorch returns a list of scalars."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(tell=lambda *_: None) as watch:
        for step in range(1, 5):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).mean() * (1e22 if step == 3 else 1.0)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, foreach=True)
            optimizer.step()
            assert norm.isfinite() or step >= 3
    (found,) = watch.found
    assert (found.verdict, found.tensor) == ("unknown", None)
    assert "what linalg_vector_norm returned" in str(found)


def test_a_place_in_one_of_several_models_says_in_which() -> None:
    models = [nn.Sequential(nn.Linear(4, 1)) for _ in range(2)]
    with Watch(tell=lambda *_: None) as watch:
        for model in models:
            model(torch.ones(2, 4))
    names = [watch._capture.log.full_name("0", model) for model in models]
    assert names == ["Sequential[0].0", "Sequential[1].0"]


def test_a_disabled_scaler_can_be_watched() -> None:
    scaler = halfstep.GradScaler(enabled=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.diagnose(scaler, model=model, tell=lambda *_: None) as watch:
        scaler.scale(F.mse_loss(model(torch.full((2, 4), math.inf)), torch.zeros(2, 1))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [found.verdict for found in watch.found] == ["data"]


def test_evaluation_between_steps_is_not_replayed() -> None:
    loop = Loop()
    with loop.watched() as watch:
        loop.step()
        with torch.no_grad():
            loop.model.eval()(torch.full((2, 8), math.nan))
        loop.model.train()
        loop.step(large=True)
    (found,) = watch.found
    assert found.verdict == "range"


def test_a_teacher_that_is_called_first_is_not_taken_for_the_model() -> None:
    teacher, student, told = nn.Linear(4, 2), nn.Linear(4, 2), []
    nn.init.constant_(teacher.weight, math.nan)
    with Watch(tell=lambda found, step: told.append(found)):
        with torch.no_grad():
            goal = teacher(torch.ones(3, 4))
        (student(torch.ones(3, 4)) - goal).square().mean().backward()
    assert told[0].tensor.startswith("teacher.weight in ")


def test_a_teacher_is_named_when_the_function_that_knows_it_has_returned() -> None:
    names: dict[str, Any] = {"torch": torch, "teacher": nn.Linear(4, 2)}
    nn.init.constant_(names["teacher"].weight, math.nan)
    exec("@torch.no_grad()\ndef goal_of(x):\n    return teacher(x)\n", names)
    student, told = nn.Linear(4, 2), list[halfstep.Diagnosis]()
    with Watch(tell=lambda found, step: told.append(found)):
        goal = names["goal_of"](torch.ones(3, 4))
        (student(torch.ones(3, 4)) - goal).square().mean().backward()
    assert told[0].tensor == "teacher.weight in goal_of (<string>:3)"


def test_predictions_that_the_script_leaves_out_are_no_fault_if_their_data_is_bad() -> None:
    model, told = nn.Linear(4, 2), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(tell=lambda found, step: told.append(found.verdict)):
        for i in range(24):  # more bad ones than are diagnosed
            out = model(torch.full((3, 4), math.nan if i % 2 else 1.0))
            if torch.isnan(out).any():
                continue
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            assert told == []
        for shift in (-1e3, 1e3, -1e3):
            out = torch.sqrt(model(torch.ones(3, 4)) - shift)
            if torch.isfinite(out).all():
                out.square().mean().backward()
    assert told == ["maths"]


def test_a_loss_of_each_entry_that_the_script_leaves_out_is_a_fault() -> None:
    model, told = nn.Linear(4, 2), list[str]()
    with Watch(tell=lambda found, step: told.append(found.verdict)):
        for i in range(3):
            x = torch.full((3, 4), math.nan if i == 1 else 1.0)
            losses = nn.functional.mse_loss(model(x), torch.ones(3, 2), reduction="none")
            if torch.isfinite(losses).all():
                losses.mean().backward()
    assert told == ["data"]


def test_a_number_that_changed_after_its_tensor_was_made_is_not_made_again() -> None:
    model, told, kept = nn.Linear(1, 1), list[str](), deque([3000.0, 5000.0, 7000.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Watch(tell=lambda found, step: told.append(str(found))):
        for _ in range(30):
            out = model(torch.ones(3, 1)) ** 4
            target = torch.tensor(kept)[:, None]
            kept.append("none")  # type: ignore[arg-type]
            optimizer.zero_grad()
            nn.functional.mse_loss(out, target).backward()
            kept.pop()
            optimizer.step()
    assert told
    assert "torch.tensor(kept) reaches" not in told[0]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("to_layout", [Tensor.coalesce, Tensor.to_sparse_csr])
def test_a_sparse_tensor_that_the_loop_makes_is_no_error(to_layout) -> None:
    model, told = nn.Linear(4, 2), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(tell=lambda found, step: told.append(found.verdict)):
        edges = to_layout((torch.eye(6) * 2).to_sparse())
        for i in range(5):
            weights = to_layout(torch.eye(6).to_sparse() * 3)
            out = torch.sparse.mm(edges, model(torch.ones(6, 4))) + weights @ torch.ones(6, 2)
            optimizer.zero_grad()
            torch.log(out.square().sum() * (i != 3)).backward()
            if i != 3:
                optimizer.step()
    assert told == ["maths"]
