"""Processes that a script starts: each records itself, and computes as without halfstep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked

CORPUS = Path(__file__).parent / "corpus" / "children"
PROCESSES = CORPUS / "processes.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def steps_of(folder: Path) -> dict[str, int]:
    """Return the number of recorded steps by file; each record has an end."""
    found = {}
    for file in sorted((folder / "runs").rglob("rank*.jsonl")):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        assert [each["event"] for each in events][-1] == "end"
        name = "/".join(file.relative_to(folder / "runs").parts[1:])
        found[name] = sum(each["event"] == "step" for each in events)
    return found


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes(method, halfstep_run, folder):
    """They have no rank: a folder each, in the order of their first steps."""
    # Alone, they compute the same however they are started; a fork does it at once.
    alone = forked.python(PROCESSES, "fork", "train", 3, 4, cwd=folder)
    done = halfstep_run(PROCESSES, method, "train", 3, 4)
    assert (done.code, done.out) == (alone.code, alone.out) == (0, alone.out)
    assert steps_of(folder) == {"process-1/rank0.jsonl": 3, "process-2/rank0.jsonl": 4}
    assert "halfstep: 2 processes of the program recorded: halfstep report runs/proc" in done.err


def test_ranks(halfstep_run, folder):
    alone = forked.python(CORPUS / "ranks.py", "forkserver", cwd=folder)
    (folder / "store").unlink(missing_ok=True)
    # A spawned rank may abort at its end: a thread of gloo then frees a context of Python's, which
    # PyTorch 2.13 keeps for each all-reduce of a backward pass. These import the script anew, too.
    done = halfstep_run(CORPUS / "ranks.py", "forkserver")
    assert (done.code, done.out) == (alone.code, alone.out) == (0, alone.out)
    assert steps_of(folder) == {"rank0.jsonl": 5, "rank1.jsonl": 5}


def test_the_last_lines_of_ranks_under_amp(halfstep_run, folder, monkeypatch):
    """The launcher has no step, and says only where those of its ranks are."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    options = ("--amp", "fp16", "-o", "runs/x", "torchrun", "--nproc-per-node", 2)
    done = halfstep_run(*options, CORPUS / "plain_ranks.py")
    first, last = (line for line in done.err.splitlines() if line.startswith("halfstep: "))
    assert "Linear.forward runs under autocast, 1 of 1 product in" in first
    assert last == "halfstep: 2 processes of the program recorded: halfstep report runs/x"
    assert steps_of(folder) == {"rank0.jsonl": 3, "rank1.jsonl": 3}


@pytest.mark.parametrize(
    ("framework", "script", "options"),
    [("lightning", "lightning_ddp.py", ["--amp", "bf16"]), ("accelerate", "notebook.py", [])],
)
def test_launchers_of_frameworks(framework, script, options, halfstep_run, folder):
    pytest.importorskip(framework)
    done = halfstep_run(*options, CORPUS / script)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 4, "rank1.jsonl": 4}


def test_workers_of_ray(halfstep_run, folder):
    """They are killed at the end, and lose their last steps."""
    pytest.importorskip("ray")
    done = halfstep_run(CORPUS / "ray_workers.py")
    assert done.code == 0, done.err
    files = sorted((folder / "runs").rglob("process-*/rank0.jsonl"))
    assert [file.read_text().count('"event":"step"') > 0 for file in files] == [True, True]


@pytest.mark.parametrize(("method", "num"), [("spawn", 1), ("fork", 2)])
def test_workers_of_a_data_loader_leave_nothing(method, num, halfstep_run, folder):
    """And say nothing: each line is the program's own."""
    done = halfstep_run("--amp", "bf16", CORPUS / "loader.py", method, num)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 4}
    amp, last = done.err.splitlines()
    assert amp.startswith("halfstep: --amp bf16: Linear.forward runs under autocast")
    assert last.startswith(
        "halfstep: 4 steps recorded, 0 skipped; all products with gradients ran in bfloat16: "
    )


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_children(method, halfstep_run, folder):
    done = halfstep_run("--no-children", PROCESSES, method, "train", "--alone", 2, 3)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 2}


def test_options_hold_in_a_process(halfstep_run, folder):
    done = halfstep_run("--policy", "torch; softmax:fp32", PROCESSES, "spawn", "dtype", 1)
    assert done.out == "torch.float32\n"
    assert "no optimizer step was seen" in done.err


