"""The site. `make docs` builds it; a warning is an error."""

import ast
import re
import shutil
import sys
import tomllib
from inspect import getmembers, isclass
from pathlib import Path

from docutils.nodes import Element
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import halfstep
import halfstep.errors
import halfstep.sinks
from halfstep._tools.doctor import finding
from halfstep._tools.doctor.finding import CATALOG

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from notebook import notebook  # noqa: E402

EXAMPLES = DOCS.parent / "examples"
EXPLAINED = Path(finding.__file__).with_name("explained.toml")

# Pages below others in the sidebar.
BELOW = {
    "install": ["versions"],
    "half_parameters": ["language_models"],
    "run": ["record"],
    "architecture": ["benchmarks", "changelog"],
}

project = "halfstep"
author = "The halfstep developers"
project_copyright = f"2026, {author}"
release = version = halfstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4

nitpicky = True  # a reference in a docstring to what the site does not have
nitpick_ignore_regex = [
    ("py:class", r"(?!halfstep\.).*"),  # types of PyTorch and Python
    ("py:.*", r"torch\..*"),
    ("py:class", r"halfstep\..*\._\w+"),  # type variables
    ("py:attr", "device_type"),  # in a docstring of PyTorch
    ("py:class", r"halfstep\._scaler\..*"),  # what an outcome is made of
]
add_module_names = False
autodoc_default_options = {"members": True}
napoleon_use_ivar = True  # attributes of a value as a list, with their docstring
autodoc_member_order = "bysource"
autodoc_mock_imports = [
    "accelerate",
    "lightning",
]
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_search_scorer = str(DOCS / "scorer.js")  # guides first
highlight_language = "none"  # what is printed is not Python
pygments_dark_style = "a11y-high-contrast-dark"  # the default underlines modules, as if links
html_title = f"halfstep {release}"
html_copy_source = html_show_sourcelink = False


def write_pages(app: Sphinx) -> None:
    """Write the pages that are made of other files, and the notebook of the page that is one."""
    if Path(app.srcdir) == DOCS:  # else a test builds something with these settings
        write_cookbook()
        page = (DOCS / "ten_minutes.md").read_text(encoding="utf-8")
        write(DOCS / "ten_minutes.ipynb", notebook(page))


def write_cookbook() -> None:
    """Write one page of examples/: its README, then the docstring and the code of each script."""
    page = link_scripts((EXAMPLES / "README.md").read_text(encoding="utf-8"), "")
    page = page.replace("](../docs/", "](../").replace("# Examples", "# Cookbook", 1)
    for script in sorted(EXAMPLES.rglob("*.py")):
        code = script.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(code)) or ""
        code = code.split('"""', 2)[2].strip()
        path = script.relative_to(EXAMPLES).as_posix()
        page += f"\n## {path}\n\n{text}\n\n```python\n{code}\n```\n"
    folder = DOCS / "cookbook"
    shutil.rmtree(folder, ignore_errors=True)  # a page that was once written is in no toctree
    folder.mkdir()
    write(folder / "index.md", page)


def link_scripts(text: str, folder: str) -> str:
    """Point links to scripts in ``folder`` to their sections of the cookbook."""
    page = "cookbook/index.md" if folder else ""
    return re.sub(
        rf"\]\({re.escape(folder)}([\w/]+)\.py\)",
        lambda link: f"]({page}#{link[1].replace('/', '')}py)",
        text,
    )


def findings() -> str:
    """Return a section for each finding of the doctor: severity, text, and its two programs."""
    sections = []
    for id, entry in tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).items():
        programs = [
            f"```py\n# {kind}\n{entry[kind]}```\n" for kind in ("wrong", "right") if kind in entry
        ]
        sections += [f"### {id}\n", f"**{CATALOG[id]}**: {entry['text']}", *programs]
    return "\n".join(sections)


def write(path: Path, text: str) -> None:
    """Write a file, unless it says so already: Sphinx reads only what changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def move_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links that hold in a checkout to the pages of the site."""
    text = source[0].replace("](../benchmarks/README.md", "](benchmarks.md")
    text = text.replace("](../CHANGELOG.md", "](changelog.md")
    text = text.replace("](../examples/README.md", "](cookbook/index.md")
    # A file of the site, which a checkout has only after `make docs`.
    made = "`make docs` makes a notebook of it, `docs/ten_minutes.ipynb`"
    text = text.replace(made, "It is also [a notebook](ten_minutes.ipynb)")
    source[0] = link_scripts(text, "../examples/")
    if page == "doctor":
        source[0] = source[0].partition("The site has a section")[0] + findings()
    if page in BELOW:
        source[0] += (
            "\n```{toctree}\n:hidden:\n:titlesonly:\n\n" + "\n".join(BELOW[page]) + "\n```\n"
        )


def find_public(
    app: Sphinx, env: BuildEnvironment, node: Element, contents: Element
) -> Element | None:
    """Resolve the private path of a public name, which is what signatures have."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or not hasattr(halfstep, name):
        return None
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"halfstep.{name}", node, contents
    )


def check_public(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page of the reference has."""
    documented = {name for name, *_ in env.get_domain("py").get_objects()}
    public = {f"halfstep.{name}" for name in halfstep.__all__}
    public -= {"halfstep.__version__", "halfstep.CallOrderError"}  # that is in halfstep.errors
    for module in (halfstep.errors, halfstep.sinks):
        public |= {
            f"{module.__name__}.{name}"
            for name, value in getmembers(module, isclass)
            if value.__module__ == module.__name__
        }
    for name in sorted(public - documented):
        logging.getLogger(__name__).warning("no page of docs/api has %s", name)


def link_pages(app: Sphinx, kind: str, name: str, value: object, *rest: list[str]) -> None:
    """Make links of the pages that a docstring names."""
    lines = rest[-1]
    lines[:] = [
        re.sub(
            r"(?:``)?docs/(\w+)\.md(?:``)?",
            lambda page: f":doc:`{page[1].replace('_', ' ')} </{page[1]}>`",
            line,
        )
        for line in lines
    ]


def skip_fields(app: Sphinx, kind: str, name: str, member: object, *rest: object) -> bool | None:
    """Leave out what named tuples say of their fields by themselves."""
    return "Alias for field" in (getattr(member, "__doc__", "") or "") or None


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", move_links)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", find_public)
    app.connect("env-check-consistency", check_public)
