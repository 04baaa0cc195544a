"""Records of training on CUDA: nothing waits for the device, and all numbers arrive."""

from pathlib import Path

import pytest
import torch
from tests.device import no_waits
from tests.record.training import Net

import halfstep
from halfstep._tools.record.read import read_run

pytestmark = pytest.mark.gpu


def loop(num_steps: int, scaler: halfstep.GradScaler, *, fused: bool) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    x = torch.randn(8, 6, device="cuda")
    for _ in range(num_steps):
        optimizer.zero_grad()
        with halfstep.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()


@pytest.mark.parametrize("fused", [True, False])
def test_all_steps_arrive(fused: bool, tmp_path: Path) -> None:
    scaler = halfstep.GradScaler("cuda", init_scale=2.0**30)
    with halfstep.record(tmp_path, every=0):
        loop(200, scaler, fused=fused)
    run, history = read_run(tmp_path), scaler.history()
    assert [s.step for s in run.steps] == [*range(1, 201)]
    assert [(s.taken, s.reason, s.scale) for s in run.steps] == [
        (entry.taken, entry.reason, entry.scale) for entry in history
    ]
    assert all(step.loss is not None for step in run.steps)


def test_steps_that_are_not_sampled_wait_for_nothing(tmp_path: Path) -> None:
    scaler = halfstep.GradScaler("cuda", init_scale=2.0**8)
    with halfstep.record(tmp_path, every=0):
        loop(2, scaler, fused=True)
        with no_waits():
            loop_without_setup(scaler, 150)
    assert len(read_run(tmp_path).steps) == 152


def loop_without_setup(scaler: halfstep.GradScaler, num_steps: int) -> None:
    weight = torch.nn.Parameter(torch.full((64, 64), 0.1, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    for _ in range(num_steps):
        optimizer.zero_grad()
        scaler.scale((weight @ weight).mean()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()


def test_samples_hold_what_is_on_the_device(tmp_path: Path) -> None:
    scaler = halfstep.GradScaler("cuda", init_scale=2.0**8)
    with halfstep.record(tmp_path, every=2):
        loop(4, scaler, fused=True)
    run = read_run(tmp_path)
    assert [sample.step for sample in run.samples] == [1, 2, 4]
    (weight,) = (
        t for t in run.samples[0].tensors if (t.kind, t.name) == ("parameter", "first.weight")
    )
    torch.manual_seed(0)
    assert weight.amax == Net().first.weight.abs().max().item()
