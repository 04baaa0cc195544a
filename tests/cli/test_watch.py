"""``halfstep watch`` as it is used: beside a training that writes its record."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.record import events

from halfstep._cli import main
from halfstep._record.files import file_of

COMMAND = [sys.executable, "-c", "import sys; from halfstep._cli import main; sys.exit(main())"]
HEADER = {
    "event": "run",
    "schema": 1,
    "halfstep": "1",
    "every": 2,
    "started": "2026-01-01T00:00:00+00:00",
    "command": ["train.py"],
}
END = {"event": "end", "time": 3.0, "steps": 3, "error": None}


step = functools.partial(events.step, loss=2.5)


def write(folder, *lines):
    events.write(folder, lines)


@pytest.fixture
def training(monkeypatch):
    """Goes on a little whenever the watcher waits; ends in Ctrl-C when there is nothing left."""
    todo = []

    def sleep(seconds):
        if not todo:
            raise KeyboardInterrupt
        todo.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)
    return todo


def test_it_waits_follows_and_ends_with_the_run(tmp_path, training, capsys):
    folder = tmp_path / "x"
    training += [
        lambda: None,
        lambda: write(folder, HEADER, step(1)),
        lambda: write(folder, step(2, taken=False, reason="overflow", scale_after=4.0)),
        lambda: write(folder, step(3), END),
        lambda: pytest.fail("it does not end"),
    ]
    assert main(["watch", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"run {folder}  train.py",
        "step 1  loss 2.5  scale 2^3  norm 1  taken",
        "step 2  loss 2.5  scale 2^3  norm 1  skipped: overflow, scale now 2^2",
        "ended  step 3, 0:00:03, 1 s/step, skipped 1 of 3 (33 %)",
    ]
    assert err == (
        f"waiting for a record in {folder} ... "
        f"start the training with `halfstep run -o {folder} train.py`\n"
    )


def test_every(tmp_path, training, capsys):
    write(tmp_path, HEADER, step(1), step(2), step(3), END)
    assert main(["watch", str(tmp_path), "--every", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1", "3"]


def test_ctrl_c_is_a_normal_end(tmp_path, training, capsys):
    assert main(["watch", str(tmp_path / "x")]) == 0
    write(tmp_path, HEADER, step(1))
    assert main(["watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("running  step 1")


def test_silence_is_told_once_and_again_after_news(tmp_path, training, capsys):
    def be_silent():
        os.utime(file_of(tmp_path, 0), (0, 0))

    write(tmp_path, HEADER, step(1))
    training += [be_silent, be_silent, lambda: write(tmp_path, step(2)), be_silent]
    assert main(["watch", str(tmp_path)]) == 0
    starts = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert starts == ["run", "step", "silent:", "step", "silent:", "silent:"]


def test_without_a_name_it_is_the_newest_record(tmp_path, training, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training += [lambda: write(tmp_path / "runs/new", HEADER, step(7), END)]
    assert main(["watch"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("run runs/new")
    assert err.startswith("waiting for a record in runs/ ... start the training")
    write(tmp_path / "runs/old", HEADER, step(1), END)
    os.utime(file_of(tmp_path / "runs/old", 0), (1, 1))
    for words in (["watch"], ["watch", "runs"]):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("run runs/new")
    assert main(["watch", "runs/old"]) == 0
    assert capsys.readouterr().out.startswith("run runs/old")


@pytest.mark.parametrize("name", ["x", "a" * 100])
def test_once_and_a_file_of_the_record(tmp_path, capsys, training, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    folder = Path(name)
    write(folder, HEADER, step(1, loss=2.25))
    assert main(["watch", "--once", str(file_of(folder, 0))]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("  running")
    assert "2.25" in out
    assert f"report: halfstep report {name}" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere", "--once"], "there is not yet a record in nowhere; start the training with"),
        (["--once"], "there is not yet a record in runs/; start the training"),
        (["train.py"], "train.py is not a record: give the folder"),
        (["other"], "other/rank0.jsonl: none of its lines begins a record"),
        (["other", "--every", "0"], "--every must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "other").mkdir()
    file_of(tmp_path / "other", 0).write_text("hello\n")
    assert main(["watch", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"halfstep watch: {message}")
    assert (out, err.count("\n")) == ("", 1)


@pytest.fixture
def no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)


def test_without_rich_there_are_lines_and_the_page_names_the_cure(tmp_path, capsys, no_rich):
    write(tmp_path, HEADER, step(1), END)
    assert main(["watch", str(tmp_path)]) == 0
    assert "step 1" in capsys.readouterr().out
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert capsys.readouterr().err == (
        "halfstep watch: needs the package rich, which is not installed; "
        "install it with: pip install rich\n"
    )


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    write(tmp_path, HEADER, *(step(number) for number in range(1, 20000)))
    with subprocess.Popen(
        [*COMMAND, "watch", str(tmp_path), "--every", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline().startswith(b"run")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# --- on a terminal --------------------------------------------------------------------------------

ALTERNATE, USUAL = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW_CURSOR = b"\x1b[?25h"


class Terminal:
    """``halfstep watch`` with a terminal of 24 lines of 80 characters."""

    def __init__(self, *argv, **environment):
        pty = pytest.importorskip("pty")
        self._terminal, its = pty.openpty()
        environment = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"} | environment
        self.process = subprocess.Popen(
            [*COMMAND, "watch", *argv],
            stdin=its,
            stdout=its,
            stderr=its,
            env=os.environ | environment,
            start_new_session=True,
        )
        os.close(its)
        self.seen = b""

    def read_until(self, words):
        while words not in self.seen:
            self.seen += self._read() or pytest.fail(f"{words} never came: {self.seen!r}")
        return self.seen

    def read_rest(self):
        while more := self._read():
            self.seen += more
        os.close(self._terminal)
        self.process.wait()
        return self.seen

    def _read(self):
        try:
            return os.read(self._terminal, 65536)
        except OSError:  # nobody has it open any more
            return b""


def test_the_page_is_drawn_in_place_and_its_last_state_stays(tmp_path):
    write(tmp_path, HEADER, step(1))
    terminal = Terminal(str(tmp_path))
    terminal.read_until(b"step 1 ")
    write(tmp_path, step(2, loss=0.125))
    seen = terminal.read_until(b"0.125")
    assert seen.count(ALTERNATE) == 1
    assert b"\x1b[2J" not in seen  # clearing flickers
    write(tmp_path, step(3, loss=0.0625), END)
    before, after = terminal.read_rest().split(USUAL)
    assert b"0.0625" in before
    assert b"0.0625" in after
    assert b"report: halfstep report" in after
    assert SHOW_CURSOR in before + after
    assert terminal.process.returncode == 0


def test_a_killed_watcher_gives_the_terminal_back(tmp_path):
    write(tmp_path, HEADER, step(1))
    terminal = Terminal(str(tmp_path))
    terminal.read_until(b"step 1 ")
    terminal.process.send_signal(signal.SIGTERM)
    seen = terminal.read_rest()
    assert USUAL in seen
    assert SHOW_CURSOR in seen
    assert b"Traceback" not in seen
    assert terminal.process.returncode == 128 + signal.SIGTERM


def test_a_dumb_terminal_gets_lines(tmp_path):
    write(tmp_path, HEADER, step(1), END)
    terminal = Terminal(str(tmp_path), TERM="dumb")
    assert b"\x1b" not in terminal.read_rest()
    assert b"step 1  loss 2.5" in terminal.seen


def test_the_training_is_looked_at_twice_a_second(tmp_path, monkeypatch):
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        write(tmp_path, END)

    monkeypatch.setattr(time, "sleep", sleep)
    write(tmp_path, HEADER)
    assert main(["watch", str(tmp_path)]) == 0
    assert waited == [0.5]
