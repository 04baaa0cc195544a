"""Two runs side by side."""

import json

import pytest
from tests.report import records
from tests.report.records import counted, sample, tensor

from halfstep._tools.record.read import read_run
from halfstep._tools.report.compare_runs import compare_runs
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import comparison_json, comparison_text


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
    assert (skipped.texts, skipped.difference) == (("5", "0"), "+5")
    assert skipped.values == (5, 0)
    loss = found["last loss"]
    assert (loss.texts, loss.difference) == (("2.02", "2.033"), "-0.01333")
    assert found["of the worst parameter"].difference == "+12 %"
    assert found["mean of the last 20 norms"].difference == "0"


def test_what_one_run_lacks_has_no_difference(tmp_path, healthy):
    found = entries(compare_runs(healthy, summary_of(records.bf16(tmp_path / "bf16"))))
    scale = found["last scale"]
    assert (scale.texts, scale.difference) == (("2^10", "-"), "")
    assert scale.values == (1024.0, None)


def test_what_both_lack_is_left_out(tmp_path):
    bf16 = summary_of(records.bf16(tmp_path))
    assert "last scale" not in entries(compare_runs(bf16, bf16))


def test_a_run_against_itself_differs_in_nothing(skipping):
    comparison = compare_runs(skipping, skipping)
    assert {entry.difference for entry in comparison.entries} == {"0"}
    assert (comparison.layers, comparison.policies, comparison.versions) == ((), ("",), ())
    assert comparison.only == ((), ())


def test_layers_that_differ_most_come_first(tmp_path):
    def summary(name, **histograms):
        rows = [tensor("parameter_gradient", n, counted(h)) for n, h in histograms.items()]
        events = [records.header(), records.step(1), sample(1, rows)]
        return summary_of(records.write(tmp_path / name, events))

    first = summary("a", same={0: 9}, near={0: 9}, lossy={-30: 5, 0: 5}, mine={0: 1})
    second = summary("b", same={0: 9}, near={2: 9}, lossy={0: 10}, its={0: 1})
    comparison = compare_runs(first, second)
    assert [row[0].name for row in comparison.layers] == ["lossy", "near"]
    assert comparison.layers[0][1].share_lost == 0
    assert comparison.only == (
        (("parameter_gradient", "mine"),),
        (("parameter_gradient", "its"),),
    )


def test_headroom_in_one_format_says_nothing_of_another(tmp_path, healthy):
    comparison = compare_runs(healthy, summary_of(records.bf16(tmp_path / "bf16")))
    assert comparison.layers == ()


def with_policy(folder, text, dtype="float16", **header):
    events = [records.header(**header), records.policy(dtype, text), records.step(1)]
    return summary_of(records.write(folder, events))


def test_what_the_policy_does_otherwise(tmp_path):
    old = with_policy(tmp_path / "a", "standard")
    new = with_policy(tmp_path / "b", "standard; exp:leave; @head:fp32")
    lines = compare_runs(new, old).policies[0].splitlines()
    assert lines[0].split() == ["exp", "fp32", "->", "leave"]
    assert lines[1] == "+ @head:fp32"


def test_policies_of_another_version_are_shown_as_text(tmp_path):
    old = with_policy(tmp_path / "a", "standard; no_such_op:fp32")
    new = with_policy(tmp_path / "b", "standard")
    assert compare_runs(new, old).policies == ("- standard; no_such_op:fp32\n+ standard",)


def test_a_run_without_a_policy_says_so(tmp_path):
    none = summary_of(records.write(tmp_path / "a", [records.header(), records.step(1)]))
    some = with_policy(tmp_path / "b", "standard")
    assert compare_runs(some, none).policies == ("- no policy\n+ standard",)
    assert compare_runs(none, some).policies == ("- standard\n+ no policy",)
    assert compare_runs(none, none).policies == ("",)


def test_versions_and_settings_that_differ(tmp_path):
    old = with_policy(tmp_path / "a", "standard", torch="2.12.0", command=["a.py"])
    new = with_policy(tmp_path / "b", "standard", "bfloat16", command=["b.py"])
    assert compare_runs(new, old).versions == (
        ("torch", ("2.13.0+cpu", "2.12.0")),
        ("command", ("b.py", "a.py")),
        ("lower precision", ("bfloat16", "float16")),
    )


def test_text_has_every_part(skipping, tmp_path):
    other = with_policy(tmp_path / "other", "standard; exp:leave")
    lines = [line.split() for line in comparison_text(compare_runs(skipping, other)).splitlines()]
    text = " ".join(word for line in lines for word in line)
    assert ["skipped", "steps", "5", "0", "+5"] in lines
    assert "exp" in text
    assert "leave -> fp32" in text
    assert "only in" in text
    assert "head.weight" in text or "more" in text


def test_layers_of_many_runs_are_a_table_for_each_measure(tmp_path):
    runs = [summary_of(records.with_skips(tmp_path / name)) for name in "abc"]
    other = summary_of(records.healthy(tmp_path / "d"))
    text = comparison_text(compare_runs(other, *runs))
    heads = [line.split() for line in text.splitlines() if line.startswith("layers that differ")]
    assert [head[4:] for head in heads] == [
        ["underflow", "what", *"dabc"],
        ["headroom", "what", *"dabc"],
    ]


def test_a_measure_in_which_no_layer_differs_has_no_table(tmp_path):
    def summary(name, at):
        rows = [tensor("parameter_gradient", "layer", counted({at: 9}))]
        events = [records.header(), records.step(1), sample(1, rows)]
        return summary_of(records.write(tmp_path / name, events))

    text = comparison_text(compare_runs(summary("a", 0), summary("b", 5)))
    assert "layers that differ most: headroom" in text
    assert "layers that differ most: underflow" not in text


