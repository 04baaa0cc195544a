"""Records that are read while they grow: nothing twice, nothing left out."""

import json
import shutil

import pytest
from msgspec.structs import asdict
from tests.record.events import step

from halfstep._numerics.statistics import Statistics
from halfstep._record.files import LineWriter, file_of, line_of
from halfstep._record.rank_record import RankRecord
from halfstep._record.read import Follower, read_run
from halfstep.errors import RecordError

EMPTY = dict.fromkeys(("fp16", "bf16", "e4m3", "e5m2"), 0)
HEADER = {
    "event": "run",
    "schema": 1,
    "halfstep": "1",
    "every": 5,
    "started": "2026-01-01T00:00:00+00:00",
}
LATER = HEADER | {"started": "2026-01-01T00:01:00+00:00"}
END = {"event": "end", "time": 9.0, "steps": 2, "error": None}


def skip(number):
    return step(number, taken=False, reason="overflow", scale_after=4.0)


def sample(number, size=8):
    statistics = Statistics(size, size, 0, 0, 0, 1.0, 1.0, 0, [size], EMPTY, EMPTY)
    row = {"kind": "output", "name": "fc", "dtype": "float16"} | asdict(statistics)
    return {"event": "sample", "step": number, "scale": 8.0, "tensors": [row]}


def note(text):
    return {"event": "note", "step": 1, "text": text}


def culprits(number):
    return {
        "event": "culprits",
        "step": number,
        "optimizer": "SGD",
        "began_in": "fc",
        "parameters": ["fc.weight"],
        "num_parameters": 1,
    }


def write(folder, *events, rank=0):
    writer = LineWriter(file_of(folder, rank))
    for event in events:
        writer.write(event)
    writer.close()


def append(folder, text, rank=0):
    with file_of(folder, rank).open("ab") as file:
        file.write(text)


def numbers(update):
    return [step.step for step in update.new.steps]


def test_each_read_gives_what_is_new(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1), note("first"))
    first = follower.read()
    write(tmp_path, skip(2), culprits(2), note("second"))
    second = follower.read()
    third = follower.read()
    assert [numbers(update) for update in (first, second, third)] == [[1], [2], []]
    assert [[n.text for n in update.new.notes] for update in (first, second, third)] == [
        ["first"],
        ["second"],
        [],
    ]
    assert [c.began_in for c in second.new.culprits] == ["fc"]
    assert third.new.culprits == ()
    assert [update.is_anew for update in (first, second, third)] == [True, False, False]
    assert third.new.header.every == 5


def test_no_line_is_read_twice(tmp_path, monkeypatch):
    taken = []
    take = RankRecord.take
    monkeypatch.setattr(
        RankRecord, "take", lambda self, line, event: (taken.append(line), take(self, line, event))
    )
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1))
    follower.read()
    write(tmp_path, step(2))
    follower.read()
    follower.read()
    assert taken == [1, 2, 3]


def test_what_was_followed_is_what_is_read_at_once(tmp_path):
    """Fed in pieces that end anywhere, the values are those of the whole."""
    source = tmp_path / "source"
    write(source, HEADER, step(1), skip(2), culprits(2), sample(2), note("é"), END)
    write(source, LATER, step(1), sample(1), step(2))
    data = file_of(source, 0).read_bytes()
    whole = read_run(source)
    for size in (7, 64, 1000):
        folder = tmp_path / str(size)
        folder.mkdir()
        follower = Follower(folder)
        steps, found, notes, samples = [], [], [], []
        for start in range(0, len(data), size):
            append(folder, data[start : start + size])
            update = follower.read()
            if update is not None:
                steps += update.new.steps
                found += update.new.culprits
                notes += update.new.notes
                samples += update.new.samples
        assert tuple(steps) == whole.steps
        assert tuple(found) == whole.culprits
        assert tuple(notes) == whole.notes
        assert samples[-1] == whole.samples[-1]
        assert (update.new.num_segments, update.new.has_ended) == (2, False)


def test_a_half_written_line_counts_when_it_is_whole(tmp_path):
    follower = Follower(tmp_path)
    line = line_of(step(1)).rstrip()
    write(tmp_path, HEADER)
    append(tmp_path, line[:20])
    assert numbers(follower.read()) == []
    append(tmp_path, line[20:] + b"\n")
    update = follower.read()
    assert numbers(update) == [1]
    assert update.new.notes == ()


def test_a_line_that_stays_cut_is_told_when_the_run_goes_on(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1))
    append(tmp_path, b'{"event":"step","st')
    assert follower.read().new.notes == ()
    write(tmp_path, LATER, step(1))
    update = follower.read()
    assert "line 3 of rank0.jsonl is cut" in update.new.notes[0].text
    assert numbers(update) == [2]
    assert update.new.steps[0].time == 61.0


def test_there_may_be_nothing_yet(tmp_path):
    folder = tmp_path / "later"
    follower = Follower(folder)
    assert follower.read() is None
    folder.mkdir()
    file_of(folder, 0).touch()
    assert follower.read() is None
    append(folder, json.dumps(HEADER).encode())
    assert follower.read() is None
    append(folder, b"\n")
    assert follower.read().is_anew


