"""A skipped step leaves no buffer of a watched module inf or NaN.

The yardstick is the same run in which the broken batch never came: after it, all buffers and an
evaluation are equal to the bit.
"""

import copy
import gc
import io
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.training import batches, closure_of, loss_of, train
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from halfstep import GradScaler, autocast, guard

BROKEN = 3
"""The number of the broken batch."""


class Codebook(nn.Module):
    """Vector quantization whose codes follow the inputs, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1.0, 1.0, 12).view(4, 3))
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("num_seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            chosen = nn.functional.one_hot(nearest, 4).to(x.dtype)
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.data.lerp_(chosen.T @ x.detach() / self.sizes[:, None], 0.1)
            self.num_seen += len(x)
        return x + (self.codes[nearest] - x).detach()


class AssignedCodebook(Codebook):
    """A codebook whose storage is replaced, so that the buffer is the same object."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if self.training:
            self.codes.data = self.codes / self.codes.norm()
        return found


class Queue(nn.Module):
    """The last features, in a buffer that is assigned anew, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.eye(6, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue = torch.cat([x.detach(), self.queue])[:6]
        return x + self.queue.mean()


class Observer(nn.Module):
    """The range of the inputs, which begins at inf, as in quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("high", torch.tensor(-math.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low = torch.minimum(self.low, x.detach().min())
            self.high.copy_(torch.maximum(self.high, x.detach().max()))
        return x


class Masked(nn.Module):
    """A mask with -inf in it, beside a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.mask.softmax(-1))


class Causal(nn.Module):
    """A mask that the first call fills, beside a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.is_filled = nn.BatchNorm1d(3), False
        self.register_buffer("mask", torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_filled:
            self.mask.copy_(torch.full((3, 3), -math.inf).triu(1))
            self.is_filled = True
        return self.norm(x @ self.mask.softmax(-1))


class Images(nn.Module):
    """A norm of images, for vectors of 3."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[:, :, None, None].expand(-1, -1, 2, 2) * torch.tensor([1.0, 2.0])).mean(
            (2, 3)
        )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": partial(nn.BatchNorm1d, 3),
    "BatchNorm2d": lambda: Images(nn.BatchNorm2d(3)),
    "BatchNorm with a cumulative average": partial(nn.BatchNorm1d, 3, momentum=None),
    "SyncBatchNorm": partial(nn.SyncBatchNorm, 3),
    "InstanceNorm": lambda: Images(nn.InstanceNorm2d(3, track_running_stats=True)),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3)),
    "codebook": Codebook,
    "codebook with new storage": AssignedCodebook,
    "queue": Queue,
    "observer": Observer,
    "mask": Masked,
}


def net(layer: Callable[[], nn.Module] = LAYERS["BatchNorm1d"]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), layer(), nn.Linear(3, 1))


def one_broken(num: int = 6) -> list[Tensor]:
    found = batches(num, 4, 3)
    found[BROKEN][1, 2] = math.nan
    return found


def without(broken: Sequence[Tensor]) -> list[Tensor]:
    return [batch for batch in broken if batch.isfinite().all()]


def quiet(model: nn.Module | None = None, **kwargs: Any) -> GradScaler:
    return GradScaler(init_scale=8.0, module=model, on_skips=lambda report: None, **kwargs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def result(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers, and what an evaluation gives."""
    with torch.no_grad():
        output = model.eval()(torch.linspace(-1.0, 1.0, 12).view(4, 3))
    return dict(model.named_buffers()) | {"(evaluation)": output}


def assert_same_module(model: nn.Module, other: nn.Module) -> None:
    ours, expected = result(model), result(other)
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(ours[name], values), name
    assert ours["(evaluation)"].isfinite().all()


# --- kinds of buffers -----------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("host_or_device")
def test_the_module_is_as_if_the_broken_batch_had_never_come(layer: str, fused: bool) -> None:
    trained = []
    for data in (one_broken(), without(one_broken())):
        model = net(LAYERS[layer])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        train(model, quiet(model), optimizer, data)
        trained.append(model)
    assert_same_module(*trained)


def test_without_inf_and_nan_nothing_changes(waiting_device: None) -> None:
    trained = []
    for is_watched in (False, True):
        model = net()
        scaler = quiet(model if is_watched else None)
        train(
            model, scaler, torch.optim.AdamW(model.parameters(), fused=True), without(one_broken())
        )
        trained.append(model)
    assert_same_module(*trained)


def test_a_skip_by_overflow_keeps_the_statistics_as_in_pytorch() -> None:
    model, theirs = net(Masked), net(Masked)
    scaler = GradScaler(init_scale=2.0**127, module=model)
    train(model, scaler, sgd(model), without(one_broken()))
    torchs = torch.amp.GradScaler(DEVICE, init_scale=2.0**127)
    train(theirs, torchs, sgd(theirs), without(one_broken()))
    assert scaler.counts().skipped
    assert_same_module(model, theirs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", ["overflow", "NaN"])
def test_a_mask_that_the_first_call_fills_outlives_a_skipped_first_step(
    fused: bool, first: str, waiting_device: None
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Causal()), nn.Linear(3, 1))
    if first == "NaN":
        model.insert(1, nn.BatchNorm1d(3))
        model[2][0].norm = nn.Identity()
    scaler = GradScaler(
        init_scale=8.0 if first == "NaN" else 2.0**127, module=model, on_skips=lambda report: None
    )
    data = one_broken()[BROKEN:] if first == "NaN" else one_broken()[:BROKEN]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    train(model, scaler, optimizer, data)
    assert scaler.counts().skipped
    filled = next(each for each in model.modules() if isinstance(each, Causal))
    assert filled.mask.isinf().sum() == 3
    assert result(model)["(evaluation)"].isfinite().all()


def test_values_that_were_not_finite_before_stay(waiting_device: None) -> None:
    model = net(Masked)
    model.register_buffer("unused", torch.tensor([math.nan, 1.0]))
    train(model, quiet(model), sgd(model), one_broken())
    found = dict(model.named_buffers())
    assert found["unused"].isnan().tolist() == [True, False]
    assert found["1.mask"].isinf().sum() == 3


def test_buffers_of_other_shapes_and_kinds_are_left_alone() -> None:
    model = net()
    model.register_buffer("grows", torch.zeros(1))
    model.register_buffer("gone", torch.zeros(1))
    model.register_buffer("none", None)
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("meta", torch.empty(3, device="meta"))
    model.register_buffer("float8", torch.zeros(3).to(torch.float8_e4m3fn))
    model.register_buffer("complex", torch.zeros(3, dtype=torch.complex64))

    def change(*_: Any) -> None:
        model.grows = torch.full((len(model.grows) + 1,), -math.inf)
        model.gone = None
        model.complex[0] = complex(math.nan, 0.0)

    scaler, optimizer = quiet(model), sgd(model)
    handle = model.register_forward_hook(change)
    train(model, scaler, optimizer, [one_broken()[BROKEN]])
    handle.remove()
    assert len(model.grows) == 2
    assert model.gone is None
    assert model.complex.tolist() == [0, 0, 0]
    assert model[1].running_mean.isfinite().all()


def test_a_tied_buffer_and_a_submodule_added_later_are_restored() -> None:
    model = net()
    scaler, optimizer = quiet(model), sgd(model)
    model.append(nn.BatchNorm1d(1))
    model[1].register_buffer("tied", model[1].running_mean)
    train(model, scaler, optimizer, one_broken())
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert model[1].tied is model[1].running_mean


# --- kinds of loops -------------------------------------------------------------------------------


def test_accumulation_with_one_broken_micro_batch_is_undone_as_a_whole() -> None:
    trained = []
    for windows in ([one_broken(4), without(one_broken(8))[-4:]], [without(one_broken(8))[-4:]]):
        model = net()
        optimizer, scaler = sgd(model), quiet(model)
        for window in windows:
            optimizer.zero_grad()
            for batch in window:
                scaler.scale(model(batch).square().mean() / 4).backward()
            scaler.step(optimizer)
            scaler.update()
        trained.append(model)
    assert_same_module(*trained)


def test_a_step_left_out_after_the_norm_was_seen_is_a_skipped_one() -> None:
    trained = []
    for data in (one_broken(), without(one_broken())):
        model = net()
        optimizer, scaler = sgd(model), quiet(model)
        for batch in data:
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.unscale_(optimizer)
            if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                scaler.step(optimizer)
            scaler.update()
        trained.append(model)
    assert_same_module(*trained)


def test_an_average_between_step_and_update_has_restored_buffers() -> None:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer, scaler = sgd(model), quiet(model)
    for batch in one_broken():
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        average.update_parameters(model)
        scaler.update()
    assert all(buffer.isfinite().all() for buffer in average.buffers())


def test_a_closure_that_fails_at_its_second_evaluation_is_undone() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    scaler = quiet(model)
    good, broken = one_broken()[0], one_broken()[BROKEN]
    before = copy.deepcopy(dict(model.named_buffers()))
    waiting = [good, broken]
    scaler.step(optimizer, closure_of(scaler, lambda: loss_of(model, waiting.pop(0))))
    scaler.update()
    assert scaler.outcome(optimizer).skipped
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_closure_that_raises_is_undone() -> None:
    model = net()
    optimizer, scaler = torch.optim.LBFGS(model.parameters(), lr=0.1), quiet(model)
    before = copy.deepcopy(model.state_dict())
    waiting = one_broken()[2:]

    def closure() -> Tensor:
        loss = model(waiting.pop(0)).square().mean()
        if not loss.isfinite():
            raise ArithmeticError
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(ArithmeticError):
        scaler.step(optimizer, closure)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name


def test_retry_repeats_from_restored_statistics() -> None:
    model = net()
    optimizer = sgd(model)
    scaler = quiet(model)
    for batch in one_broken():
        for _ in scaler.retry(optimizer):
            train(model, scaler, optimizer, [batch])
    assert model[1].num_batches_tracked == 5
    assert result(model)["(evaluation)"].isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_guard_in_bfloat16_restores_too(fused: bool) -> None:
    trained = []
    for data in (one_broken(), without(one_broken())):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        guard(optimizer, on_skips=lambda report: None, module=model)
        for batch in data:
            optimizer.zero_grad()
            with autocast(DEVICE, torch.bfloat16):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
        trained.append(model)
    assert_same_module(*trained)


def test_only_the_models_of_a_skipped_iteration_are_restored() -> None:
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    scaler = quiet(models[0])
    scaler.watch(models[1])
    good, broken = one_broken()[0], one_broken()[BROKEN]
    for batch, model, optimizer in zip((good, broken), models, optimizers, strict=True):
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.outcome(optimizer).taken for optimizer in optimizers] == [True, False]
    assert [model[1].num_batches_tracked.item() for model in models] == [1, 0]
    assert models[1][1].running_mean.isfinite().all()


def test_a_checkpoint_loaded_after_an_evaluation_is_what_a_skipped_step_goes_back_to() -> None:
    model = net()
    optimizer, scaler = sgd(model), quiet(model)
    train(model, scaler, optimizer, one_broken()[:2])
    checkpoint = copy.deepcopy(model.state_dict())
    train(model, scaler, optimizer, one_broken()[:3])
    with torch.no_grad():
        model.eval()(one_broken()[0])
    model.train().load_state_dict(checkpoint)
    train(model, scaler, optimizer, [one_broken()[BROKEN]])
    for name, values in model.state_dict().items():
        if "running" in name or "num" in name:
            assert torch.equal(values, checkpoint[name])


def dry_run(model: nn.Module) -> None:
    model(one_broken()[0])


def average_statistics(model: nn.Module) -> None:
    torch.optim.swa_utils.update_bn([(one_broken()[0],), (one_broken()[1],)], model)


@pytest.mark.parametrize("is_in_training", [False, True])
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("renew", ["checkpoint", "update_bn", "reset"])
def test_a_skipped_step_goes_back_to_what_was_loaded_after_a_call_with_gradients(
    renew: str, is_guarded: bool, is_in_training: bool, waiting_device: None
) -> None:
    model = net()
    optimizer = sgd(model)
    scaler = None if is_guarded else quiet(model)
    guarded = guard(optimizer, on_skips=lambda _: None, module=model) if is_guarded else None

    def step(batch: Tensor) -> None:
        if scaler is not None:
            train(model, scaler, optimizer, [batch])
        else:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    best = copy.deepcopy(model.state_dict())
    for batch in one_broken()[:3]:
        step(batch)
    dry_run(model.train(is_in_training))
    model.train()
    if renew == "checkpoint":
        model.load_state_dict(best)
    elif renew == "update_bn":
        average_statistics(model)
    else:
        model[1].reset_running_stats()
    expected = copy.deepcopy(dict(model.named_buffers()))
    step(one_broken()[BROKEN])
    assert (scaler or guarded).counts().skipped == 1
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("layer", ["BatchNorm1d", "queue", "codebook with new storage"])
@pytest.mark.parametrize("order", [(0, BROKEN), (BROKEN, 0)])
def test_a_loss_of_two_calls_leaves_no_nan(layer, order, waiting_device):
    model = net(LAYERS[layer])
    scaler, optimizer = quiet(model), sgd(model)
    train(model, scaler, optimizer, one_broken()[:2])
    first, second = (one_broken()[number] for number in order)
    scaler.scale((model(first) - model(second)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.counts().skipped == 1
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_training_goes_on_from_a_checkpoint_as_without_one() -> None:
    trained = []
    for is_resumed in (False, True):
        model = net()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), quiet(model)
        train(model, scaler, optimizer, one_broken()[:2])
        if is_resumed:
            states = model.state_dict(), scaler.state_dict()
            model = net()
            optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), quiet(model)
            model.load_state_dict(states[0])
            scaler.load_state_dict(states[1])
        train(model, scaler, optimizer, one_broken()[2:])
        trained.append(model)
    assert_same_module(*trained)


def test_the_graph_of_another_loss_survives() -> None:
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), quiet(model)
    kept = model(one_broken()[0]).square().mean()
    train(model, scaler, optimizer, [one_broken()[BROKEN]])
    scaler.scale(kept).backward()


# --- what the hook leaves alone -------------------------------------------------------------------


def test_copies_and_pickles_of_the_module_need_no_halfstep() -> None:
    model = net()
    scaler = quiet(model)
    train(model, scaler, sgd(model), one_broken()[:1])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert b"halfstep" not in pickle.dumps(model)
    for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(each.eval()(one_broken()[0]), model.eval()(one_broken()[0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_can_be_scripted_after_its_guard_is_removed() -> None:
    model = net()
    guarded = guard(sgd(model), module=model)
    with pytest.raises(AttributeError, match=r"guard\.remove\(\)"):
        torch.jit.script(model)
    guarded.remove()
    assert not model._forward_pre_hooks
    assert torch.equal(torch.jit.script(model)(one_broken()[0]), model(one_broken()[0]))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([type(each) for each in model.modules()]):
        torch.load(file, weights_only=True)


def test_the_hook_goes_with_the_scaler() -> None:
    model = net()
    scaler = quiet(model)
    assert model._forward_pre_hooks
    del scaler
    gc.collect()
    assert not model._forward_pre_hooks


def test_a_module_without_buffers_gets_no_hook() -> None:
    model = nn.Linear(3, 1)
    scaler = quiet(model)
    assert not model._forward_pre_hooks
    assert scaler.is_enabled()


@pytest.mark.parametrize("is_outer_watched", [False, True])
def test_compiled_modules_are_restored(is_outer_watched: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Net()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    scaler = quiet(compiled if is_outer_watched else model)
    train(compiled, scaler, sgd(model), one_broken())
    assert model.net[1].num_batches_tracked == 5
    assert result(model)["(evaluation)"].isfinite().all()


def call_parts(model: nn.Module, x: Tensor) -> Tensor:
    for part in model:
        x = part(x)
    return x


def test_a_module_whose_parts_are_called_goes_back_to_the_end_of_the_last_iteration() -> None:
    trained = []
    for data in (one_broken(), without(one_broken())):
        model = net()
        scaler, optimizer = quiet(model), sgd(model)
        train(partial(call_parts, model), scaler, optimizer, data)
        trained.append(model)
    assert_same_module(*trained)
