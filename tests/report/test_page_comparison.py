"""The page of two runs."""

import json
import re
from types import SimpleNamespace

import pytest
from tests.report import records
from tests.report.markup import at, parse, told

from halfstep._tools.record.read import read_run
from halfstep._tools.report.compare_runs import compare_runs
from halfstep._tools.report.page import render_comparison
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import comparison_json


@pytest.fixture
def both(tmp_path):
    first = read_run(records.with_skips(tmp_path / "fp16"))
    other = [records.policy("bfloat16", "standard; softmax:lower"), records.step(1, loss=3.0)]
    other += [records.sample(1, records.layers(precision="bf16", scale=4.0))]
    second = read_run(records.write(tmp_path / "bf16", [records.header(torch="2.14"), *other]))
    comparison = compare_runs(summarize(first), summarize(second))
    return SimpleNamespace(
        comparison=comparison, tree=parse(render_comparison(comparison, (first, second)))
    )


def test_a_comparison_names_both_runs_and_draws_both(both):
    assert both.tree.one("h1").text == "fp16 against bf16"
    plots = both.tree.all("svg", class_="plot")
    assert [len(list(plot.all("path", class_="curve"))) for plot in plots] == [
        3,
        2,
        2,
    ]  # one loss is long enough for a mean
    told = json.loads(both.tree.one("script", id="curve-data").text)["tracks"]
    assert [(track["name"], track["loss"][0]) for track in told] == [("fp16", 4), ("bf16", 3)]


def test_the_numbers_of_a_comparison_are_those_of_the_json(both):
    data = comparison_json(both.comparison)
    marked = list(both.tree.all("data"))
    assert len(marked) == 2 * len(data["entries"])
    for element in marked:
        assert json.loads(element.attributes["value"]) == at(data, element.attributes["data-key"])
    texts = [element.text for element in marked]
    assert texts == [text for entry in data["entries"] for text in entry["texts"]]


def test_what_comparisons_tell(both, tmp_path, golden):
    """``golden/comparisons.txt`` has it; ``pytest tests/report --accept`` writes it anew."""
    runs = [read_run(records.healthy(tmp_path / name, 60 + n)) for n, name in enumerate("abc")]
    three = parse(render_comparison(compare_runs(*map(summarize, runs)), runs))
    text = "\n".join([*told(both.tree), "", *told(three), ""])
    golden("comparisons.txt", text.replace(str(tmp_path), "FOLDER"))


def test_six_runs_have_lines_of_six_kinds(tmp_path):
    runs = [read_run(records.healthy(tmp_path / name)) for name in "abcdef"]
    page = parse(render_comparison(compare_runs(*map(summarize, runs)), runs))
    kinds = [path.attributes["class"] for path in page.one("div", class_="lanes").all("path")]
    css = page.one("style").text
    dashes = [re.search(rf"\.{kind.split()[-1]}{{([^}}]*)}}", css)[1] for kind in kinds]
    assert len(set(dashes)) == 6


def test_hostile_names_are_text_in_a_comparison_too(tmp_path):
    first = read_run(records.hostile(tmp_path / "a"))
    second = read_run(records.healthy(tmp_path / "b"))
    page = render_comparison(compare_runs(summarize(first), summarize(second)), (first, second))
    assert records.HOSTILE not in page
    assert not list(parse(page).all("img"))
