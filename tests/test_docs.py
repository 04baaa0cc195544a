"""What the docs say runs: every example in a docstring, every Python block in a page."""

import __future__

import doctest
import importlib
import re
import textwrap
from pathlib import Path

import pytest

import halfstep

ROOT = Path(__file__).parents[1]
PACKAGE = Path(halfstep.__file__).parent
MODULES = [  # to look for examples in those without any takes longer than to run all
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in file.read_text(encoding="utf-8")
]
BLOCKS = [
    pytest.param(textwrap.dedent(block), id=f"{page.parent.name}/{page.name}-{number}")
    for page in [
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    if page.name != "ten_minutes.md"  # its blocks run one after the other: test_notebook.py
    for number, block in enumerate(
        re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    )
]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of frameworks that are imported
def test_examples_in_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith("halfstep.integrations."):
            raise
        pytest.skip(str(error))
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")  # ignite imports it
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning without it
def test_python_blocks_of_a_page(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a block; a comment behind ``print(...)`` is what it must print."""
    # The training loop is shown without its imports: its annotations are not looked up.
    exec(compile(block, "page", "exec", __future__.annotations.compiler_flag), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == re.findall(r"print\(.*\)  # (.+)$", block, re.M)


def test_messages_name_files_and_sections_that_exist() -> None:
    for file in [
        each for each in (ROOT / "src").rglob("*") if each.suffix in (".py", ".toml", ".policy")
    ]:
        for path, section in re.findall(r"\b(docs/\w+\.\w+)(?:#([\w-]+))?", file.read_text()):
            heads = re.findall(r"^#+ (.+)", (ROOT / path).read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert section in {"", *slugs}, f"{file.name} names {path}#{section}"


def test_consoles_of_the_pages() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for page in pages:
        for block in re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.M | re.S):
            runner.run(parser.get_doctest(block, {}, page.name, str(page), 0))
    assert runner.tries > 0
    assert runner.failures == 0
