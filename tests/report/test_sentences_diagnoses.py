"""What is said about steps that were diagnosed, and about those that could be."""

import math

import pytest
from tests.report import records
from tests.report.records import bad_op, diagnosis, skip, step
from tests.report.test_sentences import ADVICE, codes, said, said_of, the_one

from halfstep._tools.diagnose.diagnosis import Cure
from halfstep._tools.record.read import read_run
from halfstep._tools.report.about_diagnoses import MOST_PLACES
from halfstep._tools.report.summarize import summarize
from halfstep._tools.user_code.line import Line


def went_bad(folder, **values):
    """Return the sentence about a loss that was inf in step 50, which was diagnosed."""
    return the_one(said(folder, skip(50, reason="loss"), diagnosis(50, **values)), "Step 50")


def test_the_op_the_reason_and_the_cure(tmp_path):
    sentence = went_bad(tmp_path)
    assert sentence.severity == "bad"
    assert sentence.text == (
        "Step 50 went bad in `linear` in `blocks.1.mlp` (forward, `model.py:31`): its result needs "
        "a wider dtype than float16, and is finite in float32. Cure, confirmed by a replay: "
        '`autocast(..., policy="standard; linear@blocks.1.mlp:fp32")`.'
    )
    assert codes(sentence)[-1] == records.CURE.text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"verdict": "scale"}, "Step 50 overflowed in `linear` in `blocks.1.mlp`"),
        ({"verdict": "maths"}, "(forward, `model.py:31`), which is not finite in float32 either."),
        ({"verdict": "unknown", "notes": ("a note",)}, "an unknown reason (a note)."),
        ({"verdict": "unknown", "bad": None}, "went bad in an unknown op, for"),
        (
            {"verdict": "data", "tensor": "x[0]"},
            "because `x[0]` was already bad; the first op to read it is",
        ),
        ({"bad": bad_op(op="_to_copy")}, "in the cast for `linear` in `blocks.1.mlp`"),
        ({"bad": bad_op(op="_to_copy", name="_to_copy")}, "in a cast in `blocks.1.mlp`"),
        ({"bad": bad_op(module="", line=None)}, "in `linear` (forward): its"),
        (
            {"bad": bad_op(phase="backward", line=None, forward_line=Line("a/b.py", 7, "f", ""))},
            "(backward, `b.py:7`)",
        ),
        ({"cure": None}, "and is finite in float32."),
        ({"cure": Cure("code", "x + 1")}, "float32. This should help: `x + 1`."),
        (
            {"cure": Cure("code", "x + 1", is_finite=False)},
            "Tried, and not enough: `x + 1`.",
        ),
        ({"cure": Cure("data", "leave it out")}, "What to do: leave it out."),
    ],
)
def test_each_reason_and_each_cure_has_its_words(tmp_path, values, words):
    text = went_bad(tmp_path, **values).text
    assert words in text
    assert "None" not in text
    assert text.endswith(words) or "cure" not in values


def test_one_place_is_one_sentence_with_its_steps(tmp_path):
    found = said_of(records.diagnosed(tmp_path))
    assert the_one(found, "Steps 41, 42 went bad in `linear`").severity == "bad"
    the_one(found, "Step 80 went bad in `log` in `head`")


def test_ranks_are_put_together(tmp_path):
    for rank in range(5):
        events = [records.header(rank=rank, world_size=5), step(1), step(2)]
        if rank in (0, 3):
            events.append(diagnosis(2, rank=rank))
        if rank == 4:
            events.append(diagnosis(1, rank=4, verdict="maths"))
        records.write(tmp_path, [*events, records.end(1.0, 2)], rank)
    found = said_of(tmp_path)
    the_one(found, "Step 2 on ranks 0 and 3 went bad in `linear`")
    the_one(found, "Step 1 on rank 4 went bad in `linear`")


def test_what_other_ranks_have_found_is_told_with_their_rank(tmp_path):
    others = (records.found(rank=1, verdict="maths"), records.found(rank=2, verdict="none"))
    header = records.header(world_size=3)
    records.write(tmp_path, [header, step(1), diagnosis(1, others=others)])
    places = summarize(read_run(tmp_path)).bad_places
    assert [(place.diagnosis.verdict, place.ranks) for place in places] == [
        ("range", (0,)),
        ("maths", (1,)),
    ]


def test_many_places_are_counted(tmp_path):
    places = (diagnosis(n, bad=bad_op(module=f"m{n}")) for n in range(1, MOST_PLACES + 3))
    found = said(tmp_path, *places)
    assert sum("`linear`" in sentence.text for sentence in found) == MOST_PLACES
    assert the_one(found, "2 more places went bad").severity == "bad"


