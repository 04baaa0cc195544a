"""Diagnoses as events: what is written is read, of any shape; what is none is said."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from msgspec import structs
from tests.device import DEVICE
from tests.record.events import step, write
from tests.report import records

import halfstep
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.line import Line
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Diagnosed
from halfstep._tools.watch.diagnose import diagnose
from halfstep.errors import CallOrderError

LINE = Line("model.py", 3, "forward", "y = x.exp()")
FULL = records.found(
    bad=records.bad_op(forward_op="exp", forward_line=LINE, needs=97280.0),
    tensor="inf",
    notes=("a note",),
    num_replays=3,
    seconds=0.5,
    rank=1,
)


@pytest.mark.parametrize("found", [Diagnosis("none"), records.found(), FULL])
def test_a_diagnosis_comes_back_from_json(found):
    assert Diagnosis.from_json(found.to_json()) == found


def test_what_a_later_version_adds_is_left_out():
    event = json.loads(FULL.to_json()) | {"mood": "fine"}
    event["bad"]["colour"] = "red"
    assert Diagnosis.from_json(json.dumps(event)) == FULL


def test_of_all_ranks_by_step_with_the_steps_of_segments_one_after_the_other(tmp_path):
    later = records.header(started="2026-01-01T00:01:00+00:00")
    write(tmp_path, [records.header(), step(1), step(2), records.diagnosis(2)])
    write(tmp_path, [later, step(1), records.diagnosis(1)])
    write(tmp_path, [records.header(rank=3), records.diagnosis(2, scale=math.inf)], rank=3)
    found = read_run(tmp_path).diagnoses
    assert [(each.rank, each.step) for each in found] == [(0, 2), (3, 2), (0, 3)]
    assert [each.diagnosis.scale for each in found] == [1024.0, math.inf, 1024.0]


def test_a_record_without_diagnoses_has_none(tmp_path):
    write(tmp_path, [records.header(), step(1), {"event": "prognosis", "step": 2}])
    run = read_run(tmp_path)
    assert (run.diagnoses, run.notes) == ((), ())


def without(name):
    return {key: value for key, value in records.diagnosis(2).items() if key != name}


@pytest.mark.parametrize(
    "event",
    [
        without("verdict"),
        without("step"),
        records.diagnosis(2) | {"verdict": "witchcraft"},
        records.diagnosis(2) | {"bad": "linear"},
        records.diagnosis(2) | {"bad": asdict(records.bad_op(name=7))},
        records.diagnosis(2) | {"bad": asdict(records.bad_op(call=True))},
        records.diagnosis(2) | {"bad": asdict(records.bad_op(needs="much"))},
        records.diagnosis(2) | {"ends": "loss"},
        records.diagnosis(2) | {"scale": True},
    ],
)
def test_what_is_no_diagnosis_is_skipped_and_said(tmp_path, event):
    write(tmp_path, [records.header(), event, step(3)])
    run = read_run(tmp_path)
    assert run.diagnoses == ()
    (note,) = run.notes
    assert note.text.startswith("line 2 of rank0.jsonl is damaged and was left out (")


def test_a_record_takes_diagnoses_and_notes_while_it_is_open(tmp_path):
    run = halfstep.record(tmp_path)
    with pytest.raises(CallOrderError, match="has not been entered"):
        run.add_diagnosis(FULL)
    with run:
        run.add_diagnosis(FULL)
        run.add_note("a batch was empty")
        run.add_note("a batch was empty")
    written = read_run(tmp_path)
    assert written.diagnoses == (Diagnosed(0, 1, FULL),)
    assert [note.text for note in written.notes] == ["a batch was empty"]


def test_the_step_is_the_one_that_has_ended_or_that_an_optimizer_makes_now(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, model=model, every=0) as run:
        inside: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: inside.append(run.add_diagnosis(FULL)))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert run.add_diagnosis(FULL) == 2
    assert inside == [1, 2]
    assert [each.step for each in read_run(tmp_path).diagnoses] == [1, 2, 2]


@pytest.mark.parametrize("scaled", [False, True])
def test_replays_are_not_recorded(tmp_path, scaled):
    """Losses, norms and tensors are those of the training alone."""

    def recorded(folder, replay):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = halfstep.GradScaler(DEVICE, init_scale=8.0, enabled=scaled)
        batch = torch.ones(3, 4)

        def forward_backward():
            scaler.scale(model(batch).square().mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)

        with halfstep.record(folder, every=2):
            for _ in range(4):
                optimizer.zero_grad()
                forward_backward()
                replay(forward_backward)
                scaler.step(optimizer)
                scaler.update()
        run = read_run(folder)
        return [structs.replace(s, time=0.0) for s in run.steps], run.samples

    alone = recorded(tmp_path / "alone", lambda step: None)
    assert alone[1]
    assert recorded(tmp_path / "replayed", diagnose) == alone
