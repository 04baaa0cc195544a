"""The page of two runs."""

import json
import re
from types import SimpleNamespace

import pytest
from tests.report import records
from tests.report.markup import at, parse

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


def test_a_comparison_tells_what_differs(both):
    text = both.tree.one("main").text
    assert both.comparison.policies[0]
    assert both.comparison.policies[0] in text
    assert both.comparison.layers
    for row in both.comparison.layers:
        assert row[0].name in text
    for name, texts in both.comparison.versions:
        assert all(word in text for word in (name, *texts))


def test_a_comparison_opens_with_the_verdict_and_marks_the_better(both):
    (says,) = both.tree.all("ul", class_="says")
    verdict = both.comparison.verdict.text.replace("`", "")
    assert verdict in re.sub(r"\s+", " ", says.text)
    numbers = next(both.tree.all("table"))
    marked = [cell.text for cell in numbers.all("td", class_="best")]
    entries = both.comparison.entries
    assert marked == [entry.texts[entry.best] for entry in entries if entry.best is not None]


def test_three_runs_stand_beside_each_other(tmp_path):
    runs = [read_run(records.healthy(tmp_path / name, 60 + n)) for n, name in enumerate("abc")]
    page = parse(render_comparison(compare_runs(*map(summarize, runs)), runs))
    assert page.one("h1").text == "a against b and c"
    head = [cell.text for cell in next(page.all("thead")).all("th")]
    assert head == ["what", "a", "b", "c"]
    assert len(list(next(page.all("tbody")).all("data"))) % 3 == 0


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
