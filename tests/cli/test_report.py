"""``halfstep report``: the page, the sentences, JSON, Markdown, two runs, bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.called import called
from tests.cli.called import in_an_empty_folder as in_an_empty_folder
from tests.report import records

from halfstep._tools.cli import main
from halfstep._tools.record.files import LineWriter, file_of


def test_it_writes_the_page_and_prints_sentences_and_its_path(tmp_path, capsys):
    code, out, err = called(capsys, "report", records.with_skips(tmp_path / "a"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("warning: 3 of 100 steps were skipped (3 %")
    assert lines[-1] == str(tmp_path / "a" / "report.html")
    assert "<html" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")


def test_the_page_goes_where_it_is_told(tmp_path, capsys):
    folder = records.healthy(tmp_path / "a")
    code, out, _ = called(capsys, "report", folder, "-o", "page.html")
    assert (code, out.splitlines()[-1]) == (0, "page.html")
    assert (tmp_path / "page.html").is_file()
    assert not (folder / "report.html").exists()


def test_the_page_is_opened(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    folder = records.healthy(tmp_path / "a")
    assert called(capsys, "report", folder, "--open")[::2] == (0, "")
    called(capsys, "report", "a", "--open", "-o", "page.html")
    assert opened == [(folder / "report.html").as_uri(), (tmp_path / "page.html").as_uri()]
    code, _, err = called(capsys, "report", folder, "--open", "--json")
    assert (code, len(opened)) == (2, 2)
    assert "--open opens the page, which --json does not write" in err


def test_where_no_browser_is_the_path_of_the_page_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    page = records.healthy(tmp_path / "a") / "report.html"
    code, _, err = called(capsys, "report", "a", "--open")
    assert (code, err) == (0, f"there is no browser to open it here: the page is {page}\n")


def test_json_is_all_that_is_printed(tmp_path, capsys):
    folder = records.failed(tmp_path / "a")
    code, out, err = called(capsys, "report", folder, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"]["skipped"] == [7, 8, 9]
    assert "NaN," not in out
    assert not (folder / "report.html").exists()


def test_two_runs_side_by_side(tmp_path, capsys):
    first, second = records.with_skips(tmp_path / "a"), records.healthy(tmp_path / "b")
    code, out, _ = called(capsys, "report", first, "--against", second)
    assert code == 0
    assert ["skipped", "steps", "5", "0", "+5"] in [line.split() for line in out.splitlines()]
    assert out.splitlines()[-1] == str(first / "comparison.html")
    assert "<html" in (first / "comparison.html").read_text(encoding="utf-8")
    _, out, _ = called(capsys, "report", first, "--against", second, "--json")
    assert json.loads(out)["runs"][1]["steps"]["num"] == 60


def test_the_newest_record_is_taken_and_said(tmp_path, capsys):
    for name, time in (("runs/old", 1000), ("runs/sub/new", 3000), ("runs/middle", 2000)):
        folder = records.healthy(tmp_path / name)
        os.utime(file_of(folder, 0), (time, time))
    code, out, err = called(capsys, "report", "--json")
    assert code == 0
    assert json.loads(out)["path"] == "runs/sub/new"
    assert err == "runs/sub/new: the newest record under runs/\n"


def test_a_record_that_is_being_written_is_told(tmp_path, capsys):
    folder = records.killed(tmp_path / "a")
    assert "bad: The record stops after 5 steps" in called(capsys, "report", folder)[1]
    writer = LineWriter(file_of(folder, 0))
    assert "notice: The run is still running after 5 steps" in called(capsys, "report", folder)[1]
    assert called(capsys, "check", folder)[0] == 0
    writer.close()
    assert called(capsys, "check", folder)[0] == 1


def test_one_of_the_files_of_a_record_will_do(tmp_path, capsys):
    folder = records.healthy(tmp_path / "a")
    assert called(capsys, "report", file_of(folder, 0), "--json")[0] == 0


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_hostile_names_reach_no_terminal(tmp_path, capsys, form):
    events = [records.header(), records.skip(1), records.culprits(1, "\x1b[2J\nhalfstep: good")]
    records.write(tmp_path / "a", events)
    code, out, _ = called(capsys, "report", tmp_path / "a", *form)
    assert code == 0
    assert "\x1b" not in out
    assert not any(line.startswith("halfstep: good") for line in out.splitlines())


HOSTILE = "\x1b]0;x\x07\u202egood\u2066\n\x9b2J"
"""Sets the title of a terminal, rings, turns the direction, and clears the screen."""


@pytest.mark.parametrize(
    "command",
    [["report"], ["report", "--json"], ["report", "--against"], ["check"]],
)
def test_nothing_of_a_name_is_obeyed_by_a_terminal(tmp_path, capsys, command):
    folder = records.hostile(tmp_path / HOSTILE)
    diagnosis = records.diagnosis(20, bad=records.bad_op(module=HOSTILE, name=HOSTILE))
    found = [records.note(20, HOSTILE), diagnosis, records.skip(21, reason=HOSTILE)]
    found += [records.culprits(21, HOSTILE), records.model_event([HOSTILE], name=HOSTILE)]
    start = records.header(command=[HOSTILE], machine=HOSTILE)
    records.write(folder, [start, *found, records.end(30.0, 21, HOSTILE)])
    main([*command, str(folder), *([str(folder)] if "--against" in command else [])])
    captured = capsys.readouterr()
    assert "good" in captured.out
    assert all(text.replace("\n", "").isprintable() for text in captured)


def test_words_that_are_no_arguments_are_not_obeyed_either(capsys):
    with pytest.raises(SystemExit):
        main(["report", "a", HOSTILE])
    assert capsys.readouterr().err.replace("\n", "").isprintable()


@pytest.mark.parametrize("options", [[], ["-o", "link.html"]])
def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path, capsys, options):
    folder = records.healthy(tmp_path / "a")
    (tmp_path / "other").write_text("mine")
    link = folder / (options[-1] if options else "report.html")
    link.symlink_to(tmp_path / "other")
    options = ["-o", str(link)] if options else []
    assert called(capsys, "report", folder, *options)[0] == 0
    assert (tmp_path / "other").read_text() == "mine"
    assert not link.is_symlink()
    assert "<html" in link.read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == sorted([link.name, "rank0.jsonl"])


def test_a_page_can_be_written_to_a_device(tmp_path, capsys):
    assert called(capsys, "report", records.healthy(tmp_path / "a"), "-o", os.devnull)[0] == 0
    assert not os.path.isfile(os.devnull)


def no_folder(folder):
    return folder


def empty_folder(folder):
    folder.mkdir()
    return folder


def a_file(folder):
    folder.write_text("print('hello')")
    return folder


def a_file_beside_a_record(folder):
    records.healthy(folder)
    (folder / "train.py").write_text("print('hello')")
    return folder / "train.py"


def no_json(folder):
    folder.mkdir()
    file_of(folder, 0).write_text("{]\n")
    return folder


def no_start(folder):
    header = records.header()
    del header["started"]
    return records.write(folder, [header, records.step(1)])


def damaged_start(folder):
    second = records.header(started="soon")
    return records.write(folder, [records.header(), records.step(1), second])


DAMAGED = [{"event": "step", "step": 1}, records.step(2, loss="much")]
BAD = [
    (no_folder, "does not exist"),
    (empty_folder, "holds no record"),
    (records.only_header, "the record contains no step"),
    (a_file, "is a file: give the folder of a record"),
    (a_file_beside_a_record, "is a file: give the folder of a record"),
    (no_json, "none of its lines begins a record"),
    (lambda folder: records.write(folder, [records.header(), *DAMAGED]), "contains no step"),
    (no_start, "rank0.jsonl: line 1 begins a run, but started is None"),
    (damaged_start, "rank0.jsonl: line 3 begins a run, but started is 'soon'"),
]


@pytest.mark.parametrize("command", ["report", "check"])
@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, command, make, message):
    path = make(tmp_path / "a")
    assert main([command, str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"halfstep {command}: {tmp_path / 'a'}")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_lines_that_lack_a_part_are_skipped_and_told(tmp_path, capsys):
    events = [records.header(), *DAMAGED, records.step(3), records.end(1.5, 3)]
    folder = records.write(tmp_path / "a", events)
    code, out, err = called(capsys, "report", folder, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["steps"]["num"] == 1
    assert [note["text"] for note in told["notes"]] == [
        "2 lines of rank0.jsonl are damaged and were left out: 2, 3 "
        "(the first: Object missing required field `time`)"
    ]
    _, out, _ = called(capsys, "report", folder)
    assert "2 lines of rank0.jsonl are damaged and were left out: 2, 3" in out
    assert main(["check", str(folder)]) == 0


def test_without_a_name_and_without_records(capsys):
    assert called(capsys, "report") == (
        2,
        "",
        "halfstep report: there is no record with a step under runs/: name the folder of one\n",
    )


def test_without_a_name_records_without_a_step_are_passed_over(tmp_path, capsys):
    full, empty = records.healthy(tmp_path / "runs/a"), records.only_header(tmp_path / "runs/b")
    os.utime(file_of(full, 0), (1, 1))
    code, _, err = called(capsys, "report")
    assert (code, err) == (0, "runs/a: the newest record under runs/\n")
    assert (full / "report.html").exists()
    assert not (empty / "report.html").exists()


def test_without_a_name_damaged_records_are_passed_over_and_named(tmp_path, capsys):
    os.utime(file_of(records.healthy(tmp_path / "runs/a"), 0), (1, 1))
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/rank0.jsonl").write_text("?")
    code, _, err = called(capsys, "report")
    assert code == 0
    assert err.splitlines()[0].startswith("runs/b/rank0.jsonl: none of its lines begins a record")
    assert err.splitlines()[1] == "runs/a: the newest record under runs/"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_of_several_records_in_a_folder_one_has_to_be_named(options, tmp_path, capsys):
    for position in range(4):
        folder = records.healthy(tmp_path / f"runs/{position}")
        os.utime(file_of(folder, 0), (position, position))
    assert called(capsys, "report", "runs", *options) == (
        2,
        "",
        "halfstep report: runs contains 4 records: name one of them, runs/3, runs/2, runs/1, ...\n",
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [("runs/train", "runs/train-2"), ("runs/trian-1", "runs/train-1"), ("rns/a", "runs")],
)
def test_a_record_that_does_not_exist_is_looked_for(given, meant, tmp_path, capsys):
    for name in ("train-1", "train-2", "other"):
        records.healthy(tmp_path / "runs" / name)
    (tmp_path / "runs" / "train-9.txt").touch()  # no folder
    code, out, err = called(capsys, "report", given)
    assert (code, out) == (2, "")
    assert f"{given} does not exist" in err
    assert f"did you mean {meant!r}" in err


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    code, _, err = called(
        capsys, "report", records.healthy(tmp_path / "a"), "-o", "no/such/page.html"
    )
    assert code == 2
    path = "no/such/page.html"
    assert err == f"halfstep report: {path}: cannot be written: No such file or directory; see -o\n"


def test_help_and_what_it_imports():
    script = (
        "import sys; from halfstep._tools.cli import main\n"
        "try: main(['report', '--help'])\n"
        "except SystemExit: pass\n"
        "loaded = [name for name in ('jinja2', 'halfstep._tools.report') "
        "if name in sys.modules]; sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--against RUN" in done.stdout


def test_a_pipe_that_nobody_reads_is_no_traceback(tmp_path):
    folder = records.healthy(tmp_path)
    command = f"{sys.executable} -m halfstep report {folder} --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_room_for_the_output_is_one_line(tmp_path):
    folder = records.healthy(tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "halfstep", "check", folder],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "halfstep check: [Errno 28] No space left on device\n"


def test_the_sentences_are_printed_if_the_page_cannot_be_written(tmp_path, capsys):
    folder = records.healthy(tmp_path)
    assert main(["report", str(folder), "-o", str(tmp_path / "no" / "page.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("good: Precision: fine")
    assert "cannot be written" in captured.err
