"""Which rooms of halfstep, and which heavy libraries, are loaded for what is asked for."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.report import records

import halfstep

pytestmark = pytest.mark.slow

# To a file: a command prints to stdout itself.
LOADED = """
import sys
{code}
names = set(sys.modules)
parts = [name.split(".") for name in names if name.startswith("halfstep.")]
rooms = {{part[2] if part[1:2] == ["_tools"] and part[2:] else part[1] for part in parts}}
rooms -= {{"_version", "_tools"}}  # one line each
heavy = names & {{"torch", "torch.distributed", "torch._dynamo", "msgspec", "jinja2"}}
with open({path!r}, "w") as file:
    print(*sorted(rooms | heavy), file=file)
"""
COMMAND = """
from halfstep._tools.cli import main
try:
    main({words!r})
except SystemExit as ended:
    assert ended.code == 0, ended.code
"""


def loaded(code: str, folder: Path) -> set[str]:
    """Return the rooms and libraries that a fresh interpreter has loaded after running code."""
    path = folder / "loaded.txt"
    script = LOADED.format(code=code, path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(path.read_text().split())


def loaded_by(words: Iterable[object], folder: Path) -> set[str]:
    return loaded(COMMAND.format(words=[str(word) for word in words]), folder)


def test_halfstep_alone_loads_nothing(tmp_path: Path) -> None:
    assert loaded("import halfstep; dir(halfstep); hasattr(halfstep, 'x')", tmp_path) == set()


def test_errors_need_no_pytorch(tmp_path: Path) -> None:
    code = "import halfstep; halfstep.errors.RecordError; halfstep.CallOrderError"
    assert loaded(code, tmp_path) == {"errors"}


def test_a_training_loads_autocast_and_the_scaler_only(tmp_path: Path) -> None:
    found = loaded("from halfstep import GradScaler, autocast", tmp_path)
    rooms = {"_autocast", "_common", "_scaler", "_gradients", "_pytorch", "errors"}
    assert found == {*rooms, "torch", "torch.distributed"}


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["run", "--help"], ["report", "--help"], ["doctor", "-h"]]
)
def test_help_loads_the_command_line_only(words: list[str], tmp_path: Path) -> None:
    assert loaded_by(words, tmp_path) == {"cli", "_common", "record", "errors", "json", "msgspec"}


READING = {
    *("_common", "errors"),
    *("cli", "json", "line", "record", "report", "statistics", "trace"),
    *("diagnose", "replay", "watch"),  # of each, the files of values
}


@pytest.mark.parametrize(("words", "more"), [(["report"], {"jinja2"}), (["check"], set())])
def test_a_record_is_read_without_pytorch(words: list[str], more: set[str], tmp_path: Path) -> None:
    folder = records.healthy(tmp_path)
    assert loaded_by([*words, folder], tmp_path) == {*READING, "msgspec", *more}


CORPUS = Path(__file__).parent / "corpus" / "imports"
TRAINING = (CORPUS / "training.py").read_text()
INTEGRATIONS = (CORPUS / "integrations.py").read_text()
TOOLS = (CORPUS / "tools.py").read_text()


def without(package: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter without a package, all packages of the tools if it is empty."""
    missing = [package] if package else ["jinja2", "msgspec"]
    block = f"import sys; sys.modules |= dict.fromkeys({missing!r})"
    message = f"halfstep's tools need the package {package}, which is not installed; install it "
    message += "with: pip install 'halfstep[tools]'"
    script = f"{block}\nMESSAGE = {message!r}\n{code}"
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True)


def test_training_and_integrations_need_no_package_of_the_tools():
    for framework in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(framework)
    done = without("", TRAINING + INTEGRATIONS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["jinja2", "msgspec"])
def test_a_tool_without_its_package_says_which_extra_has_it(package: str) -> None:
    done = without(package, TOOLS)
    assert done.returncode == 0, done.stderr
    done = without(package, "from halfstep.__main__ import main\nsys.exit(main())")
    assert done.returncode == 2
    assert done.stderr == (
        f"halfstep: halfstep's tools need the package {package}, which is not installed; install "
        "it with: pip install 'halfstep[tools]'. Training needs none of them\n"
    )


def test_type_checkers_are_told_the_same_names() -> None:
    """The imports under ``TYPE_CHECKING`` are those that Python makes."""
    tree = ast.parse(inspect.getsource(halfstep))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    for module in ("errors", "sinks"):
        assert told.pop(module) == "halfstep"
        assert getattr(halfstep, module).__name__ == f"halfstep.{module}"
    assert told == halfstep._MODULES
    assert halfstep.__all__ == ["__version__", *sorted(told)]
