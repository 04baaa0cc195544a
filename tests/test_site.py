"""The site builds without a warning and loads nothing from elsewhere; faults are warnings."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import halfstep
from halfstep._autocast.rule import ACTIONS, PHASES
from halfstep._autocast.written import PRESETS

pytestmark = pytest.mark.slow

COMMANDS = ("run", "report", "check", "doctor", "tune", "policy", "help")

DOCS = Path(__file__).parents[1] / "docs"


def build(source: Path, out: Path) -> str:
    """Return the warnings of a build under the site's own settings."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-c", str(DOCS), str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    assert build(DOCS, tmp_path) == ""
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*?(?:src|href)="(.*?)"', text
        )
        assert loaded, page
        assert not [url for url in loaded if "//" in url], page
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 0 < len(re.findall('<li class="toctree-l1', front)) <= 20  # entries of the sidebar
    printed = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'class="highlight-none' in printed
    assert 'class="highlight-default' not in printed
    for page in pages:  # each has the script that adds the buttons to copy
        assert "_static/copy.js" in page.read_text(encoding="utf-8"), page
    for style in tmp_path.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style


def test_the_tables_to_keep_open_are_complete() -> None:
    page = (DOCS / "at_a_glance.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| ([^|]+)", page, re.MULTILINE))
    named = set(re.findall(r"[\w.-]+", rows))
    versions = {preset for preset in PRESETS if preset.startswith("torch-2.")}
    assert {*ACTIONS, *PHASES, "fp16", "bf16", *PRESETS} - versions <= named
    assert {min(versions), max(versions)} <= named
    assert set(COMMANDS) <= set(re.findall(r"`halfstep (\w+)", page))


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
