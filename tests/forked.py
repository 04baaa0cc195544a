"""Python scripts and halfstep's commands, each in a process of its own, that start at once.

To import PyTorch and halfstep takes seconds. One process, started at the first call, has imported
them and forks for each. What is forked ends as any Python process does: exit code, traceback,
signals, threads and what was registered for the exit are real. Only the interpreter is not taken
down: that would write to, and so copy, the memory of all that was imported, for most of a second::

    done = forked.python("train.py", "--steps", 3, cwd=folder)
    done = forked.python("-m", "halfstep", "run", "train.py", cwd=folder)

A test of what is imported, of the order in which that happens, or of what an interpreter says when
it is taken down, needs ``subprocess``.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SERVER = """
import atexit, gc, json, os, runpy, signal, sys, threading, warnings

with warnings.catch_warnings():
    warnings.simplefilter("error")
    import halfstep, halfstep._tools.run.session, torch
warnings.simplefilter("ignore", DeprecationWarning)
import torch._dynamo  # what optimizers import
from halfstep._tools.cli import main

gc.collect()
gc.freeze()  # a collection in what is forked would write to, and so copy, the memory of all this
for line in sys.stdin:
    call = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(call["cwd"])
os.environ.clear()
os.environ.update(call["environ"])
for number, name in (1, "stdout"), (2, "stderr"):
    os.dup2(os.open(call[name], os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
if call["warnings"]:
    warnings.simplefilter(call["warnings"])
sys.path[1:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
script, *arguments = call["arguments"]
code, is_interrupted = 0, False
try:
    if [script, *arguments[:1]] == ["-m", "halfstep"]:
        sys.exit(main(arguments[1:]))
    sys.argv = [script, *arguments]
    if script == "-c":
        sys.argv.pop(1)
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if end.code is not None and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
except BaseException as error:
    code, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    sys.excepthook(type(error), error, error.__traceback__)
threading._shutdown()
atexit._run_exitfuncs()
for stream in sys.stdout, sys.stderr:
    if stream is not None and not stream.closed:
        stream.flush()
if is_interrupted:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
os._exit(code & 255)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


def python(
    *arguments: object, cwd: Path, environ: dict[str, str] | None = None, warnings: str = ""
) -> Done:
    """Do what ``python ARGUMENTS`` does in a folder; they begin with a script, -c or -m halfstep.

    Args:
        *arguments: those after ``python``.
        cwd: the folder.
        environ: variables that are set beside the test's own.
        warnings: what becomes of all warnings, as after ``python -W``.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="forked") as folder:
        streams = {name: Path(folder, name) for name in ("stdout", "stderr")}
        call = {
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd),
            "environ": {**os.environ, **(environ or {}), "OMP_NUM_THREADS": "1"},
            "warnings": warnings,
            **{name: str(path) for name, path in streams.items()},
        }
        print(json.dumps(call), file=server.stdin, flush=True)
        try:
            code = int(server.stdout.readline())
        except BaseException:  # it took too long: the next test begins with another one
            server.kill()
            _server.cache_clear()
            raise
        return Done(code, *(path.read_text() for path in streams.values()))


def one_after_another(*calls: list[object], cwd: Path, warnings: str = "") -> list[str]:
    """Run scripts, or -m halfstep, in one process that imports once; return what each prints."""
    lines = [[str(each) for each in call] for call in calls]
    code = (
        "import halfstep._tools.cli as cli, os, runpy, sys, tempfile\n"
        f"for sys.argv in {lines}:\n"
        f"    os.chdir(tempfile.mkdtemp(dir={str(cwd)!r}))  # each leaves its files in its own\n"
        "    if sys.argv[0] == '-m': assert cli.main(sys.argv[2:]) == 0\n"
        "    else: runpy.run_path(sys.argv[0], run_name='__main__')\n    print('\\0', end='')\n"
    )
    done = python("-c", code, cwd=cwd, warnings=warnings)
    assert done.code == 0, done.err
    return done.out.split("\0")[:-1]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    atexit.register(process.communicate)  # which closes its stdin, and with that it ends
    return process
