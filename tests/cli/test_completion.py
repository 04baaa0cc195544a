"""The words that a shell shows for Tab."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep._tools import cli

ASKED = [
    ("halfstep ", {"run", "report", "check", "doctor", "tune", "policy", "help"}),
    ("halfstep re", {"report"}),
    ("halfstep run --am", {"--amp"}),
    ("halfstep run --amp ", {"fp16", "bf16"}),
    ("halfstep run --sink w", {"wandb"}),
    ("halfstep policy d", {"diff"}),
    ("halfstep report --j", {"--json"}),
]


@pytest.mark.parametrize(("line", "words"), ASKED, ids=[line for line, _ in ASKED])
def test_completion(line: str, words: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    # In a process of its own, because argcomplete takes file descriptor 9.
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "import halfstep._tools.cli; halfstep._tools.cli.main([])"
    subprocess.run([sys.executable, "-c", code], env=os.environ | asked, check=True)
    found = {word.strip() for word in answer.read_text().split("\n")}
    shown = found if "-" in line else {word for word in found if not word.startswith("-")}
    assert shown == words


def test_without_the_package_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setitem(os.environ, "_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["policy", "show", "standard"])
    assert ended.value.code == 2
