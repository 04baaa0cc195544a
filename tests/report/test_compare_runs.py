"""Two runs side by side."""

import json

import pytest
from tests.report import records
from tests.report.records import counted, sample, tensor

from halfstep._record.read import read_run
from halfstep._report.compare_runs import compare_runs
from halfstep._report.summarize import summarize
from halfstep._report.text import comparison_json, comparison_markdown, comparison_text


def summary_of(folder):
    return summarize(read_run(folder))


@pytest.fixture
def skipping(tmp_path):
    return summary_of(records.with_skips(tmp_path / "skipping"))


@pytest.fixture
def healthy(tmp_path):
    return summary_of(records.healthy(tmp_path / "healthy"))


def entries(comparison):
    return {entry.name: entry for entry in comparison.entries}


def test_numbers_stand_side_by_side_with_their_difference(skipping, healthy):
    found = entries(compare_runs(skipping, healthy))
    skipped = found["skipped steps"]
    assert (skipped.first, skipped.second, skipped.difference) == ("5", "0", "+5")
    assert skipped.values == (5, 0)
    loss = found["last loss"]
    assert (loss.first, loss.second, loss.difference) == ("2.02", "2.033", "-0.01333")
    assert found["of the worst parameter"].difference == "+12 %"
    assert found["mean of the last 20 norms"].difference == "0"


def test_what_one_run_lacks_has_no_difference(tmp_path, healthy):
    found = entries(compare_runs(healthy, summary_of(records.bf16(tmp_path / "bf16"))))
    scale = found["last scale"]
    assert (scale.first, scale.second, scale.difference) == ("2^10", "-", "")
    assert scale.values == (1024.0, None)


def test_what_both_lack_is_left_out(tmp_path):
    bf16 = summary_of(records.bf16(tmp_path))
    assert "last scale" not in entries(compare_runs(bf16, bf16))


def test_a_run_against_itself_differs_in_nothing(skipping):
    comparison = compare_runs(skipping, skipping)
    assert {entry.difference for entry in comparison.entries} == {"0"}
    assert (comparison.layers, comparison.policy, comparison.versions) == ((), "", ())
    assert (comparison.only_first, comparison.only_second) == ((), ())


def test_layers_that_differ_most_come_first(tmp_path):
    def run(name, **histograms):
        rows = [tensor("parameter_gradient", n, counted(h)) for n, h in histograms.items()]
        events = [records.header(), records.step(1), sample(1, rows)]
        return summary_of(records.write(tmp_path / name, events))

    first = run("a", same={0: 9}, near={0: 9}, lossy={-30: 5, 0: 5}, mine={0: 1})
    second = run("b", same={0: 9}, near={2: 9}, lossy={0: 10}, its={0: 1})
    comparison = compare_runs(first, second)
    assert [pair.first.name for pair in comparison.layers] == ["lossy", "near"]
    assert comparison.layers[0].second.share_lost == 0
    assert comparison.only_first == (("parameter_gradient", "mine"),)
    assert comparison.only_second == (("parameter_gradient", "its"),)


def test_headroom_in_one_format_says_nothing_of_another(tmp_path, healthy):
    comparison = compare_runs(healthy, summary_of(records.bf16(tmp_path / "bf16")))
    assert comparison.layers == ()


def with_policy(folder, text, dtype="float16", **header):
    events = [records.header(**header), records.policy(dtype, text), records.step(1)]
    return summary_of(records.write(folder, events))


def test_what_the_policy_does_otherwise(tmp_path):
    old = with_policy(tmp_path / "a", "standard")
    new = with_policy(tmp_path / "b", "standard; exp:leave; @head:fp32")
    lines = compare_runs(new, old).policy.splitlines()
    assert lines[0].split() == ["exp", "fp32", "->", "leave"]
    assert lines[1] == "+ @head:fp32"


def test_policies_of_another_version_are_shown_as_text(tmp_path):
    old = with_policy(tmp_path / "a", "standard; no_such_op:fp32")
    new = with_policy(tmp_path / "b", "standard")
    assert compare_runs(new, old).policy == "- standard; no_such_op:fp32\n+ standard"


def test_versions_and_settings_that_differ(tmp_path):
    old = with_policy(tmp_path / "a", "standard", torch="2.12.0", command=["a.py"])
    new = with_policy(tmp_path / "b", "standard", "bfloat16", command=["b.py"])
    assert compare_runs(new, old).versions == (
        ("torch", "2.13.0+cpu", "2.12.0"),
        ("command", "b.py", "a.py"),
        ("lower precision", "bfloat16", "float16"),
    )


def test_text_and_markdown_have_every_part(skipping, tmp_path):
    other = with_policy(tmp_path / "other", "standard; exp:leave")
    comparison = compare_runs(skipping, other)
    for text in (comparison_text(comparison), comparison_markdown(comparison)):
        assert "skipped steps" in text
        assert "exp" in text
        assert "leave -> fp32" in " ".join(text.split())
        assert "only in the first:" in text
        assert "head.weight" in text or "more" in text
    lines = comparison_markdown(comparison).splitlines()
    assert "| skipped steps | 5 | 0 | +5 |" in lines


def test_hostile_runs_can_be_compared(tmp_path, skipping):
    comparison = compare_runs(summary_of(records.hostile(tmp_path / "hostile")), skipping)
    rows = [line for line in comparison_markdown(comparison).splitlines() if line[:1] == "|"]
    assert all(row.endswith("|") for row in rows)
    assert "\x1b" not in comparison_text(comparison)


def test_json_is_strict(tmp_path, skipping):
    comparison = compare_runs(summary_of(records.failed(tmp_path / "failed")), skipping)
    values = json.loads(json.dumps(comparison_json(comparison), allow_nan=False))
    assert values["first"]["loss"]["last"] == "nan"
    assert values["second"]["steps"]["num"] == 100
    assert values["entries"][1]["name"] == "skipped steps"
    assert values["entries"][1]["values"] == [3, 5]