def test_an_end_is_seen_and_a_new_segment_takes_it_back(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1), END | {"error": "ValueError: no"})
    ended = follower.read().new
    assert (ended.has_ended, ended.error) == (True, "ValueError: no")
    write(tmp_path, LATER)
    assert not follower.read().new.has_ended


def test_a_record_that_takes_the_place_of_another_is_read_from_its_beginning(tmp_path):
    follower = Follower(tmp_path / "run")
    write(tmp_path / "run", HEADER, step(1), step(2))
    follower.read()
    write(tmp_path / "next", HEADER, step(1), step(2), step(3))  # of another inode for certain
    shutil.rmtree(tmp_path / "run")
    assert follower.read().new.steps == ()
    (tmp_path / "next").rename(tmp_path / "run")
    update = follower.read()
    assert (numbers(update), update.is_anew) == ([1, 2, 3], True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"hello\n", "none of its lines begins a record"),
        (b'{"event": "run", "schema": 99}\n', "it has schema 99"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, text, message):
    append(tmp_path, text)
    with pytest.raises(RecordError, match=message):
        Follower(tmp_path).read()


# --- several ranks --------------------------------------------------------------------------------


def test_a_sample_comes_when_all_ranks_have_it(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, sample(1), rank=0)
    write(tmp_path, HEADER, rank=1)
    assert follower.read().new.samples == ()
    write(tmp_path, sample(1), rank=1)
    (both,) = follower.read().new.samples
    assert (both.step, both.tensors[0].size) == (1, 16)
    assert follower.read().new.samples == ()


def test_of_many_samples_the_last_is_given_and_two_are_kept(tmp_path, monkeypatch):
    held = []
    take = RankRecord.take
    monkeypatch.setattr(
        RankRecord,
        "take",
        lambda self, line, event: (take(self, line, event), held.append(len(self.samples))),
    )
    write(tmp_path, HEADER, *(sample(number) for number in range(1, 20)))
    assert [s.step for s in Follower(tmp_path).read().new.samples] == [19]
    assert max(held) == 3  # the new one, before the oldest is dropped


def test_a_rank_that_died_does_not_hold_the_samples_back(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, sample(1), rank=0)
    write(tmp_path, HEADER, sample(1), rank=1)
    follower.read()
    seen = []
    for number in (2, 3, 4):
        write(tmp_path, sample(number), rank=0)
        seen += [s.step for s in follower.read().new.samples]
    assert seen == [2, 3]


def test_it_has_ended_when_all_ranks_have(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, END, rank=0)
    write(tmp_path, HEADER, rank=1)
    assert not follower.read().new.has_ended
    write(tmp_path, END, rank=1)
    assert follower.read().new.has_ended


def test_ranks_that_disagree_are_told_once_however_far_apart_they_are(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1), step(2), step(3), rank=0)
    write(tmp_path, HEADER, rank=1)
    assert follower.read().new.notes == ()
    write(tmp_path, step(1), rank=1)
    assert follower.read().new.notes == ()
    write(tmp_path, skip(2), skip(3), rank=1)
    (told,) = follower.read().new.notes
    assert "from step 2 on: rank 1 skipped it" in told.text
    write(tmp_path, skip(4), rank=1)
    assert follower.read().new.notes == ()


def test_a_rank_whose_file_comes_later_is_compared_from_then_on(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1), skip(2), rank=0)
    follower.read()
    write(tmp_path, HEADER, step(1), skip(2), step(3), rank=1)
    write(tmp_path, step(3), skip(4), rank=0)
    update = follower.read()
    assert update.new.ranks == (0, 1)
    assert update.new.notes == ()
    write(tmp_path, step(4), rank=1)
    assert "from step 4 on" in follower.read().new.notes[0].text


def test_it_is_compared_from_a_whole_iteration_on(tmp_path):
    follower = Follower(tmp_path)
    generator, critic = skip(1), step(1, optimizer="Adam")
    write(tmp_path, HEADER, generator, rank=0)
    follower.read()
    write(tmp_path, critic, skip(2), rank=0)
    write(tmp_path, HEADER, generator, critic, skip(2), rank=1)
    assert follower.read().new.notes == ()
    write(tmp_path, step(3), rank=0)
    write(tmp_path, step(3), rank=1)
    assert follower.read().new.notes == ()


def test_a_lower_rank_that_comes_later_is_the_first(tmp_path):
    follower = Follower(tmp_path)
    write(tmp_path, HEADER, step(1), rank=3)
    assert follower.read().new.ranks == (3,)
    write(tmp_path, HEADER | {"machine": "zero"}, step(1), step(2), rank=0)
    update = follower.read()
    assert (update.new.ranks, update.is_anew) == ((0, 3), True)
    assert numbers(update) == [1]
    assert update.new.header.machine == "zero"
    write(tmp_path, step(2), rank=3)
    assert numbers(follower.read()) == [2]
