"""Records that are read back: segments, cut lines, several ranks."""

import json
import math

import pytest
from tests.record.events import step, write
from tests.report import records

from halfstep._tools.record.files import file_of
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Measured
from halfstep._tools.statistics import Statistics
from halfstep.errors import RecordError

STATISTICS = Statistics(
    size=8,
    measured=8,
    zeros=1,
    nan=0,
    inf=1,
    amax=3.0,
    amin=2.0**-30,
    first=-30,
    histogram=(1, 1, *[0] * 30, 4),
    underflow={"fp16": 2, "bf16": 0, "e4m3": 2, "e5m2": 2},
    overflow={"fp16": 0, "bf16": 0, "e4m3": 0, "e5m2": 0},
)
HEADER = {"event": "run", "schema": 1, "halfstep": "1", "rank": 0, "every": 5}
FIRST = HEADER | {"started": "2026-01-01T00:00:00+00:00"}
SECOND = HEADER | {"started": "2026-01-01T00:01:00+00:00"}


def sample(number, statistics=STATISTICS):
    return records.sample(number, [records.tensor("output", "fc", statistics, "float16")], 8.0)


def test_what_is_written_is_read(tmp_path):
    write(tmp_path, [FIRST, step(1, loss=math.nan, norm=math.inf), sample(1)])
    run = read_run(tmp_path)
    assert math.isnan(run.steps[0].loss)
    assert run.steps[0].norm == math.inf
    assert run.samples[0].tensors[0] == Measured.of("output", "fc", "float16", STATISTICS)
    assert run.without_end


def test_every_line_is_json_without_nan(tmp_path):
    write(tmp_path, [FIRST, step(1, loss=math.nan, norm=-math.inf), sample(1)])

    def refuse(constant):
        raise AssertionError(constant)

    for line in file_of(tmp_path, 0).read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_second_segment_goes_on(tmp_path):
    write(tmp_path, [FIRST, step(1), step(2), {"event": "end", "error": "Boom", "steps": 2}])
    write(tmp_path, [SECOND, step(1), step(2), sample(2)])
    run = read_run(tmp_path)
    assert [s.step for s in run.steps] == [1, 2, 3, 4]
    assert [s.time for s in run.steps] == [1.0, 2.0, 61.0, 62.0]
    assert run.samples[0].step == 4
    assert len(run.starts) == 2
    assert (run.error, run.without_end) == (None, (0,))


def test_a_cut_line_is_skipped_and_said_and_the_next_segment_is_whole(tmp_path):
    write(tmp_path, [FIRST, step(1)])
    with file_of(tmp_path, 0).open("a") as file:
        file.write('{"event":"step","st')
    write(tmp_path, [SECOND, step(1)])
    run = read_run(tmp_path)
    assert [s.step for s in run.steps] == [1, 2]
    assert "line 3 of rank0.jsonl is cut" in run.notes[0].text


BROKEN_SAMPLE = {"event": "sample", "step": 2, "scale": 8.0, "tensors": [{"kind": "output"}]}


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step", "step": 2},
        step(2, loss="much"),
        step(2, step="two"),
        {"event": "sample", "step": 2, "scale": 8.0},
        BROKEN_SAMPLE,
        {"event": "culprits", "step": 2, "optimizer": "SGD"},
        {"event": "model", "step": 2, "name": "GPT"},
        {"event": "policy", "step": 2, "dtype": "float16"},
        {"event": "note", "text": "hello"},
        {"event": "end", "time": None},
        {"event": "end"},
    ],
    ids=lambda event: event["event"],
)
def test_a_line_that_lacks_a_part_is_skipped_and_said(tmp_path, event):
    write(tmp_path, [FIRST, step(1), event, step(3)])
    run = read_run(tmp_path)
    assert [s.step for s in run.steps] == [1, 3]
    (note,) = run.notes
    assert note.text.startswith("line 3 of rank0.jsonl is damaged and was left out (")
    assert run.left_out == run.notes
    assert (run.samples, run.culprits, run.models, run.policies) == ((), (), (), ())
    assert run.without_end


def test_many_damaged_lines_are_one_note(tmp_path):
    write(tmp_path, [FIRST, *(step(n, loss=[] if 3 < n < 9 else 1.0) for n in range(1, 11))])
    (note,) = read_run(tmp_path).notes
    assert note.text == (
        "5 lines of rank0.jsonl are damaged and were left out: 5 to 9 (the first: Expected "
        "`float | null`, got `array` - at `$.loss`)"
    )
    assert note.step == 3


