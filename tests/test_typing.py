"""What type checkers make of a script that uses the public names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "corpus" / "typed_script.py"


def test_the_script_uses_every_public_name() -> None:
    text = SCRIPT.read_text()
    for name in halfstep.__all__:
        assert f"halfstep.{name}" in text
    imported = text.partition("from halfstep import (")[2].partition(")")[0]
    assert {name.strip() for name in imported.split(",") if name.strip()} == {*halfstep.__all__}


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_script_is_checked_strictly(checker: str, tmp_path: Path) -> None:
    program = shutil.which(checker, path=str(Path(sys.executable).parent)) or shutil.which(checker)
    if program is None:
        pytest.skip(f"needs {checker}: pip install {checker}")
    script = tmp_path / "script.py"
    # mypy from here: with the settings of the project, which are strict, and its cache.
    root, options = Path(__file__).parents[1], []
    if checker == "pyright":
        root, options = tmp_path, ["--pythonpath", sys.executable]
        (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [program, *options, str(script)]
    text = SCRIPT.read_text()
    script.write_text(text)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # The types are those of the names, and not Any.
    script.write_text(text + "\nwrong: int = halfstep.GradScaler('cpu')\nhalfstep.no_such_name\n")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert "GradScaler" in done.stdout
    assert "no_such_name" in done.stdout
    assert done.returncode == 1
