"""What the scaler promises about ops and waits, counted on each simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.device import DEVICE, FACTS_OF
from tests.simulated import device
from tests.simulated.profiles import PROFILES

from halfstep import GradScaler
from halfstep._pytorch import devices

if DEVICE == "cpu":
    pytest.skip("needs --device sim:PROFILE: one process, one device", allow_module_level=True)
from benchmarks import accelerator_ops

WARM_UP = 4
"""In the first three steps of an optimizer the scaler also looks for gradients clipped too early"""

FUSED = [name for name, profile in PROFILES.items() if profile.fused]


@pytest.fixture
def profile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the device of a profile, and tell halfstep its facts."""
    name: str = request.param
    device.use(PROFILES[name])
    monkeypatch.setitem(devices.FACTS, DEVICE, FACTS_OF.get(name, devices.UNKNOWN))
    return name


def waits_of_an_iteration(fused: bool, **kwargs: Any) -> tuple[int, int, int]:
    """Return how often ``scale``, ``step`` and ``update`` wait."""
    parameters = accelerator_ops.parameters()
    optimizer = torch.optim.AdamW(parameters, fused=fused or None)
    scaler = GradScaler(DEVICE)
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        loss = accelerator_ops.loss_of(parameters)
        before = device.waits.total()
        scaled = scaler.scale(loss)
        scale = device.waits.total()
        scaled.backward()
        at_step = device.waits.total()
        scaler.step(optimizer, **kwargs)
        at_update = device.waits.total()
        scaler.update()
    return scale - before, at_update - at_step, device.waits.total() - at_update


@pytest.mark.parametrize("profile", PROFILES, indirect=True)
@pytest.mark.parametrize("kwargs", [{}, {"max_norm": 1.0}])
def test_of_a_plain_iteration_the_step_waits_once(profile: str, kwargs: dict[str, Any]) -> None:
    assert waits_of_an_iteration(False, **kwargs) == (0, 1, 0)


@pytest.mark.parametrize("profile", FUSED, indirect=True)
@pytest.mark.parametrize("kwargs", [{}, {"max_norm": 1.0}])
def test_a_fused_iteration_waits_only_where_no_copy_tells_when_it_has_arrived(profile, kwargs):
    facts = devices.facts(DEVICE)
    can_follow = facts.fused_skips and facts.has_arrivals
    assert sum(waits_of_an_iteration(True, **kwargs)) == (0 if can_follow else 1)


@pytest.mark.parametrize("profile", FUSED, indirect=True)
def test_what_is_read_at_once_after_a_fused_step_has_arrived(profile: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    scaler = GradScaler(DEVICE, init_scale=2.0**10)
    taken = [True, False, True, True, False, False, True, True]
    for number, is_taken in enumerate(taken, 1):
        optimizer.zero_grad()
        scaler.scale((parameter * (1.0 if is_taken else torch.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts = scaler.counts()
        assert counts.taken == sum(taken[:number])
        assert counts.skipped == number - counts.taken
        assert scaler.outcome(optimizer).taken == is_taken


@pytest.mark.parametrize("profile", ["cuda"], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_takes_at_most_four_ops_more_than_torch_amp(profile, max_norm, fused):
    ours = accelerator_ops.step(GradScaler(DEVICE), max_norm, fused=fused)
    theirs = accelerator_ops.step(torch.amp.GradScaler(DEVICE), max_norm, fused=fused)
    assert ours.ops - theirs.ops <= 4
    assert ours.waits <= theirs.waits
