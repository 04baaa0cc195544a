"""The rules as values, and the arithmetic of LogMax."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep import GradScaler
from halfstep._scaler.rules import (
    LARGEST_HEADROOM,
    RULES,
    Dynamic,
    LogMax,
    LogMaxStatistics,
    Rule,
    Static,
    log2,
    rule_from_dict,
)

NOTHING_SEEN = LogMaxStatistics(0.0, 0.0, 0.0)


@pytest.mark.parametrize("rule", [Dynamic, LogMax])
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
        ("hysteresis", 0, ValueError, "hysteresis is 0: it must lie between 1"),
        ("hysteresis", "1", TypeError, "hysteresis is '1'"),
        ("refill", "never", ValueError, "refill is 'never': it must be 'growth' or 'step'"),
        ("refill", None, ValueError, "refill is None"),
        ("probe_after", 0, ValueError, "probe_after is 0: it must lie between 1"),
        ("probe_after", True, TypeError, "probe_after is True"),
        ("probe_after", math.inf, TypeError, "probe_after is inf"),
    ],
)
def test_bad_numbers(
    rule: type[Dynamic], name: str, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{words}"):
        rule(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("sigmas", -0.1, ValueError, "sigmas is -0.1: it must lie between 0 and 100"),
        ("sigmas", 101, ValueError, "sigmas is 101.0: it must lie between 0 and 100"),
        ("sigmas", math.nan, ValueError, "sigmas is nan"),
        ("sigmas", False, TypeError, "sigmas is False"),
        ("decay", 1.0, ValueError, "decay is 1.0: it must be >= 0 and < 1"),
        ("decay", 1 - 1e-9, ValueError, "decay is 0.999999999: it must be >= 0 and < 1 in float"),
        ("decay", -0.5, ValueError, "decay is -0.5"),
        ("decay", "0.9", TypeError, "decay is '0.9'"),
    ],
)
def test_bad_numbers_of_logmax(name: str, value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        LogMax(**{name: value})


@pytest.mark.parametrize(
    "rule",
    [
        Static(),
        Dynamic(),
        Dynamic(3.0, 0.25, 7, 2, "step", None),
        LogMax(),
        LogMax(3.0, 0.25, 7, 2, "step", 3, 2.0, 0.5),
    ],
)
def test_every_field_survives_a_round_trip(rule: Rule) -> None:
    saved = json.loads(json.dumps(rule.to_dict()))
    # The scale of Static is for the constructor; the state of a scaler holds Static() and a scale.
    kept = {field.name for field in dataclasses.fields(rule)} - {"scale"}
    assert set(saved) == {"name"} | kept
    assert rule_from_dict(saved) == rule
    assert type(rule_from_dict(saved)) is type(rule)
    assert hash(rule_from_dict(saved)) == hash(rule)


def test_every_rule_has_its_name() -> None:
    assert {"static": Static, "dynamic": Dynamic, "logmax": LogMax} == RULES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "best"}, r"the name of the rule is 'best': it must be one of \['static', 'dyn"),
        ({"name": None}, "the name of the rule is None"),
        ({"name": "logmax"}, "the rule 'logmax' has no 'decay'"),
        ({"name": "static"}, "the rule 'static' has an unknown key 'backoff_factor'"),
        ({"colour": 1}, "the rule 'dynamic' has an unknown key 'colour'"),
        ({"hysteresis": 0}, "hysteresis is 0"),
    ],
)
def test_a_bad_dict_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        rule_from_dict(Dynamic().to_dict() | change)


def test_a_rule_is_a_value() -> None:
    assert dataclasses.replace(LogMax(), growth_factor=3).growth_factor == 3.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dynamic().hysteresis = 2  # type: ignore[misc]
    assert isinstance(Dynamic(2, 1).growth_factor, float)


# --- LogMax ---------------------------------------------------------------------------------------


@given(st.integers(-126, 127))
def test_log2_is_exact_for_powers_of_two(exponent: int) -> None:
    assert log2(2.0**exponent) == exponent


@given(st.floats(2.0**-126, 2.0**127, width=32))
def test_log2_is_close(value: float) -> None:
    assert -0.087 <= log2(value) - math.log2(value) <= 1e-5


def test_log2_of_what_is_below_the_normal_numbers() -> None:
    assert log2(0.0) == -127.0
    assert -127.0 <= log2(1e-45) <= log2(1e-39) <= -126.0


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=40), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_averages_are_weighted_means_from_the_start(exponents: list[int], decay: float) -> None:
    statistics = NOTHING_SEEN
    for exponent in exponents:
        statistics = LogMax(decay=decay).observe(statistics, 2.0**exponent)
    values = torch.tensor(exponents, dtype=torch.float64)
    weights = decay ** torch.arange(len(exponents) - 1, -1, -1, dtype=torch.float64) * (1 - decay)
    mean = (weights * values).sum() / weights.sum()
    var = (weights * (values - mean).square()).sum() / weights.sum()
    assert statistics == pytest.approx(
        torch.stack([mean, var, weights.sum()]).tolist(), rel=1e-3, abs=1e-3
    )


def test_an_amax_of_zero_says_nothing() -> None:
    seen = LogMax().observe(NOTHING_SEEN, 4.0)
    assert LogMax().observe(NOTHING_SEEN, 0.0) == NOTHING_SEEN
    assert LogMax().observe(seen, 0.0) == LogMax().observe(seen, math.nan) == seen


@pytest.mark.parametrize(
    ("headroom", "mean", "var", "expected"),
    [
        (2.0**16, 0.0, 0.0, 2.0**16),
        (2.0**16, -10.0, 0.0, 2.0**26),
        (2.0**16, -10.5, 0.0, 2.0**26),  # the floor of 26.5
        (2.0**15, -10.0, 0.0, 2.0**25),
        (2.0**16, -10.0, 4.0, 2.0**19),  # 26 - 3.09 * 2 = 19.82
        (2.0**16, -127.0, 0.0, 2.0**127),
        (2.0**-126, 127.0, 0.0, 2.0**-126),
    ],
)
def test_the_scale_of_logmax(headroom: float, mean: float, var: float, expected: float) -> None:
    assert LogMax().scale(headroom, LogMaxStatistics(mean, var, 1.0)) == expected


@pytest.mark.parametrize(
    ("headroom", "backed_off", "is_growing", "expected"),
    [
        (1024.0, 1.0, False, 1024.0),
        (1024.0, 1.0, True, 2048.0),
        (1024.0, 0.25, False, 256.0),
        (1024.0, 0.25, True, 512.0),
        (LARGEST_HEADROOM, 1.0, True, LARGEST_HEADROOM),
        (2.0**-125, 2.0**-10, False, 2.0**-126),
    ],
)
def test_the_headroom(
    headroom: float, backed_off: float, is_growing: bool, expected: float
) -> None:
    assert LogMax().next_headroom(headroom, backed_off, is_growing) == expected


def test_a_headroom_that_would_be_inf_does_not_grow() -> None:
    assert LogMax(growth_factor=1e300).next_headroom(8.0, 1.0, True) == 8.0


def test_a_static_scale_is_given_to_the_rule_or_to_the_scaler() -> None:
    scaler = GradScaler(rule=Static(128.0))
    assert scaler.get_scale() == 128
    assert repr(scaler) == "GradScaler(scale=2^7, rule=Static())"
    assert scaler.state_dict() == GradScaler(init_scale=128.0, rule=Static()).state_dict()
    assert GradScaler(rule=Static()).get_scale() == 65536
    assert GradScaler(init_scale=128.0, rule=Static(128.0)).get_scale() == 128
    for scale in (4.0, 65536.0):
        message = rf"init_scale is {scale:g} and rule is Static\(128.0\).*: leave out init_scale"
        with pytest.raises(ValueError, match=message):
            GradScaler(init_scale=scale, rule=Static(128.0))
    with pytest.raises((TypeError, ValueError), match=r"the scale of Static is -1\.0"):
        GradScaler(rule=Static(-1.0))
