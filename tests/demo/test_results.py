"""What a demo leaves: the table, ``results.json`` and the plot, all from the same numbers."""

import io
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rich.console import Console

from halfstep._demo.corpus import Corpus
from halfstep._demo.results import (
    ROWS,
    MeasuredMachine,
    Results,
    build_table,
    draw_chart,
    round_step,
)
from halfstep._demo.train import PRECISIONS, DemoSettings, PrecisionRun

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def results():
    """Made by hand: four runs of 40 steps with known numbers."""
    machine = MeasuredMachine(
        "a <fast> & new CPU",
        2,
        {"fp32": 1.0, "bf16": 2.0, "fp16": 1.0},
        {"fp32": 1.0, "bf16": 2.0, "fp16": 1.0},
        "",
        {"torch": "2"},
        "",
    )
    corpus = Corpus("'<b>&\"'", 100, range(900), range(100))
    runs = [made_run(name, 0.1 * i) for i, name in enumerate(PRECISIONS)]
    runs[3].scales = [2.0**16] * 20 + [2.0**17] * 10 + [2.0**16] * 10
    runs[3].skipped = [30]
    return Results(DemoSettings(steps=40), corpus, machine, runs, 12345)


def made_run(name: str, worse: float) -> PrecisionRun:
    run = PrecisionRun(PRECISIONS[name], 40)
    run.losses = [5 - 0.05 * i + worse for i in range(40)]
    run.seconds = [0.25 + worse] * 40
    run.zero_shares = {9: worse, 19: worse}
    run.held_out_loss = 3.5 + worse
    run.peak_memory = 3 * 2**20
    return run


