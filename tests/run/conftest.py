"""A process that has imported halfstep and forks for each call of the command line.

What is forked ends as any Python process does: exit code, traceback and signals are real.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SERVER = """
import json, os, sys
import torch._dynamo  # what optimizers import, once for all scripts
import halfstep._run.session
from halfstep._cli import main

for line in sys.stdin:
    call = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(call["cwd"])
os.environ.update(call["environ"])
for number, name in (1, "stdout"), (2, "stderr"):
    os.dup2(os.open(call[name], os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
sys.exit(main(["run", *call["arguments"]]))
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.fixture
def halfstep_run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Returns a function that does what ``halfstep run ARGUMENTS`` does in ``tmp_path``."""

    def run(*arguments: object, environ: dict[str, str] | None = None) -> Done:
        streams = {name: str(tmp_path / f".{name}") for name in ("stdout", "stderr")}
        call = {
            "arguments": list(map(str, arguments)),
            "cwd": str(tmp_path),
            "environ": environ or {},
        }
        print(json.dumps(call | streams), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return Done(code, *(Path(path).read_text() for path in streams.values()))

    return run


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Returns a function that runs ``python ARGUMENTS`` in ``tmp_path``."""

    def run(*arguments: object) -> Done:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
