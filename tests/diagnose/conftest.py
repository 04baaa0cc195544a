"""Trials of cures are short, here and in what else imports the fixture."""

import pytest

from halfstep._tools.diagnose import several_steps


@pytest.fixture(autouse=True)
def short_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cure be tried over the fewest steps that count: most of a diagnosis are its trials.

    A test that is marked ``whole_trials`` and `make score` take all of the steps.
    """
    if request.node.get_closest_marker("whole_trials") is None:
        monkeypatch.setattr(several_steps, "MOST_STEPS", several_steps.LEAST_STEPS)