def test_hostile_runs_can_be_compared(tmp_path, skipping):
    comparison = compare_runs(summary_of(records.hostile(tmp_path / "hostile")), skipping)
    assert "\x1b" not in comparison_text(comparison)


def test_json_is_strict(tmp_path, skipping):
    comparison = compare_runs(summary_of(records.failed(tmp_path / "failed")), skipping)
    values = json.loads(json.dumps(comparison_json(comparison), allow_nan=False))
    assert (values["schema"], values["kind"]) == (1, "comparison")
    assert values["verdict"]["text"] == comparison.verdict.text
    assert values["runs"][0]["loss"]["last"] == "nan"
    assert values["runs"][1]["steps"]["num"] == 100
    (skipped,) = [entry for entry in values["entries"] if entry["name"] == "skipped steps"]
    assert skipped["values"] == [3, 5]


# --- the verdict ----------------------------------------------------------------------------------


def lossy(folder, name, *losses, seconds=0.5, number=100, **values):
    """Write a run whose loss falls to one of these, by optimizer."""
    events = [
        records.step(n, number=place, loss=start / n + loss, time=n * seconds)
        for n in range(1, number + 1)
        for place, (start, loss) in enumerate(((4.0, loss) for loss in losses), start=1)
    ]
    first = [records.header(**values), records.model_event(), records.policy()]
    return summary_of(records.write(folder / name, [*first, *events, records.end(9.0, 100)]))


def best_of(comparison):
    return {entry.name: entry.best for entry in comparison.entries if entry.best is not None}


def test_numbers_ascend_as_the_word_lower_says(tmp_path):
    losses = (3.0, 1.005, 1.0, 2.0)
    runs = (lossy(tmp_path, name, loss) for name, loss in zip("abcd", losses, strict=True))
    text = compare_runs(*runs).verdict.text
    assert text.startswith(
        "`c` and `b` have a lower loss than `d` and `a` (1.044, 1.049, 2.044 and 3.044, means of "
    )


def test_the_lower_loss_wins_and_the_faster_step_is_told(tmp_path):
    comparison = compare_runs(
        lossy(tmp_path, "a", 2.0),
        lossy(tmp_path, "b", 1.0, seconds=0.25),
        lossy(tmp_path, "c", 3.0),
    )
    assert comparison.verdict.severity == "good"
    assert comparison.verdict.text == (
        "`b` has a lower loss than `a` and `c` (1.044, 2.044 and 3.044, means of the last 20); a "
        "step of b was the fastest in these runs (250 ms (250 ms to 250 ms), 500 ms (500 ms to "
        "500 ms) and 500 ms (500 ms to 500 ms), with quartiles)."
    )
    assert best_of(comparison)["mean of the last 20 losses"] == 1
    assert best_of(comparison)["time per step"] == 1
    assert {entry.difference for entry in comparison.entries} == {""}
    text = comparison_text(comparison)
    assert "2.044 1.044 * 3.044" in " ".join(text.split())
    assert text.startswith("good: `b` has a lower loss")


def test_losses_that_hardly_differ_are_about_the_same(tmp_path):
    comparison = compare_runs(lossy(tmp_path, "a", 2.0), lossy(tmp_path, "b", 2.01))
    assert comparison.verdict.text.startswith("The losses of `a` and `b` are about the same (")
    assert comparison.verdict.text.endswith("; their steps take as long.")


def test_a_run_that_went_bad_loses(tmp_path):
    bad = lossy(tmp_path, "bad", float("nan"))
    comparison = compare_runs(bad, lossy(tmp_path, "good", 2.0))
    assert comparison.verdict.text.startswith("`good` is better: `bad` went bad")
    assert best_of(comparison)["steps with inf or NaN as loss"] == 1
    both = compare_runs(bad, bad)
    assert both.verdict.severity == "bad"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"losses": (90.0,)}, "they begin at 6 and 94, so they are not the same loss"),
        ({"losses": (2.0,), "number": 50}, "the runs have 100 and 50 steps"),
        ({"losses": (2.0, 2.0, 3.0)}, "their optimizers differ"),
    ],
)
def test_runs_that_cannot_be_compared_are_told_so(tmp_path, values, words):
    first = lossy(tmp_path, "a", 2.0)
    losses = values.pop("losses")
    comparison = compare_runs(first, lossy(tmp_path, "b", *losses, **values))
    assert comparison.verdict.severity == "warning"
    assert words in comparison.verdict.text
    assert "last loss" not in best_of(comparison)


def test_other_models_cannot_be_compared(tmp_path):
    runs = []
    for size in (10, 20):
        events = [records.header(), records.model_event(parameters=size), records.step(1)]
        runs.append(summary_of(records.write(tmp_path / str(size), events)))
    assert "their models differ" in compare_runs(*runs).verdict.text


def test_times_of_other_machines_are_not_compared(tmp_path):
    other = lossy(tmp_path, "b", 1.0, seconds=0.1, machine="another")
    comparison = compare_runs(lossy(tmp_path, "a", 2.0), other)
    assert "their times cannot be compared" in comparison.verdict.text
    assert "time per step" not in best_of(comparison)


def test_the_losses_of_a_gan_are_compared_by_optimizer(tmp_path):
    comparison = compare_runs(lossy(tmp_path, "a", 1.0, 2.0), lossy(tmp_path, "b", 1.5, 3.0))
    found = entries(comparison)
    assert "last loss" not in found
    assert found["last loss of AdamW"].values == (1.04, 1.54)
    assert found["last loss of AdamW 2"].values == (2.04, 3.04)
    assert not [name for name in best_of(comparison) if "loss" in name]
    assert "GAN do not say which run is better" in comparison.verdict.text