def test_a_scale_that_was_too_large_is_as_bad_as_the_skips(tmp_path):
    scale = {"verdict": "scale", "ends": ("head.weight",)}
    at_start = said(tmp_path / "a", skip(1, 4096.0), diagnosis(1, **scale))
    assert [sentence.severity for sentence in at_start] == ["good", "notice"]
    few = said(tmp_path / "b", skip(50), diagnosis(50, **scale))
    assert the_one(few, "Step 50 overflowed").severity == "notice"
    many = [skip(n) for n in range(50, 70)]
    assert the_one(said(tmp_path / "c", *many, diagnosis(50, **scale)), "Step 50").severity == "bad"
    taken = said(tmp_path / "d", diagnosis(50, **scale))
    assert the_one(taken, "Step 50").severity == "bad"


def test_a_step_whose_replay_was_finite_is_a_notice(tmp_path):
    sentence = went_bad(tmp_path, verdict="none", bad=None, cure=None, notes=("no luck",))
    assert sentence.severity == "notice"
    assert "was finite (no luck)." in sentence.text


def test_names_from_outside_are_escaped(tmp_path):
    found = said_of(records.hostile(tmp_path))
    (sentence,) = [s for s in found if "was already bad" in s.text]
    assert codes(sentence).count(records.HOSTILE) == 3
    assert "What to do: \\</script\\>" in sentence.markdown


# --- how to get a diagnosis -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        [step(50, loss=math.nan)],
        [skip(50, reason="loss")],
        [skip(50), skip(60)],
        [skip(50, 1.0, reason="non-finite at any scale")],
        [step(50, loss=math.inf), *map(skip, range(60, 70)), skip(80, reason="norm")],
    ],
)
def test_one_sentence_tells_how_unless_there_is_one(tmp_path, events):
    end = f"To find the op and its cure, run `{ADVICE}`."
    found = said(tmp_path / "without", *events)
    assert [sentence.text.endswith(end) for sentence in found].count(True) == 1
    found = said(tmp_path / "with", *events, diagnosis(50))
    assert not [sentence for sentence in found if ADVICE in sentence.text]


def test_what_is_no_riddle_needs_no_diagnosis(tmp_path):
    healthy = said_of(records.healthy(tmp_path / "a"))
    start = said(tmp_path / "b", skip(1, 4096.0), skip(2, 2048.0))
    assert not [s for s in (*healthy, *start) if ADVICE in s.text]


WATCHED = {
    "event": "device",
    "step": 1,
    "device": "cpu",
    "machine": "a CPU",
    "is_diagnosing": True,
}


def test_a_run_with_diagnose_that_goes_on_is_not_told_to_diagnose(tmp_path):
    """Its notes, and why nothing was replayed, are written at its end."""
    skips = [skip(50, reason="loss"), skip(60)]
    for name, first, is_told in (("a", WATCHED | {"is_diagnosing": False}, 1), ("b", WATCHED, 0)):
        found = said(tmp_path / name, first, *skips)
        assert len([s for s in found if ADVICE in s.text]) == is_told


@pytest.mark.parametrize("verdict", ["scale", "maths"])
def test_skips_that_a_diagnosis_explains_are_one_line(verdict, tmp_path):
    skips = [skip(n, 1.0, "non-finite at any scale") for n in range(50, 60)]
    unexplained = said(tmp_path / "without", *skips)
    assert len([s for s in unexplained if "skipped" in s.text or "smallest" in s.text]) == 2
    diagnoses = [diagnosis(n, verdict=verdict) for n in range(50, 60)]
    explained = said(tmp_path / "with", *skips, *diagnoses)
    about = [s for s in explained if "skipped" in s.text or "smallest scale" in s.text]
    assert len(about) == 1
    assert about[0].follows


def test_a_run_that_could_not_be_replayed_is_not_told_to_diagnose(tmp_path):
    note = records.note(101, "step 50 was not replayed: the model is sharded")
    found = said(tmp_path, WATCHED, skip(50, reason="loss"), note)
    assert not [s for s in found if ADVICE in s.text]
    assert the_one(found, "sharded").text == f"{note['text']}."


def test_the_cure_of_a_diagnosis_takes_the_place_of_guesses(tmp_path):
    bad = step(50, loss=math.nan)
    guess = the_one(said(tmp_path / "without", bad), "The loss became")
    known = the_one(said(tmp_path / "with", bad, diagnosis(50)), "The loss became")
    assert "division and sqrt()" in guess.text
    assert known.text.endswith("and it recovered.")
