"""The summary as Markdown for a CI log, and as JSON."""

import json

import pytest
from tests.report import records

from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.json import to_plain
from halfstep._tools.record.read import read_run
from halfstep._tools.report.page_tables import badness
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import sentences, summary_json, summary_markdown

WRITERS = (
    records.healthy,
    records.with_skips,
    records.underflowing,
    records.failed,
    records.diagnosed,
    records.killed,
    records.bf16,
    records.losing_updates,
    records.several_ranks,
    records.only_header,
    records.hostile,
)


def summary_of(folder):
    return summarize(read_run(folder))


def refuse(constant):
    raise AssertionError(constant)


def cells(line):
    """Split a line of a table as GitHub does: a pipe after a backslash is text."""
    return line.replace("\\|", "").strip("|").split("|")


@pytest.mark.parametrize("write", WRITERS)
def test_markdown_has_all_sentences_and_whole_tables(tmp_path, write):
    summary = summary_of(write(tmp_path))
    text = summary_markdown(summary)
    for sentence in sentences(summary):
        label = "what followed" if sentence.follows else sentence.severity
        assert f"- **{label}**: {sentence.markdown}\n" in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(cells(line)) for line in block.splitlines()}) == 1


def test_what_is_not_in_the_format_leads_no_list_of_worries(tmp_path):
    rows = [
        records.tensor("output", "loss", records.counted({17: 8}), "float32"),  # beyond fp16
        records.tensor("output", "head", records.counted({10: 8}), "float16"),
    ]
    events = [records.header(), records.policy(), records.step(1), records.sample(1, rows)]
    summary = summary_of(records.write(tmp_path, [*events, records.end(1.0, 1)]))
    text = summary_markdown(summary)
    assert text.index("| `head` | output | float16") < text.index("| `loss` | output | float32")
    assert [each.name for each in sorted(summary.layers, key=badness)] == ["head", "loss"]


def test_markdown_has_the_key_numbers_and_the_worst_layers(tmp_path):
    text = summary_markdown(summary_of(records.with_skips(tmp_path)))
    assert "| skipped | 5 (5 %), 2 by dynamic scaling at the start and 3 others |" in text
    assert "| scale: first, last, smallest, largest | 2^16, 2^11, 2^11, 2^16 |" in text
    assert "| policy | float16, `standard` |" in text
    assert "| `head.weight` | gradient | float32 | 12 % |" in text


def test_markdown_has_the_diagnoses_as_code_that_nothing_in_them_ends(tmp_path):
    text = summary_markdown(summary_of(records.diagnosed(tmp_path / "a")))
    start = (
        "### Diagnosis, steps 41, 42\n\n    range: `linear` of `blocks.1.mlp` in the forward pass"
    )
    assert start in text
    assert "\n    cure (replayed: finite):\n      autocast(...," in text
    hostile = summary_markdown(summary_of(records.hostile(tmp_path / "b")))
    assert "\n    # title" in hostile
    assert "\n# title" not in hostile


def test_markdown_of_a_large_run_is_short(tmp_path):
    summary = summary_of(records.huge(tmp_path, num_steps=20))
    assert len(summary_markdown(summary).splitlines()) < 40


@pytest.mark.parametrize("write", WRITERS)
def test_json_is_strict_and_holds_every_number(tmp_path, write):
    summary = summary_of(write(tmp_path))
    text = json.dumps(summary_json(summary), allow_nan=False)
    values = json.loads(text, parse_constant=refuse)
    assert values["steps"]["num"] == summary.steps.num
    assert values["steps"]["reasons"] == summary.steps.reasons
    assert [layer["share_lost"] for layer in values["layers"]] == [
        layer.share_lost for layer in summary.layers
    ]
    assert [layer["histogram"] for layer in values["layers"]] == [
        to_plain(layer.histogram) for layer in summary.layers
    ]
    assert [s["text"] for s in values["sentences"]] == [s.text for s in sentences(summary)]


def test_json_has_the_whole_diagnosis_of_each_place(tmp_path):
    summary = summary_of(records.diagnosed(tmp_path))
    first, second = summary_json(summary)["bad_places"]
    assert (first["steps"], first["ranks"]) == ([41, 42], [0])
    assert Diagnosis.from_json(json.dumps(first["diagnosis"])) == records.found()
    assert second["diagnosis"]["bad"]["name"] == "log"


def test_json_has_nan_as_a_string(tmp_path):
    assert summary_json(summary_of(records.failed(tmp_path)))["loss"]["last"] == "nan"


def test_how_often_rules_acted_is_there(tmp_path):
    rules = records.rules(1, {"softmax:fp32": 1, "@head:fp32": 0})
    text = summary_markdown(summary_of(records.write(tmp_path, [records.header(), rules])))
    assert "| rule | `softmax:fp32`: 1 call in 1 sampled step |" in text
    assert "| rule | `@head:fp32`: 0 calls in 1 sampled step |" in text
