"""What is measured, and what it adds up to."""

import json
from dataclasses import asdict

import pytest
import torch

from halfstep._tools.doctor import hardware
from halfstep._tools.doctor.hardware import (
    advise,
    measure_speeds,
    speeds_of,
)


@pytest.mark.parametrize(
    ("seconds", "rate", "noise"),
    [
        ([1.0] * 8, 1.0, ""),
        ([0.5] * 8, 2.0, ""),
        ([0.5, 0.7] * 4, 2.0, ""),  # other programs can only slow it down: the best time counts
        ([0.5, 0.5, 5.0, 0.52, 0.5], 2.0, ""),  # single ones that stand out
        ([0.5, 1.0] * 4, 2.0, "matrix products in bf16 took 500 ms to 1 s"),
        ([0.01] + [1.0] * 7, 100.0, "matrix products in bf16 took 10 ms to 1 s"),
    ],
)
def test_the_best_time_counts_and_times_that_scatter_are_reported(seconds, rate, noise) -> None:
    works = [("matmul", name, 1e9) for name in ("fp32", "bf16")]
    found = speeds_of(works, [[1.0, each] for each in seconds])
    assert found.gflops == {"matmul": {"fp32": 1.0, "bf16": pytest.approx(rate)}}
    assert found.ratios == found.gflops
    assert found.noise.partition(";")[0] == noise


def test_a_measurement_goes_on_until_the_best_times_are_confirmed(monkeypatch) -> None:
    clock = iter(2.0**-n for n in range(900))  # each call is twice as fast as the one before
    monkeypatch.setattr(hardware, "_duration", lambda run, device: next(clock))
    given: list[list[list[float]]] = []
    monkeypatch.setattr(hardware, "speeds_of", lambda works, rounds: given.append(rounds))
    measure_speeds("cpu", seconds=1e-9)
    assert len(given[0]) == hardware.FEWEST_ROUNDS  # never longer than LONGEST times the seconds


def test_all_dtypes_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.MATRIX_SIDE, "cpu", 8)
    monkeypatch.setitem(hardware.CONVOLUTION, "cpu", (1, 2, 8))
    found = measure_speeds("cpu", seconds=0.01)
    for rates in (found.gflops, found.ratios):
        assert {kind: list(names) for kind, names in rates.items()} == {
            "matmul": ["fp32", "bf16", "fp16"],
            "conv": ["fp32", "bf16", "fp16"],
        }
        assert all(rate > 0 for names in rates.values() for rate in names.values())
    assert found.ratios["matmul"]["fp32"] == 1.0


def test_operations_are_counted_as_torch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for make in (hardware._matmul, hardware._convolution):
        run, operations = make("cpu", torch.float32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
        assert counter.get_total_flops() == operations


def test_tf32_is_set_for_a_while_only() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    with hardware._fp32_precision("tf32"):
        assert matmul.fp32_precision == "tf32"
    assert (matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before
    assert isinstance(matmul.allow_tf32, bool)  # the older call still works


@pytest.mark.parametrize(
    ("bf16", "fp16", "tf32", "precision", "reason"),
    [
        (4.4, 0.2, None, "bf16", "matrix products run at 4.4 x the speed of fp32"),
        (7.0, 8.0, 4.0, "bf16", "no scaler is needed"),
        (0.9, 6.0, None, "fp16", "in bf16 at 0.9 x"),
        (2.0, 8.0, None, "fp16", "with a GradScaler"),
        (1.0, 1.1, 3.0, "tf32", "TF32 at 3 x"),
        (0.5, 0.2, None, "fp32", "lower precision saves memory, not time"),
        (1.19, 1.19, None, "fp32", "bf16 runs at 1.2 x"),
    ],
)
def test_the_advice_follows_the_measurement(bf16, fp16, tf32, precision, reason) -> None:
    ratios = {"fp32": 1.0, "bf16": bf16, "fp16": fp16} | ({} if tf32 is None else {"tf32": tf32})
    found = advise({"matmul": ratios})
    assert found.precision == precision
    assert reason in found.reason


def test_the_advice_gives_convolutions_too() -> None:
    ratios = {"fp32": 1.0, "bf16": 4.0, "fp16": 1.0}
    found = advise({"matmul": ratios, "conv": ratios | {"bf16": 0.7}})
    assert "(convolutions at 0.7 x)" in found.reason


def test_the_look_is_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardware, "measure_speeds", lambda device: speeds_of(
            [("matmul", name, 1.0) for name in ("fp32", "bf16", "fp16")], [[1.0, 0.5, 2.0]]
        )
    )  # fmt: skip
    found = hardware.inspect_machine()
    values = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert values["advice"]["precision"] == "bf16"
    assert values["name"]


@pytest.mark.gpu
def test_the_look_on_cuda() -> None:
    found = hardware.inspect_machine()
    assert found.device == "cuda"
    assert list(found.speeds.gflops["matmul"]) == ["fp32", "bf16", "fp16", "tf32"]


def test_fp16_is_not_advised_where_it_gives_nan() -> None:
    ratios = {"fp32": 1.0, "bf16": 0.5, "fp16": 2.0}
    found = advise({"matmul": ratios}, has_safe_fp16=False)
    assert found.precision == "fp32"
    assert "NaN on this card" in found.reason
    assert advise({"matmul": ratios | {"bf16": 1.3}}, has_safe_fp16=False).precision == "bf16"


def test_the_machine_is_read_from_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = speeds_of(
        [("matmul", name, 1.0) for name in ("fp32", "bf16", "fp16")], [[1.0, 2.0, 0.5]]
    )
    monkeypatch.setattr(hardware, "measure_speeds", lambda device: speeds)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "device_name", lambda device: "GTX 1660")
    monkeypatch.setattr(hardware, "has_safe_float16", lambda: False)
    found = hardware.inspect_machine()
    assert found.device == "cuda"
    assert found.advice.precision == "fp32"
