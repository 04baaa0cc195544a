import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.report import records

import halfstep
from halfstep._cli import main

COMMAND = [sys.executable, "-c", "import sys; from halfstep._cli import main; sys.exit(main())"]
TINY = ["demo", "--size", "tiny", "--steps", "2"]


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"halfstep {halfstep.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], ["demo", "--version"]), (["demo", "--help"], ["--precision", "examples:", "-o"])],
)
def test_help(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)


@pytest.mark.parametrize(
    "command",
    ["", "run", "report", "check", "doctor", "tune", "policy", "policy show", "demo"],
)
def test_a_help_fits_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_without_a_command_it_shows_the_help(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_the_defaults_in_the_help_are_the_defaults(capsys):
    from halfstep._demo.train import DemoSettings

    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    settings = DemoSettings()
    assert f"steps of each run (default: {settings.steps})" in out
    assert f"{settings.device} (default)" in out
    assert f"{settings.size} (default)" in out
    assert f"(default: {settings.seed})" in out
    assert f"is a share (default: {settings.mean_over}," in out


def test_demo_does_as_it_is_told(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a princess. " * 100)
    options = ["--precision", "bf16", "fp32", "--text", str(text), "--seed", "3"]
    assert main([*TINY, *options, "--mean-over", "999", "-o", str(tmp_path / "out")]) == 0
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    settings = document["settings"]
    assert [run["precision"] for run in document["runs"]] == ["fp32", "bf16"]
    assert (settings["steps"], settings["seed"], settings["mean_over"]) == (2, 3, 999)
    assert (settings["size"], settings["text"]) == ("tiny", repr(str(text)))
    assert "bf16 autocast" in capsys.readouterr().out


def test_a_quick_demo_has_fewer_steps(tmp_path, capsys):
    options = ["--size", "tiny", "--precision", "fp32", "-o", str(tmp_path)]
    assert main(["demo", "--quick", *options]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["steps"] == 30
    with pytest.raises(SystemExit):
        main(["demo", "--quick", "--steps", "3"])
    assert "not allowed with argument --quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--precision", "fp8"], "no precision is called 'fp8'; choose fp32"),
        (["--text", "no-such-file"], "cannot read --text 'no-such-file': No such file"),
        (["--size", "big"], "no size is called 'big'"),
        (["--output", "/dev/null/x"], "cannot write to --output '/dev/null/x': Not a directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(options, message, capsys):
    assert main([*TINY, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"halfstep demo: {message}")
    assert err.count("\n") == 1


def test_ctrl_c_is_130(monkeypatch, tmp_path):
    import halfstep._demo.demo as module

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", stop)
    assert main([*TINY, "-o", str(tmp_path)]) == 130
    monkeypatch.setattr(module, "measure_machine", stop)
    assert main([*TINY, "-o", str(tmp_path)]) == 130


def test_without_rich_the_cure_is_named(tmp_path):
    script = (
        "import sys; sys.modules['rich'] = None; from halfstep._cli import main; "
        f"sys.exit(main(['demo', '-o', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "halfstep demo: needs the package rich, which is not installed; "
        "install it with: pip install rich\n"
    )


def test_the_installed_command_trains(tmp_path):
    command = Path(sys.executable).with_name("halfstep")
    done = subprocess.run(
        [command, *TINY, "--precision", "fp32", "-o", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "training loss" in done.stdout
    assert done.stderr == ""


def test_a_real_ctrl_c_ends_it_cleanly(tmp_path):
    """SIGINT in the middle of training: table, plot and numbers, 130, no traceback."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--size", "tiny", "--steps", "100000", "-o", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("fp32:"):
        assert process.poll() is None
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert "Interrupted: these are the results so far." in out
    assert "stopped at" in out
    assert '"finished": false' in (tmp_path / "results.json").read_text()
    assert (tmp_path / "losses.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "command",
    ["run x", "report {record}", "doctor x", "tune x", "policy show x", "demo"],
)
def test_ctrl_c_while_pytorch_is_imported(command, tmp_path):
    """No traceback, and 130; ``run`` ends by the signal, as its script would."""
    record = records.with_skips(tmp_path / "record")  # with a cure, which PyTorch checks
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    while True:\n        pass\n"
        "except KeyboardInterrupt:\n    raise ImportError('as NumPy does') from None\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", *command.format(record=record).split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    if command == "run x":
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    else:
        assert (done.returncode, done.stderr) == (130, "\nInterrupted.\n")


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-"])
def test_a_closed_stdout_is_no_error(streams, tmp_path):
    (tmp_path / "train.py").write_text("print('out')\n")
    command = f"{sys.executable} -m halfstep run -q -o {tmp_path}/out {tmp_path}/train.py {streams}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
