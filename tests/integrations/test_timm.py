"""timm: its loss scaler with halfstep's scaler inside, beside timm's own."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.integrations import by_hand
from torch import nn

import halfstep

pytestmark = by_hand.needs("timm")
NAME = "timm_digits"


def trained(num: int) -> by_hand.Trained:
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    example = by_hand.load(NAME)
    model = example["make_model"]()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2)
    schedule = CosineLRScheduler(optimizer, num, t_in_epochs=False)
    done, num_taken = by_hand.Trained([], []), 0
    scaler = halfstep.GradScaler()
    for step, batch in enumerate(example["make_batches"](num)[0], 1):
        one = by_hand.train(model, [batch], optimizer, 1.0, scaler)
        done.losses += one.losses
        if one.skipped:
            done.skipped.append(step)
        num_taken += not one.skipped
        schedule.step_update(num_taken)
    return done


def test_the_example_is_the_loop_by_hand() -> None:
    printed = by_hand.printed_by(NAME, "--steps 60")
    by_hand.assert_printed(printed, trained(60))


def test_a_run_records_the_same(tmp_path: Path) -> None:
    run = by_hand.recorded(NAME, "--steps 30", tmp_path / "run")
    by_hand.assert_recorded(run, trained(30))
    assert [model.name for model in run.models] == ["MlpMixer"]


# --- beside timm's own ----------------------------------------------------------------------------


def step_all(model: nn.Module, loss_scaler, optimizer: torch.optim.Optimizer, **kwargs) -> None:
    parameters = kwargs.pop("parameters", model.parameters)
    for x, y in by_hand.large_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        loss_scaler(loss, optimizer, parameters=parameters(), **kwargs)


@pytest.mark.parametrize(
    "clip",
    [{}, *({"clip_grad": 0.1, "clip_mode": mode} for mode in ("norm", "value", "agc"))],
    ids=str,
)
@pytest.mark.parametrize("part", ["all", "last layer"])
def test_it_trains_as_timms_does(clip: dict[str, object], part: str) -> None:
    import timm.utils

    from halfstep.integrations.timm import NativeScaler

    models = []
    for kind in (NativeScaler, timm.utils.NativeScaler):
        model = by_hand.small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        clipped = model.parameters if part == "all" else model[2].parameters
        step_all(model, kind(device="cpu"), optimizer, parameters=clipped, **clip)
        models.append(model)
    by_hand.assert_close(*models)
    plain = by_hand.small()
    step_all(
        plain, NativeScaler(device="cpu"), torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    )
    is_other = not torch.allclose(plain[2].weight, models[0][2].weight, rtol=1e-3)
    assert is_other == bool(clip)  # it clips


def test_the_norm_is_measured_in_the_pass_that_clips(monkeypatch) -> None:
    from halfstep.integrations.timm import NativeScaler

    def refuse(*_: object) -> None:
        raise AssertionError("a second pass")

    monkeypatch.setattr(halfstep.GradScaler, "unscale_", refuse)
    monkeypatch.setattr(halfstep.GradScaler, "clip_grad_norm_", refuse)
    model = by_hand.small()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    loss_scaler = NativeScaler()
    step_all(model, loss_scaler, optimizer, clip_grad=0.1)
    assert loss_scaler.scaler.outcome(optimizer).norm > 0.1
    step_all(model, loss_scaler, optimizer, clip_grad=0.1, parameters=lambda: None)
    assert loss_scaler.scaler.outcome(optimizer).norm > 0.1


def test_gradients_add_up_until_an_update_is_needed() -> None:
    from halfstep.integrations.timm import NativeScaler

    whole, parts = by_hand.small(), by_hand.small()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (whole, parts)]
    (x, y), *_ = by_hand.large_batches()
    NativeScaler()(F.cross_entropy(whole(x), y), optimizers[0])
    loss_scaler = NativeScaler()
    for number, half in enumerate(zip(x.split(16), y.split(16), strict=True)):
        before = by_hand.weights(parts)
        loss = F.cross_entropy(parts(half[0]), half[1]) / 2
        loss_scaler(loss, optimizers[1], need_update=number == 1)
        if number == 0:
            torch.testing.assert_close(by_hand.weights(parts), before, rtol=0, atol=0)
    by_hand.assert_close(whole, parts)
    assert loss_scaler.scaler.counts().taken == 1


def test_a_bad_batch_harms_neither_weights_nor_optimizer() -> None:
    from halfstep.integrations.timm import NativeScaler

    model = by_hand.small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_scaler = NativeScaler()
    step_all(model, loss_scaler, optimizer, clip_grad=1.0)
    before, state = by_hand.weights(model), copy.deepcopy(optimizer.state_dict())
    for mode in ("norm", "value", "agc"):
        optimizer.zero_grad()
        loss = model(torch.full((2, 8), torch.nan)).sum()
        loss_scaler(loss, optimizer, 1.0, mode, model.parameters())
        assert loss_scaler.scaler.outcome(optimizer).reason is halfstep.Reason.LOSS
    torch.testing.assert_close(by_hand.weights(model), before, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_optimizer_of_the_second_order() -> None:
    import timm.utils
    from timm.optim import Adahessian

    from halfstep.integrations.timm import NativeScaler

    models = []
    for kind in (NativeScaler, timm.utils.NativeScaler):
        model = by_hand.small()
        optimizer = Adahessian(model.parameters(), lr=0.01)
        loss_scaler = kind(device="cpu")
        for x, y in by_hand.large_batches():
            optimizer.zero_grad()
            loss_scaler(F.cross_entropy(model(x), y), optimizer, create_graph=True)
        models.append(model)
    by_hand.assert_close(*models)


# --- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_of_timm_keep_the_scaler(tmp_path: Path) -> None:
    from timm.models import resume_checkpoint
    from timm.utils import CheckpointSaver

    from halfstep.integrations.timm import NativeScaler

    model = by_hand.small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_scaler = NativeScaler(scaler=halfstep.GradScaler(init_scale=2.0**10, growth_interval=4))
    step_all(model, loss_scaler, optimizer)
    saver = CheckpointSaver(
        model, optimizer, amp_scaler=loss_scaler, checkpoint_dir=tmp_path, recovery_dir=tmp_path
    )
    saver.save_checkpoint(0)

    loaded = NativeScaler()
    resume_checkpoint(by_hand.small(), str(tmp_path / "last.pth.tar"), None, loaded, log_info=False)
    assert loaded.state_dict() == loss_scaler.state_dict()
    assert loaded.scaler.counts() == (6, 0, 0, None)
    assert loaded.scaler.get_scale() == 2.0**11


def test_it_reads_what_timms_has_saved_and_the_reverse() -> None:
    import timm.utils

    from halfstep.integrations.timm import NativeScaler

    scalers = [kind("cpu") for kind in (timm.utils.NativeScaler, NativeScaler)]
    for loss_scaler in scalers:
        model = by_hand.small()
        step_all(model, loss_scaler, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs, ours = scalers
    loaded = timm.utils.NativeScaler("cpu")
    loaded.load_state_dict(ours.state_dict())
    assert loaded.state_dict() == theirs.state_dict()
    loaded = NativeScaler()
    loaded.load_state_dict(theirs.state_dict())
    assert loaded.scaler.get_scale() == ours.scaler.get_scale()
    assert loaded.state_dict_key == theirs.state_dict_key
