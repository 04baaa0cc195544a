"""Scripts that start their other ranks themselves, as Lightning's ``strategy="ddp"`` does."""

import subprocess

import pytest

from halfstep._run.launch import other_ranks_refused

# What Lightning's launcher does, for a script and for a module.
STARTS = """
import os, subprocess, sys
import __main__
os.environ["WORLD_SIZE"] = "2"
again = [sys.argv[0]] if __main__.__spec__ is None else ["-m", __main__.__spec__.name]
if "LOCAL_RANK" in os.environ:
    print("other rank", flush=True)
else:
    command = [sys.executable, *again, *sys.argv[1:]]
    subprocess.run(command, env=os.environ | {"LOCAL_RANK": "1"}, check=True)
"""

# The same beside it: other programs, and the script for something that is not a rank.
STARTS_OTHERS = """
import os, subprocess, sys
if "AGAIN" not in os.environ:
    program = [sys.executable, "-c", "print('program')"]
    subprocess.run(program, env=os.environ | {"WORLD_SIZE": "2"}, check=True)
    subprocess.run([sys.executable, sys.argv[0]], env=os.environ | {"AGAIN": "1"}, check=True)
    subprocess.run("echo shell", shell=True, env=os.environ | {"WORLD_SIZE": "2"}, check=True)
    (sys.stdout.flush(), print("end"))
else:
    print("again")
"""


# Workers of a job that has ranks, but are none.
STARTS_WORKERS = """
import os, subprocess, sys
if "--work" in sys.argv:
    print("worker")
else:
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    subprocess.run([sys.executable, sys.argv[0], "--work"], check=True)
"""


@pytest.mark.parametrize(
    ("words", "script"), [(("train.py",), "train.py"), (("-m", "train"), "-m train")]
)
def test_a_script_that_starts_its_other_ranks_is_told_the_cure(
    halfstep_run, tmp_path, words, script
):
    (tmp_path / "train.py").write_text(STARTS)
    done = halfstep_run("--amp", "fp16", *words, "--lr", "a b")
    assert done.code == 1
    assert "other rank" not in done.out
    last = [line for line in done.err.splitlines() if "RanksError" in line][-1]
    assert "train.py starts its other ranks itself" in last
    assert last.endswith(f"torchrun --nproc-per-node 2 -m halfstep run {script} --lr 'a b'")


@pytest.mark.parametrize("options", ['"-u"', '"-X", "utf8", "-u"', '"-W", "ignore"'])
def test_options_of_python_hide_no_rank(halfstep_run, tmp_path, options):
    starts = STARTS.replace("[sys.executable,", f"[sys.executable, {options},")
    assert starts != STARTS
    (tmp_path / "train.py").write_text(starts)
    done = halfstep_run("-q", "train.py")
    assert done.code == 1
    assert "train.py starts its other ranks itself" in done.err


def test_other_programs_are_started(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(STARTS_OTHERS)
    done = halfstep_run("-q", "train.py")
    assert (done.code, done.out.split()) == (0, ["program", "again", "shell", "end"])


def test_workers_of_a_rank_are_started(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(STARTS_WORKERS)
    done = halfstep_run("-q", "train.py")
    assert (done.code, done.out) == (0, "worker\n")


def test_ranks_of_a_launcher_start_what_they_like(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(STARTS)
    done = halfstep_run("-q", "train.py", environ={"WORLD_SIZE": "2", "RANK": "0"})
    assert (done.code, done.out) == (0, "other rank\n")


def test_nothing_stays():
    before = subprocess.Popen.__init__
    with other_ranks_refused("train.py"):
        assert subprocess.Popen.__init__ is not before
    assert subprocess.Popen.__init__ is before
