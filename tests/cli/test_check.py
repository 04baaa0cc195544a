"""``halfstep check``: the bad sentences of a report, and exit codes."""

import json
import math

import pytest
from tests.cli.called import called
from tests.report import records

from halfstep._tools.cli import main
from halfstep._tools.record.files import file_of

RAN = "products with gradients ran in float16 (96 %) and float32 (4 %)"


def check(capsys, folder):
    code, out, err = called(capsys, "check", folder)
    assert all("was skipped" in line for line in err.splitlines())
    return code, [line.removeprefix(f"{folder}: ") for line in out.splitlines()]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (records.healthy, "good: 60 steps; {RAN}"),
        (records.with_skips, "good: 100 steps, 1 warning in the report; {RAN}"),
    ],
)
def test_a_run_without_a_bad_finding_is_one_line(tmp_path, capsys, record, line):
    assert check(capsys, record(tmp_path)) == (0, [line.format(RAN=RAN)])


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        (records.failed, ["bad: The loss became NaN at step 7; 3 steps had such a loss"]),
        (records.losing_updates, ["bad: 97 % of the measured updates were lost"]),
        (records.several_ranks, ["bad: Ranks disagree from step 20 on"]),
        (
            records.killed,
            ["bad: The record stops after 5 steps, the last at 2.5 s, without an end"],
        ),
        (records.diagnosed, ["bad: Steps 41, 42 went bad: `linear`"]),
    ],
)
def test_a_line_for_each_bad_finding(tmp_path, capsys, record, lines):
    code, found = check(capsys, record(tmp_path))
    assert code == 1
    assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines


def test_a_bad_finding_has_its_cure(tmp_path, capsys):
    _, (line,) = check(capsys, records.diagnosed(tmp_path))
    assert 'autocast(..., policy="standard; linear@blocks.1.mlp:fp32")' in line


def test_a_bad_step_that_was_skipped_is_not_bad_once_the_run_has_recovered(tmp_path, capsys):
    bad = records.skip(3, 1.0, "loss", loss=math.nan)
    for last, code in ((2.0, 0), (math.nan, 1)):
        steps = [*map(records.step, (1, 2)), bad, *map(records.step, range(4, 60))]
        steps += [records.step(60, loss=last), records.diagnosis(3), records.end(1.0, 60)]
        folder = records.write(tmp_path / str(code), [records.header(), *steps])
        assert check(capsys, folder)[0] == code


def test_buffers_that_stay_nan_are_bad(tmp_path, capsys):
    seen = [records.step(1), records.step(2), records.buffers(2, "bn.running_mean")]
    folder = records.write(tmp_path, [records.header(), *seen, records.end(1.0, 2)])
    code, (line,) = check(capsys, folder)
    assert (code, line.startswith("bad: 1 buffer of the model became inf or NaN")) == (1, True)


def test_what_followed_from_a_bad_step_is_left_out(tmp_path, capsys):
    nan = records.counted({}, nan=9)
    rows = [records.tensor("output", f"block.{n}", nan, "float16") for n in range(20)]
    steps = [records.step(n, loss=math.nan if n >= 7 else 1.0) for n in range(1, 21)]
    events = [records.header(), *steps, records.sample(10, rows), records.end(1.0, 20)]
    code, (line,) = check(capsys, records.write(tmp_path, events))
    assert (code, line.startswith("bad: The loss became NaN at step 7")) == (1, True)


def test_lines_that_are_damaged_are_told_beside_the_verdict(tmp_path, capsys):
    events = [records.header(), records.step(1), records.step(2), records.end(1.0, 2)]
    file = file_of(records.write(tmp_path, events), 0)
    file.write_bytes(file.read_bytes().replace(b'"step":2', b'"step":-2'))
    code, out, err = called(capsys, "check", tmp_path)
    assert (code, out) == (
        0,
        f"{tmp_path}: good: 1 step; the dtypes of products were not measured\n",
    )
    assert err == (
        f"{tmp_path}: line 3 of rank0.jsonl is damaged and was left out "
        "(Expected `int` >= 0 - at `$.step`)\n"
    )


def test_without_a_record(tmp_path, capsys):
    code, out, err = called(capsys, "check", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "none does not exist: give the folder" in err


@pytest.mark.parametrize("option", ["--max-skipped=1%", "--allow-nan", "--json"])
def test_other_options_are_refused(tmp_path, capsys, option):
    with pytest.raises(SystemExit) as ended:
        main(["check", str(records.healthy(tmp_path)), option])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize("has_parent", [True, False])
def test_all_processes_of_a_run_are_checked_and_reported(tmp_path, capsys, has_parent):
    folder = tmp_path / "runs/x"
    makes = {"process-1": records.healthy, "process-2": records.bf16, "process-10": records.failed}
    paths = [make(folder / name) for name, make in makes.items()]
    (folder / "process-3").mkdir(parents=True)
    (folder / "process-3/rank0.jsonl").write_text("?")
    if has_parent:
        paths.insert(0, records.healthy(folder))
    code, out, err = called(capsys, "check", folder)
    assert code == 1
    assert "process-3/rank0.jsonl: none of its lines begins a record" in err
    good = [f"{path}: good: 60 steps" for path in paths[:-1]]
    bad = f"{paths[-1]}: bad: The loss became NaN at step 7"
    assert [line.startswith(x) for line, x in zip(out.splitlines(), [*good, bad], strict=True)]
    code, out, _ = called(capsys, "report", folder)
    assert code == 0
    rows = out.splitlines()[1 : len(paths) + 1]
    assert [row.split()[0] for row in rows] == list(map(str, paths))
    assert "bad: The loss became NaN at step 7" in rows[-1]
    assert (paths[0] / "report.html").exists()
    _, out, _ = called(capsys, "report", folder, "--json")
    told = json.loads(out)
    assert [told["path"], *(each["path"] for each in told["processes"])] == list(map(str, paths))


def test_the_newest_run_is_checked_with_its_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records.failed(tmp_path / "runs/x/process-1")
    records.healthy(tmp_path / "runs/x")
    code, out, err = called(capsys, "check")
    assert (code, err) == (1, "runs/x: the newest record under runs/\n")
    assert len(out.splitlines()) == 2