def cells(results: Results) -> dict[str, list[list[str]]]:
    """Row label to the cells of each printed row with this label."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(build_table(results))
    labels = {label.strip() for label, _, _ in ROWS}
    found: dict[str, list[list[str]]] = {}
    for line in console.export_text().splitlines():
        for label in labels:
            if line.strip().startswith(label + "  "):
                row = line.strip().removeprefix(label).split("  ")
                found.setdefault(label, []).append([c.strip() for c in row if c.strip()])
    return found


def test_table_and_json_agree(results):
    table = cells(results)
    runs = json.loads(results.to_json())["runs"]
    assert [run["precision"] for run in runs] == list(PRECISIONS)
    summaries = [run["summary"] for run in runs]
    for label, key in [("training loss", "training_loss"), ("held-out loss", "held_out_loss")]:
        assert table[label][0] == [f"{summary[key]:.4f}" for summary in summaries]
    training, held_out = table["minus fp32"]
    assert training == held_out == ["+0.0000", "+0.1000", "+0.2000", "+0.3000"]
    assert table["time per step"][0] == ["250.0 ms", "350.0 ms", "450.0 ms", "550.0 ms"]
    assert table["ratio to fp32"][0] == ["1.00", "1.40", "1.80", "2.20"]
    assert table["peak memory"][0] == ["3.0 MiB"] * 4
    assert table["steps skipped"][0] == ["-", "-", "-", "1"]
    assert table["final scale"][0] == ["-", "-", "-", "2^16"]
    assert table["zero gradients"][0] == ["0 %", "10 %", "20 %", "30 %"]


def test_a_tiny_share_does_not_read_as_none(results):
    results.runs[2].zero_shares = {1: 1.234e-7}
    assert cells(results)["zero gradients"][0][2] == "1.23e-05 %"


def test_json_holds_every_step(results):
    run = json.loads(results.to_json())["runs"][3]
    assert run["losses"] == results.runs[3].losses
    assert run["scales"] == results.runs[3].scales
    assert run["skipped"] == [30]
    assert run["step_ms"] == [550.0] * 40
    assert run["zero_gradient_shares"] == {"9": 0.30000000000000004, "19": 0.30000000000000004}


def test_json_is_strict_even_when_a_run_diverged(results):
    results.runs[2].losses[5:] = [math.nan, math.inf] * 17 + [math.nan]
    run = json.loads(results.to_json(), parse_constant=pytest.fail)["runs"][2]
    assert run["losses"][4:7] == [results.runs[2].losses[4], None, None]
    assert run["summary"]["training_loss"] is None


def test_without_fp32_there_is_no_comparison(results):
    del results.runs[0]
    table = cells(results)
    assert table["minus fp32"] == [["-"] * 3, ["-"] * 3]
    assert table["ratio to fp32"] == [["-"] * 3]


def test_an_unfinished_run_is_shown_but_not_compared(results):
    cut = results.runs[1]
    cut.losses, cut.seconds, cut.held_out_loss = cut.losses[:7], cut.seconds[:7], None
    del results.runs[2:]
    summary = results.summary(cut)
    assert summary["training_loss"] is not None
    assert summary["training_loss_minus_fp32"] is summary["held_out_loss_minus_fp32"] is None
    assert json.loads(results.to_json())["runs"][1]["finished"] is False
    assert "stopped at step 7" in draw_chart(results)


def curves(svg: str) -> list[ET.Element]:
    return [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("data-series")]


def test_the_plot_has_every_curve_with_every_step(results):
    drawn = curves(draw_chart(results))
    # fp32 last, on top; then the scale of the scaled run.
    names = [curve.get("data-series") for curve in drawn]
    assert names == ["fp16", "fp16-unscaled", "bf16", "fp32", "fp16"]
    assert [curve.get("d").count("L") for curve in drawn] == [39] * 5
    assert len({curve.get("d") for curve in drawn}) == 5


def test_the_plot_can_be_read(results):
    svg = draw_chart(results)
    words = ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]
    for precision in PRECISIONS.values():
        assert precision.title in words
    assert {"step", "loss (nats per character)", "216", "217", "40"} <= set(words)
    assert any(word.startswith("scale") for word in words)
    assert "step 31 skipped" in svg
    assert "prefers-color-scheme: dark" in svg


def test_the_plot_stands_alone_and_escapes_what_it_is_given(results):
    svg = draw_chart(results)
    assert "<b>" not in svg
    assert svg.count("http") == 1  # the name space
    texts = "".join(ET.fromstring(svg).itertext())
    assert "'<b>&\"'" in texts
    assert "a <fast> & new CPU" in texts


def test_a_diverged_run_leaves_a_gap_and_no_nan(results):
    results.runs[2].losses[10:12] = [math.nan, math.inf]
    svg = draw_chart(results)
    curve = next(c for c in curves(svg) if c.get("data-series") == "fp16-unscaled")
    assert curve.get("d").count("M") == 2
    assert "nan" not in curve.get("d") + svg.split("</style>")[1]
    assert "inf" not in curve.get("d")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_hardly_any_steps_make_a_plot_too(results, steps):
    results = replace(results, settings=DemoSettings(steps=max(1, steps)))
    for run in results.runs:
        run.losses, run.scales, run.skipped = run.losses[:steps], run.scales[:steps], []
    assert ET.fromstring(draw_chart(results)).tag == f"{SVG}svg"


def test_without_a_scaled_run_there_is_no_scale(results):
    del results.runs[3]
    svg = draw_chart(results)
    assert [c.get("data-series") for c in curves(svg)] == ["fp16-unscaled", "bf16", "fp32"]


@pytest.mark.parametrize(
    ("roughly", "step"), [(0.012, 0.02), (1, 1), (1.1, 2), (33.3, 50), (7, 10)]
)
def test_ticks_are_round(roughly, step):
    assert round_step(roughly) == pytest.approx(step)


@pytest.mark.parametrize(
    ("bf16", "fp16", "sentence"),
    [
        (250.0, 20.0, "it is good at bf16; fp16 is slower than fp32."),
        (250.0, 100.0, "it is good at bf16; fp16 is no faster than fp32."),
        (800.0, 800.0, "it is good at both bf16 and fp16."),
        (50.0, 800.0, "it is good at fp16; bf16 is slower than fp32."),
        (100.0, 50.0, "neither bf16 nor fp16 makes it faster than fp32."),
    ],
)
def test_the_sentence_follows_the_measurement(bf16, fp16, sentence):
    rates = {"fp32": 100.0, "bf16": bf16, "fp16": fp16}
    ratios = {name: rate / 100 for name, rate in rates.items()}
    machine = MeasuredMachine("X", 2, rates, ratios, "", {}, "")
    said = machine.sentence()
    assert said.endswith(sentence)
    assert f"100 in fp32, {bf16:.0f} in bf16 ({bf16 / 100:.2g} x)" in said
    assert replace(machine, noise="too noisy").sentence().endswith("GFLOP/s: too noisy.")