def test_a_header_with_a_damaged_part_still_begins_its_segment(tmp_path):
    write(tmp_path, [FIRST, step(1), SECOND | {"cores": "many"}, step(1)])
    run = read_run(tmp_path)
    assert [(s.step, s.time) for s in run.steps] == [(1, 1.0), (2, 61.0)]
    assert (run.header.halfstep, len(run.starts)) == ("unknown", 2)
    assert "line 3 of rank0.jsonl is damaged" in run.notes[0].text


def test_a_header_that_is_no_unicode_is_left_out(tmp_path):
    write(tmp_path, [FIRST, step(1)])
    held = json.dumps(FIRST | {"schema": "@"})[:-1].encode().replace(b"@", b"\xed\xa0\x80")
    with (tmp_path / "rank0.jsonl").open("ab") as file:
        file.write(held + b"}\n")
    run = read_run(tmp_path)
    assert (len(run.steps), len(run.starts)) == (1, 1)
    assert "line 3 of rank0.jsonl is damaged" in run.notes[0].text


def test_events_of_later_versions_are_no_damage(tmp_path):
    write(tmp_path, [FIRST, {"event": "weather", "sky": "blue"}, step(1, mood="fine")])
    assert (len(read_run(tmp_path).steps), read_run(tmp_path).notes) == (1, ())


def test_only_files_of_ranks_are_read(tmp_path):
    write(tmp_path, [FIRST, step(1)])
    for name in ("rank².jsonl", "rank٣.jsonl", "rank01.jsonl", "rank-1.jsonl", "rank.jsonl"):
        (tmp_path / name).write_text("x")
    (tmp_path / "rank2.jsonl").mkdir()
    assert read_run(tmp_path).ranks == (0,)


def test_a_name_that_is_no_unicode_can_be_read_back(tmp_path):
    write(tmp_path, [FIRST | {"command": ["train.py", "\udcff"]}, step(1)])
    assert read_run(tmp_path).header.command == ("train.py", "?")


@pytest.mark.parametrize(
    ("started", "said"), [({}, "None"), ({"started": "soon"}, "'soon'"), ({"started": 5}, "5")]
)
def test_a_segment_that_does_not_say_when_it_began_is_refused(tmp_path, started, said):
    write(tmp_path, [FIRST, step(1), HEADER | started])
    with pytest.raises(RecordError) as error:
        read_run(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{file_of(tmp_path, 0)}: line 3 begins a run, but started is {said}")
    assert "\n" not in message


def test_a_file_that_is_being_written_to_can_be_read(tmp_path):
    write(tmp_path, [FIRST, step(1)])
    with file_of(tmp_path, 0).open("ab") as file:
        file.write(b'{"event":"note","text":"\xc3')  # half a character
    assert len(read_run(tmp_path).steps) == 1


def test_ranks_are_put_together_exactly(tmp_path):
    smaller = Statistics(
        size=4,
        measured=4,
        zeros=0,
        nan=1,
        inf=0,
        amax=5.0,
        amin=0.25,
        first=3,
        histogram=(3,),
        underflow={"fp16": 0, "bf16": 0, "e4m3": 0, "e5m2": 0},
        overflow={"fp16": 0, "bf16": 0, "e4m3": 0, "e5m2": 0},
    )
    write(tmp_path, [FIRST, step(1), sample(1)], rank=0)
    write(tmp_path, [FIRST | {"rank": 1}, step(1), sample(1, smaller)], rank=1)
    run = read_run(tmp_path)
    (both,) = run.samples[0].tensors
    assert (both.size, both.nan, both.inf, both.zeros) == (12, 1, 1, 1)
    assert (both.amax, both.amin) == (5.0, 2.0**-30)
    assert both.by_exponent() == {2: 4, -29: 1, -30: 1, 3: 3}
    assert run.ranks == (0, 1)


def test_ranks_that_disagree_are_told(tmp_path):
    write(tmp_path, [FIRST, step(1), step(2)], rank=0)
    skipped = step(2, taken=False, reason="overflow", scale_after=4.0)
    write(tmp_path, [FIRST | {"rank": 1}, step(1), skipped], rank=1)
    (note,) = read_run(tmp_path).notes
    assert note.step == 2
    assert "rank 1 skipped it, scale 2^2, the first rank took it, scale 2^3" in note.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no record"),
        ("hello\n", "none of its lines begins a record"),
        ('{"event": "run", "schema": 99, "halfstep": "7.0"}\n', "it has schema 99"),
    ],
)
def test_what_is_no_record_is_refused_with_its_name(tmp_path, content, message):
    if content is not None:
        file_of(tmp_path, 0).write_text(content)
    with pytest.raises(RecordError, match=message) as error:
        read_run(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(RecordError, match="does not exist"):
        read_run(tmp_path / "nowhere")
