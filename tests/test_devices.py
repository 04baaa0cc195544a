"""The table of devices: what follows from each of its answers, shown on the CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tests.lacking import NoFloat64, lacking

from halfstep._gradients import scalars
from halfstep._pytorch import amp, devices
from halfstep._pytorch.devices import has_safe_float16

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(), (3,), (0,), (4, 5), (2, 3, 4)]
    return [torch.randn(shape).mul(100).to(dtype) for shape in shapes]


# --- check and multiply ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("factor", [1.0, 2.0**-16, 1 / 3, 7e4])
def test_the_two_halves_do_what_the_kernel_does(dtype, bad, factor) -> None:
    ours, theirs = gradients(dtype), gradients(dtype)
    if bad is not None:
        ours[3][1, 2] = theirs[3][1, 2] = bad
    by = torch.tensor(factor)
    found, wanted = torch.zeros(()), torch.zeros(())
    amp.check_and_unscale_(theirs, wanted, by)
    amp.check_each_(ours, found)
    amp.multiply_each_(ours, by)
    assert found.item() == wanted.item() == float(bad is not None)
    assert found.dtype == torch.float32
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))


def test_a_flag_stays_set_and_nothing_is_no_overflow() -> None:
    found = torch.ones(())
    amp.check_each_([torch.ones(2)], found)
    assert found == 1.0
    amp.check_each_([torch.ones(0)], found.zero_())
    amp.check_each_([torch.full((1000,), 3e38, dtype=torch.bfloat16)], found)
    assert found == 0.0  # the sum overflows, no entry does


# --- the transition of the scale ------------------------------------------------------------------


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("tracker", [0, 1, 2, 7])
@pytest.mark.parametrize("scale", [1.0, 2.0**127, 3.0])
def test_the_scale_moves_without_the_kernel_as_with_it(monkeypatch, found, tracker, scale) -> None:
    # Views into one tensor, as the scaler's are.
    def moved() -> list[float]:
        buffer = torch.tensor([9.0, scale, 0.0, found])
        buffer.view(torch.int32)[2] = tracker
        amp.update_scale_(buffer[1], buffer.view(torch.int32)[2], buffer[3], 2.0, 0.5, 3)
        return [buffer[0].item(), buffer[1].item(), buffer.view(torch.int32)[2].item()]

    wanted = moved()
    lacking(monkeypatch, moves_scale=False)
    monkeypatch.setattr(torch, "_amp_update_scale_", None)
    assert moved() == wanted


def test_an_xpu_moves_the_scale_in_float64_or_not_by_the_kernel(monkeypatch) -> None:
    for has_float64 in (True, False):
        monkeypatch.setattr(devices, "_card_has_float64", lambda _, has=has_float64: has)
        assert devices.can_move_scale(torch.device("xpu")) is has_float64
    assert devices.can_move_scale(torch.device("cuda"))
    assert not devices.can_move_scale(torch.device("mps"))


# --- float64 --------------------------------------------------------------------------------------


def test_reciprocals_without_float64(monkeypatch) -> None:
    lacking(monkeypatch, has_float64=False)
    with NoFloat64():
        assert amp.reciprocal_of(torch.tensor(4.0)) == 0.25
        assert scalars.reciprocal(torch.tensor(4.0)) == 0.25


def test_where_float64_is_missing_the_cpu_has_it() -> None:
    assert devices.widest_float(torch.device("mps")) is torch.float32
    assert devices.widest_float(torch.device("cuda")) is torch.float64
    integers = torch.tensor([2**60 + 1, 3])
    found = devices.in_float64(integers)
    assert found.dtype is torch.float64
    same = torch.ones(2, dtype=torch.float64)
    assert devices.in_float64(same).data_ptr() != same.data_ptr()


# --- copies to the host ---------------------------------------------------------------------------


def test_a_device_that_cannot_tell_of_arrivals_is_waited_for(monkeypatch) -> None:
    lacking(monkeypatch, has_arrivals=False)
    found = devices.to_host(torch.tensor([1.0, 2.0]))
    assert found.has_arrived()
    assert found.wait().tolist() == [1.0, 2.0]


def test_other_devices_have_events_and_pinned_memory(monkeypatch) -> None:
    asked = []

    class Event:
        def __init__(self, device: str) -> None:
            asked.append(device)

        def record(self) -> None:
            asked.append("recorded")

        def query(self) -> bool:
            return "waited" in asked

        def synchronize(self) -> None:
            asked.append("waited")

    class Pinned:
        def copy_(self, tensor: object, non_blocking: bool) -> None:
            asked.append("copied" if non_blocking else "waited")

    def pinned(tensor: object, *, device: str, pin_memory: bool) -> Pinned:
        assert (device, pin_memory) == ("cpu", True)
        return Pinned()

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "empty_like", pinned)
    found = devices.to_host(SimpleNamespace(device=torch.device("cuda")))  # type: ignore[arg-type]
    assert asked == ["copied", "cuda", "recorded"]
    assert not found.has_arrived()
    assert isinstance(found.wait(), Pinned)
    assert asked[-1] == "waited"


@pytest.mark.parametrize("reads_at_once", [True, False])
@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("to", ["sim", "cpu"])
def test_only_safe_copies_do_not_block(monkeypatch, reads_at_once, is_cpu, to) -> None:
    monkeypatch.setitem(devices.FACTS, "sim", devices.Facts(reads_at_once=reads_at_once))
    asked: list[bool] = []

    def record(device: object, non_blocking: bool) -> None:
        asked.append(non_blocking)

    source = SimpleNamespace(is_cpu=is_cpu, device=torch.device("meta"), to=record)
    devices.to_device(source, SimpleNamespace(type=to))  # type: ignore[arg-type]
    assert asked == [to == "sim" and (reads_at_once or not is_cpu)]


def test_a_device_that_the_table_does_not_name_gets_the_careful_answers() -> None:
    found = devices.facts("sim")
    assert found is devices.UNKNOWN
    assert torch.bfloat16 not in found.unscales
    assert not found.has_arrivals
    assert not found.reads_at_once


# --- cards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "is_safe"),
    [
        ("NVIDIA GeForce GTX 1080", (6, 1), True),
        ("Tesla T4", (7, 5), True),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), True),
        ("Quadro RTX 4000", (7, 5), True),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), False),
        ("NVIDIA GeForce GTX 1650", (7, 5), False),
        ("Quadro T2000", (7, 5), False),
        ("NVIDIA T1000 8GB", (7, 5), False),
        ("NVIDIA GeForce MX450", (7, 5), False),
        ("NVIDIA A100-SXM4-80GB", (8, 0), True),
        ("AMD Instinct MI210", (9, 0), True),
    ],
)
def test_cards_that_convolve_to_nan_in_float16(monkeypatch, name, capability, is_safe) -> None:
    card = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    assert has_safe_float16() is is_safe
