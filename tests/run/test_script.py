"""A script notices nothing: the same script under Python alone is the reference."""

import signal
import textwrap

import pytest

SHOW = """
import builtins, json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "file": __file__, "name": __name__,
    "spec": __spec__ and __spec__.name, "package": __package__, "loader": type(__loader__).__name__,
    "cached": __cached__, "doc": __doc__, "main": vars(main) is globals(),
    "builtins": __builtins__ is builtins, "names": sorted(set(dir()) - {"__annotations__"}),
}, indent=1))
"""

CHAINED = """
def inner():
    return 1 / 0

def outer():
    try:
        inner()
    except ZeroDivisionError as error:
        raise ValueError("outer") from error
"""

ENDS = {
    "falls off": "print('done')",
    "exit 3": "import sys; sys.exit(3)",
    "exit None": "import sys; sys.exit()",
    "exit with a text": "import sys; sys.exit('text')",
    "exit with an object": "raise SystemExit([1, 2])",
    "error": "def f():\n    raise ValueError('no')\n\nf()",
    "chained": CHAINED + "\nouter()",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['key']",
    "group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "in backward": "import torch\ntorch.ones(1).backward()",
    "no syntax": "print('never')\nif True\n    pass",
    "Ctrl-C": "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGINT)\n"
    "    while True:\n        pass\nf()",
    "Ctrl-C handled": "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
    "    while True:\n        pass\nexcept KeyboardInterrupt:\n    raise SystemExit(7)",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "own excepthook": "import sys, traceback\ndef hook(kind, error, tb):\n"
    "    print('mine', len(traceback.extract_tb(tb)), len(traceback.extract_tb("
    "error.__traceback__)))\nsys.excepthook = hook\n1 / 0",
    "atexit": "import atexit\natexit.register(print, 'bye')\n1 / 0",
    "thread": "import threading\ndef f():\n    raise ValueError('in a thread')\n"
    "t = threading.Thread(target=f, name='t'); t.start(); t.join()",
    "stderr": "import sys\nsys.stderr.close()\nprint('out')",
    "stdout": "import sys\nprint('out')\nsys.stdout.close()",
    "no stdout": "import sys\nsys.stdout = None",
}


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS)
def test_ends_as_under_python_alone(source, halfstep_run, python, tmp_path):
    """Exit code, signals, tracebacks without our frames, and nothing else on stdout and stderr."""
    (tmp_path / "train.py").write_text(source)
    assert halfstep_run("-q", "train.py") == python("train.py")


def test_a_full_disk_ends_as_under_python_alone(python, tmp_path):
    """Not in a forked process: the interpreter says it while it is taken down."""
    (tmp_path / "train.py").write_text(
        "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('out')"
    )
    done = python("-m", "halfstep", "run", "-q", "train.py")
    assert done == python("train.py")
    assert done.code == 120


def test_a_script_finds_what_python_gives_it(halfstep_run, python, tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text('"""About it."""' + SHOW)
    (tmp_path / "link.py").symlink_to(folder / "train.py")
    for script in ("scripts/train.py", folder / "train.py", "link.py"):
        arguments = (script, "--lr", "1", "--help", "-m", "--", "--every", "x")
        done = halfstep_run("-q", *arguments)
        assert done == python(*arguments)
        assert done.code == 0, done.err
        assert halfstep_run("-q", "--", *arguments) == done


def test_a_module_finds_what_python_gives_it(halfstep_run, python, tmp_path):
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import sys\n")
    (package / "__main__.py").write_text(SHOW)
    (package / "train.py").write_text("from . import sys as s\n" + SHOW)
    for module in ("package.inner.train", "package.inner"):
        done = halfstep_run("-q", "-m", module, "--help", "-q")
        assert done == python("-m", module, "--help", "-q")
        assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("no_such", "No module named no_such"),
        ("package.no_such", "No module named package.no_such"),
        (
            "package",
            "No module named package.__main__; 'package' is a package and cannot be "
            "directly executed",
        ),
        ("../package", "Relative module names not supported"),
    ],
)
def test_a_module_that_is_not_there(module, words, halfstep_run, python, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    done = halfstep_run("-q", "-m", module)
    assert done.code == python("-m", module).code == 1
    assert done.err == f"halfstep run: {words}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", [b"x = (", b"\x00\xff"])
def test_a_file_that_is_not_python_leaves_no_record(halfstep_run, tmp_path, text):
    (tmp_path / "train.py").write_bytes(text)
    done = halfstep_run("train.py")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("SyntaxError: ")
    assert not (tmp_path / "runs").exists()


