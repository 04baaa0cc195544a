"""The schedules as values."""

import dataclasses
import math
from typing import Any

import pytest

from halfstep import GradScaler
from halfstep._scaler.scale_state import Dynamic, Static


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("growth_factor", 0.99, ValueError, "growth_factor is 0.99: it must be >= 1"),
        ("growth_factor", math.nan, ValueError, "growth_factor is nan"),
        ("growth_factor", math.inf, ValueError, "growth_factor is inf"),
        ("growth_factor", True, TypeError, "growth_factor is True"),
        ("growth_factor", "2", TypeError, "growth_factor is '2'"),
        ("backoff_factor", 0.0, ValueError, "backoff_factor is 0.0: it must be > 0 and <= 1"),
        ("backoff_factor", -1, ValueError, "backoff_factor is -1.0: it must be > 0 and <= 1"),
        ("backoff_factor", 1.01, ValueError, "backoff_factor is 1.01: it must be > 0 and <= 1"),
        ("backoff_factor", math.nan, ValueError, "backoff_factor is nan"),
        ("growth_interval", 0, ValueError, "growth_interval is 0: it must lie between 1"),
        ("growth_interval", 2**31, ValueError, "growth_interval is 2147483648: it must lie"),
        ("growth_interval", 2.5, TypeError, "growth_interval is 2.5 .float.: pass a whole number"),
        ("growth_interval", True, TypeError, "growth_interval is True .bool.: pass a whole"),
        ("trials", 8, TypeError, "trials is 8: pass a bool"),
    ],
)
def test_bad_numbers(name: str, value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        Dynamic(**{name: value})


def test_a_schedule_is_a_value() -> None:
    assert dataclasses.replace(Dynamic(), growth_factor=3).growth_factor == 3.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dynamic().growth_interval = 2  # type: ignore[misc]
    assert isinstance(Dynamic(2, 1).growth_factor, float)


def test_a_static_scale_is_given_to_the_scaler() -> None:
    scaler = GradScaler(init_scale=128.0, schedule=Static())
    assert repr(scaler) == "GradScaler(scale=2^7, schedule=Static())"
    with pytest.raises(TypeError):
        Static(128.0)  # type: ignore[call-arg]
