"""What type checkers make of a script that uses the public names."""

import re
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
    # The types are those of the names, and not Any: two lines are wrong, and no other.
    wrong = ["wrong: int = halfstep.GradScaler('cpu')", "halfstep.no_such_name"]
    lines = SCRIPT.read_text().splitlines() + wrong
    script.write_text("\n".join(lines))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    found = re.findall(r":(\d+)(?::\d+ -|:) error: (.*)", done.stdout)
    assert {int(number) for number, _ in found} == {len(lines) - 1, len(lines)}, done.stdout
    assert "GradScaler" in found[0][1]
    assert "no_such_name" in found[1][1]
