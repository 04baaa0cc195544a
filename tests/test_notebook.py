"""The page *Ten minutes* and its notebook: the cells run, one after the other."""

import contextlib
import io
import json
import linecache
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "ten_minutes.md").read_text(encoding="utf-8")


def cells() -> list[dict]:
    spec = spec_from_file_location("notebook", DOCS / "notebook.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return json.loads(module.notebook(PAGE))["cells"]


def run_cell(code: str, number: int, namespace: dict) -> str:
    """Run a cell as a kernel does: its lines can be looked up. Return what it prints."""
    if code.startswith("!"):
        command = [str(Path(sys.executable).parent / "halfstep"), *code.split()[1:]]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    name = f"<cell {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), namespace)
    return printed.getvalue()


def test_the_cells_of_the_notebook_print_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    blocks = re.findall(r"^```console\n\$ [^\n]+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for number, cell in enumerate(cells()):
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            printed = run_cell(code, number, namespace).splitlines()
            if code.startswith("!"):
                for line in blocks.pop(0).splitlines():  # shortened on the page
                    assert any(each.startswith(line.removesuffix(" ...")) for each in printed)
            else:
                assert printed == re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert not blocks


def test_the_notebook_has_all_of_the_page() -> None:
    text = "".join("".join(cell["source"]) for cell in cells())
    for line in PAGE.splitlines():
        if not line.startswith(("```", "$", "bad:", "good:", "what followed:")):
            assert line in text
