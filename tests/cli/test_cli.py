import os
import signal
import subprocess
import sys

import pytest
from tests.report import records

import halfstep
from halfstep._tools.cli import main

pytestmark = pytest.mark.slow

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from halfstep._tools.cli import main; sys.exit(main())",
]


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"halfstep {halfstep.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], ["doctor", "--version"]), (["report", "--help"], ["--against", "examples:"])],
)
def test_help(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)


@pytest.mark.parametrize("command", ["", "run", "report", "help"])
def test_help_is_a_command_too(command, capsys):
    for words in ([*command.split(), "--help"], ["help", *command.split()]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :] != ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["help", "reprot"], "'reprot': choose one of run, report, "),
        (["report", "a", "b"], "arguments: b; to compare them: halfstep report a --against b"),
        (["policy", "show", "standard"], "print(halfstep.preset('standard').by_action())"),
        (["diagnose", "train.py"], "; did you mean 'halfstep run --diagnose'?\n"),
        (["tune", "train.py:make"], "tune is a function: print(halfstep.tune(model, batches, loss"),
    ],
)
def test_what_is_no_command_is_an_error_with_the_cure(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "run", "report", "check", "doctor"])
def test_a_help_fits_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_without_a_command_it_shows_the_help(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run x", "report {record}", "doctor x"])
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
        timeout=60,
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
