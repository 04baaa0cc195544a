"""Trials of cures are short here and wherever the fixture is; `make score` has them whole."""

import pytest

from halfstep._tools.diagnose import several_steps


@pytest.fixture(autouse=True)
def short_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try cures over the fewest steps that count, unless a test is marked ``whole_trials``."""
    if request.node.get_closest_marker("whole_trials") is None:
        monkeypatch.setattr(several_steps, "MOST_STEPS", several_steps.LEAST_STEPS)
