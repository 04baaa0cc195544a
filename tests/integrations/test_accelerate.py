"""halfstep's scaler in an Accelerator, against loops written by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.by_hand import recorded_by_itself, share_right
from tests.training import assert_same, batches, mlp
from torch import Tensor

import halfstep
from halfstep.errors import CallOrderError

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402

from halfstep.integrations.accelerate import use_scaler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def accelerator_of(precision: str = "fp16", **options: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(mixed_precision=precision, cpu=True, **options)


def with_a_bad_one() -> list[Tensor]:
    x = batches(6, 4, 8)
    x[2][0] = math.nan
    return x


def test_trains_as_a_loop_does() -> None:
    accelerator = accelerator_of()
    scaler = use_scaler(accelerator, halfstep.GradScaler(init_scale=512.0))
    assert accelerator.scaler is scaler
    model = mlp(8, 16, 1, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    prepared, stepping, moving = accelerator.prepare(model, optimizer, schedule)
    dtypes, skipped = set(), []
    for x in with_a_bad_one():
        stepping.zero_grad()
        with accelerator.autocast():
            dtypes.add(model[0](x).dtype)
        accelerator.backward(prepared(x).square().mean())
        accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
        stepping.step()
        moving.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert dtypes == {torch.float16}
    assert skipped == [False, False, True, False, False, False]
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**5

    reference = mlp(8, 16, 1, seed=1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = halfstep.GradScaler(init_scale=512.0)
    for x in with_a_bad_one():
        optimizer.zero_grad()
        with halfstep.autocast("cpu", torch.float16, policy="torch"):
            loss = reference(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if scaler.outcome(optimizer).taken:
            schedule.step()
    assert_same(model.parameters(), reference.parameters())


def test_without_it_a_cpu_trains_in_float32() -> None:
    """What use_scaler is for on a CPU; fails when accelerate changes that."""
    accelerator = accelerator_of()
    assert accelerator.scaler is None
    with accelerator.autocast():
        assert mlp(8, 16, 1, seed=1)(torch.ones(1, 8)).dtype is torch.float32


def test_takes_the_numbers_of_accelerate() -> None:
    handler = accelerate.GradScalerKwargs(init_scale=64.0, growth_interval=7)
    scaler = use_scaler(accelerator_of(kwargs_handlers=[handler]))
    assert scaler.get_scale() == 64.0
    assert scaler.get_growth_interval() == 7


def test_a_checkpoint_has_the_scaler(tmp_path: Path) -> None:
    for scale in (128.0, 256.0):
        accelerator = accelerator_of()
        scaler = use_scaler(accelerator, halfstep.GradScaler(init_scale=scale))
        model = mlp(8, 16, 1, seed=1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if scale == 128.0:
            accelerator.save_state(str(tmp_path))
        else:
            accelerator.load_state(str(tmp_path))
            assert scaler.get_scale() == 128.0


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"mixed_precision is 'bf16'.*halfstep\.guard"):
        use_scaler(accelerator_of("bf16"))
    with pytest.raises(TypeError, match=r"halfstep\.GradScaler"):
        use_scaler(accelerator_of(), torch.amp.GradScaler("cpu"))
    accelerator = accelerator_of()
    accelerator.prepare(mlp(8, 16, 1, seed=1))
    with pytest.raises(CallOrderError, match="prepare"):
        use_scaler(accelerator)


def test_a_model_that_is_in_float16_may_be_prepared_before() -> None:
    """TRL prepares its reference model when its trainer is made, on a GPU in float16."""
    accelerator = accelerator_of()
    accelerator.native_amp = True  # of itself on a GPU
    accelerator.prepare(mlp(8, 16, 1, seed=1))
    scaler = use_scaler(accelerator)
    model = mlp(8, 16, 1, seed=1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CallOrderError, match="prepare"):
        use_scaler(accelerator, halfstep.GradScaler())
    accelerator.backward(prepared(torch.ones(2, 8)).square().mean())
    optimizer.step()
    assert scaler.counts().taken == 1


def test_a_second_call_keeps_the_scaler() -> None:
    accelerator = accelerator_of()
    scaler = use_scaler(accelerator, halfstep.GradScaler(init_scale=2.0))
    model = mlp(8, 16, 1, seed=1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert use_scaler(accelerator) is use_scaler(accelerator, scaler) is scaler
    with pytest.raises(CallOrderError, match="prepare"):
        use_scaler(accelerator, halfstep.GradScaler())


def test_the_example(tmp_path: Path) -> None:
    printed, run = recorded_by_itself("accelerate_digits", "--steps 60", tmp_path)
    assert "step 21 was skipped\n59 steps taken, 1 skipped\n" in printed
    assert [step.step for step in run.steps if not step.taken] == [21]
    assert share_right(printed) > 0.8
