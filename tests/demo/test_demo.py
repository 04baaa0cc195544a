import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rich.console import Console

import halfstep._demo.demo as module
from halfstep._demo.demo import run_demo
from halfstep._demo.results import ProgressBars, ProgressLines
from halfstep._demo.train import PRECISIONS, DemoSettings, PrecisionRun
from halfstep._record.read import read_run
from halfstep._report.summarize import summarize
from halfstep.errors import DemoError

TINY = DemoSettings(size="tiny", steps=8)


def plain() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_it_writes_a_plot_and_all_numbers(finished):
    files = sorted(p.name for p in finished.output.iterdir())
    assert files == ["losses.svg", "results.json", "run"]
    ET.parse(finished.output / "losses.svg")
    document = json.loads((finished.output / "results.json").read_text())
    assert [run["precision"] for run in document["runs"]] == list(PRECISIONS)
    assert all(run["finished"] and len(run["losses"]) == 8 for run in document["runs"])
    assert document["machine"]["gflops"].keys() == {"fp32", "bf16", "fp16"}
    assert document["settings"]["mean_over"] == 2**19


def test_the_last_run_is_recorded_and_has_a_report(finished):
    run = read_run(finished.output / "run")
    assert len(run.steps) == 8
    assert run.has_ended
    assert [model.name for model in run.models] == ["GPT"]
    report = finished.output / "run" / "report.html"
    assert report.exists()
    assert f"Report of the run in fp16 autocast + GradScaler: {report}" in finished.printed


def test_the_record_has_the_losses_of_the_table(finished):
    run = read_run(finished.output / "run")
    last = json.loads((finished.output / "results.json").read_text())["runs"][-1]
    assert [step.loss for step in run.steps] == last["losses"]
    assert summarize(run).loss.recent == last["summary"]["training_loss"]
    assert not run.notes


def test_the_printed_table_has_the_numbers_of_the_json(finished):
    for run in json.loads((finished.output / "results.json").read_text())["runs"]:
        assert f"{run['summary']['held_out_loss']:.4f}" in finished.printed
        assert f"{run['summary']['step_ms']:.1f} ms" in finished.printed


def test_it_says_what_the_machine_is_good_at_and_where_the_results_are(finished):
    assert "\nThis machine (" in finished.printed.partition("zero gradients")[2]  # at the end
    assert str(finished.output / "losses.svg") in finished.printed


def test_progress_without_a_terminal_is_a_few_plain_lines(finished):
    assert "step 8/8  loss" in finished.printed
    assert "\x1b" not in finished.printed
    assert finished.printed.count("ms/step") <= 4 * 10


def interrupt_at(monkeypatch, name, steps):
    """Press Ctrl-C after some steps of one of the runs."""

    def show(self, run):
        if run.precision.name == name and len(run.losses) == steps:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLines, "show", show)


def test_ctrl_c_shows_and_writes_what_there_is(monkeypatch, tmp_path):
    interrupt_at(monkeypatch, "bf16", 3)
    console = plain()
    assert run_demo(TINY, tmp_path, console) is False
    printed = console.file.getvalue()
    assert "Interrupted: these are the results so far." in printed
    assert "stopped at 3" in printed
    first, second = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert first["finished"]
    assert first["steps_done"] == 8
    assert (second["precision"], second["finished"], second["steps_done"]) == ("bf16", False, 3)
    assert 'data-series="bf16"' in (tmp_path / "losses.svg").read_text()


def test_ctrl_c_before_the_first_step(monkeypatch, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", stop)
    assert run_demo(TINY, tmp_path, plain()) is False
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["steps_done"] == 0


def test_a_file_name_is_text_and_nothing_else(tmp_path):
    file = tmp_path / "[red]<b>\n\x07.txt"
    file.write_text("Once upon a time. " * 100)
    console = plain()
    settings = replace(TINY, steps=1, precisions=("fp32",), text=file)
    run_demo(settings, tmp_path / "[bold]out", console)
    assert "[red]<b>\\n\\x07.txt" in console.file.getvalue().replace("\n", "")
    assert (tmp_path / "[bold]out" / "losses.svg").exists()
    assert "[red]<b>" in "".join(ET.parse(tmp_path / "[bold]out/losses.svg").getroot().itertext())


def test_an_output_that_cannot_be_written_is_found_before_training(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DemoError, match=r"cannot write to --output .*name another"):
            run_demo(TINY, output, plain())


def test_bars_are_drawn_on_a_terminal_and_left_behind():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    run = PrecisionRun(PRECISIONS["fp16"], 200)
    with ProgressBars(console) as bars:
        bars.show(run)
        run.losses, run.seconds, run.scales = [3.25, 2.5], [0.1, 0.2], [65536.0, 65536.0]
        bars.show(run)
    assert "loss 2.500  scale 2^16  200 ms/step" in stream.getvalue()
    assert "2/200" in stream.getvalue()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Not run anywhere yet: memory, timing and all four precisions on CUDA."""
    assert run_demo(replace(TINY, device="cuda"), tmp_path, plain())
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["precision"] for run in results["runs"]] == list(PRECISIONS)
    for run in results["runs"]:
        assert run["finished"]
        assert run["summary"]["peak_memory_bytes"] > 0


def test_a_plot_that_cannot_be_written_is_found_out_before_the_training(tmp_path):
    (tmp_path / "losses.svg").mkdir()
    with pytest.raises(DemoError, match="cannot write to --output"):
        run_demo(TINY, tmp_path, plain())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["losses.svg"]