def test_a_guard_of_ranks_that_average_by_hand(halfstep_run, folder):
    done = halfstep_run("--guard=1.0", "--guard-ranks=alone", CORPUS / "averaged.py")
    assert done.code == 0, done.err
    one, other = done.out.split()
    assert one == other != "nan"


@pytest.mark.parametrize(
    ("options", "method", "function", "said"),
    [
        (["--diagnose"], "forkserver", "train_badly", "step 1 went bad:\n"),
        (["--diagnose"], "fork", "train_to_nan", "step 1 went bad:\n"),
        ([], "fork", "train_to_nan", "an optimizer stepped although the loss was inf or NaN"),
    ],
)
def test_a_process_says_what_went_bad(options, method, function, said, halfstep_run, folder):
    done = halfstep_run(*options, PROCESSES, method, function, 3)
    assert done.code == 0, done.err
    assert f"halfstep: process-1, {said}" in done.err


def test_each_line_names_its_process(halfstep_run):
    """Also one that is said before the first step."""
    done = halfstep_run("-o", "x", "--guard", PROCESSES, "spawn", "train", "--alone", 2, 3, 4)
    lines = [line.removeprefix("halfstep: ") for line in done.err.splitlines()]
    assert [line.partition("--")[0] for line in lines[:-1]] == ["", "process-1, ", "process-2, "]
    assert lines[-1].startswith("main process: 2 steps recorded, 0 skipped; ")
    assert lines[-1].endswith("; 2 processes that it started recorded too: halfstep report x")


def test_the_error_of_a_process_is_its_end(halfstep_run, folder):
    """Also in a fork of one that handles an error itself."""
    assert halfstep_run("-o", "x", CORPUS / "failing.py").code == 0
    files = sorted((folder / "x").rglob("rank*.jsonl"))
    ends = [json.loads(file.read_text().splitlines()[-1])["error"] for file in files]
    assert ends == ["SystemExit: 4", "ValueError: of the process", None]


def hooked(folder: Path, *more: object) -> dict[str, str]:
    """Return the environment of a process of a run, with folders that are searched for modules."""
    from halfstep._tools.run.session import HOOK, VARIABLE

    values = {"folder": str(folder / "runs/x"), "policy": "torch", "every": 50}
    values |= {"amp": None, "is_quiet": False}
    paths = os.pathsep.join([HOOK, *map(str, more), os.environ.get("PYTHONPATH", "")])
    return os.environ | {VARIABLE: json.dumps(values), "PYTHONPATH": paths}


def run_python(source: str, environ: dict[str, str], *options: str) -> tuple[int, str, str]:
    command = [sys.executable, *options, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    return done.returncode, done.stdout, done.stderr


def test_the_sitecustomize_that_is_hidden_runs(folder):
    (folder / "sitecustomize.py").write_text("print('hidden', __file__ in __file__)\n")
    source = "import sys; print(sys.modules['sitecustomize'].__file__, 'torch' in sys.modules)"
    code, out, err = run_python(source, hooked(folder, folder))
    assert (code, err) == (0, "")
    assert out == f"hidden True\n{folder / 'sitecustomize.py'} False\n"


def test_a_process_without_pytorch_loads_nothing_of_it(folder):
    source = "import sys; print(*(m for m in sys.modules if 'halfstep' in m or 'torch' in m))"
    assert run_python(source, hooked(folder)) == (0, "\n", "")


def test_an_interpreter_without_halfstep_goes_on(folder):
    """A `torch` of its own stands for another environment."""
    (folder / "torch.py").write_text("print('another torch')\n")
    (folder / "halfstep.py").write_text("raise ImportError('not here')\n")
    source = "import torch; print('end')"
    assert run_python(source, hooked(folder, folder)) == (0, "another torch\nend\n", "")


def test_halfstep_may_be_imported_first(folder):
    """What the process starts in turn finds what it found."""
    environ = hooked(folder, CORPUS)
    source = "from halfstep import GradScaler\nimport os, work\nwork.train(3)\n"
    source += f"print(*(os.environ[name] == each for name, each in {environ}.items()))"
    code, out, err = run_python(source, environ)
    trained, same = out.splitlines()
    assert (code, trained.split()[0], err) == (0, "3", "")
    assert "False" not in same
    assert steps_of(folder) == {"process-1/rank0.jsonl": 3}


def test_a_process_that_cannot_record_trains(folder):
    (folder / "runs").write_text("a file")
    source = "import torch\nfrom halfstep import GradScaler\nimport work\nwork.train(3)"
    code, out, err = run_python(source, hooked(folder, CORPUS))
    assert (code, out.split()[0]) == (0, "3")
    assert "can no longer write" in err
