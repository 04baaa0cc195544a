"""The site builds without a warning, loads nothing from elsewhere, and answers questions."""

import json
import re
import subprocess
import sys
from pathlib import Path

import playwright
import pytest
import yaml

import halfstep
from halfstep._autocast.rule import ACTIONS
from halfstep._autocast.written import PRESETS
from halfstep._tools.doctor.finding import CATALOG

pytestmark = pytest.mark.slow

COMMANDS = ("run", "report", "check", "doctor", "help")

DOCS = Path(__file__).parents[1] / "docs"
NODE = Path(playwright.__file__).parent / "driver" / "node"

# What new users asked, and the page that answers it.
QUESTIONS = {
    "which GPU needs a scaler?": "concepts",
    "why is my loss scale 1?": "scaler",
    "keep LayerNorm fp32": "autocast",
    "gradient clipping": "scaler",
    "resume from torch.amp checkpoint": "scaler",
    "resume from torch.amp's checkpoint": "scaler",
    "loss is NaN": "diagnose",
    "FSDP2": "distributed",
    "bf16 not faster on my card": "autocast",
    "float16 on T4, bf16 checkpoint": "language_models",
    "how do I turn it off?": "scaler",
    "what does it cost?": "autocast",
    "cost overhead": "autocast",
    "BatchNorm NaN": "scaler",
    "mat1 and mat2 must have the same dtype": "errors",
}
INTERNAL = {"architecture", "benchmarks", "changelog"}


def build(source: Path, out: Path) -> str:
    """Return the warnings of a build under the site's own settings."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-c", str(DOCS), str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build(DOCS, folder) == ""
    return folder


def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*?(?:src|href)="(.*?)"', text
        )
        assert loaded, page
        assert not [url for url in loaded if "//" in url], page
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 0 < len(re.findall('<li class="toctree-l1', front)) <= 20  # entries of the sidebar
    printed = (site / "report.html").read_text(encoding="utf-8")
    assert 'class="highlight-none' in printed
    assert 'class="highlight-default' not in printed
    for page in pages:  # each has the script that adds the buttons to copy
        assert "_static/copy.js" in page.read_text(encoding="utf-8"), page
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style


def test_each_finding_of_the_doctor_has_its_section(site: Path) -> None:
    page = (site / "doctor.html").read_text(encoding="utf-8")
    assert [id for id in CATALOG if f'id="{id}"' not in page] == []


def test_the_search_finds_guides_first(site: Path) -> None:
    command = [str(NODE), str(Path(__file__).parent / "search.js"), str(site), *QUESTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    first = {question: pages[0][0] for question, pages in zip(QUESTIONS, found, strict=True)}
    assert first == QUESTIONS
    last = [pages[-1][0] for pages in found if any(page in INTERNAL for page, *_ in pages)]
    assert last
    assert set(last) <= INTERNAL


def test_the_tables_to_keep_open_are_complete() -> None:
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| ([^|]+)", page, re.MULTILINE))
    named = set(re.findall(r"[\w.-]+", rows))
    assert {*ACTIONS, "fp16", "bf16", *PRESETS} <= named
    front = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(COMMANDS) <= set(re.findall(r"`halfstep (\w+)", front))


def test_a_fault_is_a_warning(tmp_path: Path) -> None:
    """A link, an anchor and a reference that lead nowhere; public names that no page has."""
    (tmp_path / "index.md").write_text(
        "# One\n[a](nowhere.md) [b](#nowhere)\n```{eval-rst}\n:func:`halfstep.nowhere`\n\n"
        ".. automodule:: halfstep.errors\n```\n"
    )
    warnings = build(tmp_path, tmp_path / "out")
    assert "target not found: 'nowhere.md'" in warnings
    assert "target not found: 'nowhere'" in warnings
    assert "target not found: halfstep.nowhere" in warnings
    assert "no page of docs/api has halfstep.GradScaler" in warnings
    assert "no page of docs/api has halfstep.sinks.Sink" in warnings
    assert "has halfstep.errors" not in warnings


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == halfstep.__version__
