"""The wheel: what it holds, and that it works without the checkout and without its extra."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.report import records

import halfstep

ROOT = Path(__file__).parents[1]
FILES = ["CHANGELOG.md", "pyproject.toml", "CITATION.cff", "README.md"]
SCRIPT = """
import sys
import halfstep
assert halfstep.__file__.startswith({installed!r}), halfstep.__file__
from halfstep._tools.cli import main
sys.exit(main({words!r}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def without_address(root: Path) -> list[str]:
    """Return the files of a release that lack the address of the repository."""
    read = {name: (root / name).read_text(encoding="utf-8") for name in FILES}
    if "(unreleased)" in re.findall(r"^## .*", read["CHANGELOG.md"], re.MULTILINE)[0]:
        return []
    urls = tomllib.loads(read["pyproject.toml"])["project"].get("urls", {})
    source = urls.get("Source", "no address")
    return [name for name in FILES[1:] if source not in read[name]]


def test_a_release_says_where_the_repository_is(tmp_path: Path) -> None:
    assert without_address(ROOT) == []
    for name in FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("(unreleased)", "(2030-01-01)"))
    assert without_address(tmp_path) == FILES[1:]


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    there = {
        str(path.relative_to(source))
        for path in (source / "halfstep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there
    assert {"halfstep/py.typed", "halfstep/_tools/cli/__init__.py"} <= held


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("--version", f"halfstep {halfstep.__version__}"),
        ("doctor --explain half-parameters", "halfstep.master_weights"),
        ("report {record}", "report.html"),
    ],
)
def test_it_works_where_it_is_installed(command, says, wheel, tmp_path):
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    words = command.format(record=records.healthy(tmp_path / "record")).split()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(installed=str(installed), words=words)],
        env=os.environ | {"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