def test_a_module_that_is_not_there_leaves_an_older_record_alone(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text("")
    halfstep_run("-q", "-o", "runs/a", "train.py")
    before = (tmp_path / "runs" / "a" / "rank0.jsonl").read_text()
    assert halfstep_run("-q", "-o", "runs/a", "-m", "train.py").code == 1
    assert (tmp_path / "runs" / "a" / "rank0.jsonl").read_text().startswith(before)


@pytest.mark.parametrize("option", ["--amp=bf16", "--diagnose", "--guard"])
@pytest.mark.parametrize(
    ("file", "module"), [("__init__.py", "package.train"), ("train.py", "package")]
)
def test_an_error_shows_no_frame_of_ours(file, module, option, halfstep_run, tmp_path):
    (tmp_path / "package").mkdir()
    bad = "from torch import nn\nnn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))('no')"
    for name in ("__init__.py", "train.py"):
        (tmp_path / "package" / name).write_text(bad if name == file else "")
    (tmp_path / "package" / "__main__.py").write_text("from package import train")
    done = halfstep_run("-q", option, "-m", module)
    assert done.code == 1
    lines = done.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'  File "{tmp_path}/package/{file}", line 2, in <module>' in lines
    assert "/halfstep/" not in done.err


@pytest.mark.parametrize("target", ["no-such.py", "."])
def test_a_script_that_is_not_there(target, halfstep_run, python, tmp_path):
    done = halfstep_run(target)
    assert done.code == 2
    assert done.err.startswith(f"halfstep run: can't open file '{target}': ")
    assert not (tmp_path / "runs").exists()
    if target != ".":
        assert python(target).code == 2


def test_objects_of_main_can_be_pickled_at_the_end(halfstep_run, python, tmp_path):
    (tmp_path / "train.py").write_text(
        "import atexit, pickle, sys\nclass State:\n    pass\n"
        "atexit.register(lambda: print(pickle.loads(pickle.dumps(State())).__class__ is State))\n"
    )
    done = halfstep_run("-q", "train.py")
    assert done == python("train.py")
    assert done.out == "True\n"


def test_processes_of_a_script_can_import_it(halfstep_run, python, tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import multiprocessing, os, sys
        print("loaded as", __name__)

        def square(x):
            return x * x, __name__

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(square, [3]))
        """)
    )
    done = halfstep_run("-q", "train.py")
    assert done == python("train.py")
    assert "spawn [(9, '__mp_main__')]" in done.out
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text((tmp_path / "train.py").read_text())
    assert halfstep_run("-q", "-m", "package.train") == python("-m", "package.train")


def test_a_script_may_execute_its_configuration(halfstep_run, python, tmp_path):
    (tmp_path / "config.py").write_text("rate = 2 * rate")
    (tmp_path / "train.py").write_text("rate = 1\nexec(open('config.py').read())\nprint(rate)")
    assert halfstep_run("-q", "train.py") == python("train.py") == (0, "2\n", "")


def test_python_p_puts_no_folder_on_the_path(tmp_path, monkeypatch):
    """``python -P``: the script's folder stays out."""
    import sys
    from types import SimpleNamespace

    from halfstep._tools.run import launch

    (tmp_path / "train.py").write_text("")
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, ["before"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=True))
    launch.execute(str(tmp_path / "train.py"), [], is_module=False)
    assert sys.path == ["before"]
    monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=False))
    launch.execute(str(tmp_path / "train.py"), [], is_module=False)
    assert sys.path == [str(tmp_path)]


def test_ctrl_c_is_a_death_by_signal(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(ENDS["Ctrl-C"])
    assert halfstep_run("train.py").code == -signal.SIGINT


def test_an_option_after_the_script_is_noted(halfstep_run, tmp_path):
    """It is the script's; a note says so, unless the script seems to have such an option."""
    (tmp_path / "train.py").write_text("print('ran')")
    done = halfstep_run("train.py", "--diagnose", "--every=3", "--lr", "3")
    assert (done.code, done.out) == (0, "ran\n")
    assert "--diagnose comes after train.py, so the script receives it" in done.err
    assert "halfstep run --every ... train.py" in done.err
    assert "--lr" not in done.err
    (tmp_path / "train.py").write_text("parser = '--diagnose'")
    assert "comes after" not in halfstep_run("train.py", "--diagnose").err
    (tmp_path / "train.py").write_text("")
    assert halfstep_run("-q", "train.py", "--diagnose").err == ""
