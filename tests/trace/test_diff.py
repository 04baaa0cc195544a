"""Differences between two traces."""

import pytest
import torch
from tests.device import DEVICE
from torch import nn

import halfstep

pytestmark = pytest.mark.slow


MODEL = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))


def traced(policy: str | None) -> halfstep.trace:
    MODEL.zero_grad()
    with halfstep.trace(MODEL) as t:
        enabled = policy is not None
        with halfstep.autocast(DEVICE, torch.bfloat16, enabled=enabled, policy=policy):
            loss = MODEL(torch.ones(3, 8)).float().sum()
        loss.backward()
    return t


def test_two_policies() -> None:
    t, u = traced("standard"), traced("standard; softmax:lower")
    diff = t.diff(u)
    assert diff
    found = {(d.phase, d.module, d.op) for d in diff.differences}
    assert found == {
        ("forward", "1", "_softmax"),
        ("forward", "2", "addmm"),  # its input is lower already
        ("backward", "1", "_softmax_backward_data"),
        ("backward", "1", "_to_copy"),
        ("backward", "2", "_to_copy"),
    }
    (softmax,) = (d for d in diff.differences if d.op == "_softmax")
    assert (softmax.before.compute, softmax.after.compute) == (("float32",), ("bfloat16",))
    assert (softmax.before.rules, softmax.after.rules) == (
        ("softmax:fp32-dtype",),
        ("softmax:lower",),
    )
    assert (softmax.before.cast_bytes, softmax.after.cast_bytes) == (6 * 24, 0)
    text = str(diff)
    assert "softmax:fp32-dtype -> softmax:lower" in text
    assert "144 B -> 0 B" in text
    assert "before: 12 ops" in text


def test_with_autocast_and_without() -> None:
    diff = traced(None).diff(traced("standard"))
    (first,) = (d for d in diff.differences if (d.module, d.op) == ("0", "addmm"))
    assert first.before.num_casts == 0
    assert first.after.num_casts == 3
    assert "- -> linear:lower" in str(diff)


def test_the_same_twice_differs_in_time_only() -> None:
    diff = traced("standard").diff(traced("standard"))
    assert not diff
    assert diff.differences == ()
    assert {each.only_time for each in diff.every} == {True}
    apart = [abs(d.after.seconds - d.before.seconds) for d in diff.slower_or_faster]
    assert apart == sorted(apart, reverse=True)


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(TypeError, match=r"diff\(str\): pass another trace"):
        traced(None).diff("standard")  # type: ignore[arg-type]
