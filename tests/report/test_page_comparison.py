"""The page of two runs."""

import json
from types import SimpleNamespace

import pytest
from tests.report import records
from tests.report.markup import at, parse

from halfstep._record.read import read_run
from halfstep._report.compare_runs import compare_runs
from halfstep._report.page import render_comparison
from halfstep._report.summarize import summarize
from halfstep._report.text import comparison_json


@pytest.fixture
def both(tmp_path):
    first = read_run(records.with_skips(tmp_path / "fp16"))
    other = [records.policy("bfloat16", "standard; softmax:lower"), records.step(1, loss=3.0)]
    other += [records.sample(1, records.layers(precision="bf16", scale=4.0))]
    second = read_run(records.write(tmp_path / "bf16", [records.header(torch="2.14"), *other]))
    comparison = compare_runs(summarize(first), summarize(second))
    return SimpleNamespace(
        comparison=comparison, tree=parse(render_comparison(comparison, first, second))
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
    assert texts == [entry[which] for entry in data["entries"] for which in ("first", "second")]


def test_a_comparison_tells_what_differs(both):
    text = both.tree.one("main").text
    assert both.comparison.policy
    assert both.comparison.policy in text
    assert both.comparison.layers
    for pair in both.comparison.layers:
        assert pair.first.name in text
    for name, first, second in both.comparison.versions:
        assert all(word in text for word in (name, first, second))


def test_hostile_names_are_text_in_a_comparison_too(tmp_path):
    first = read_run(records.hostile(tmp_path / "a"))
    second = read_run(records.healthy(tmp_path / "b"))
    page = render_comparison(compare_runs(summarize(first), summarize(second)), first, second)
    assert records.HOSTILE not in page
    assert not list(parse(page).all("img"))
