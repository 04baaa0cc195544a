"""Looking changes nothing: options of ``halfstep run`` times kinds of scripts, bit for bit."""

import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.diagnose.conftest import short_trials as short_trials
from tests.run.corpus import kinds

from halfstep import Policy, preset
from halfstep._tools.run import session
from halfstep._tools.run.session import Command, Options, Session

FP16, BF16 = torch.float16, torch.bfloat16
MODELS: list[Any] = []
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "--policy --every 1": {"policy": Policy.parse("torch; relu:fp32"), "every": 1},
    "--amp fp16 --every 1": {"amp": FP16, "every": 1},
    "--amp bf16": {"amp": BF16, "every": 0},
}


def left_by(kind: Any) -> list[Any]:
    """Return all that a loop leaves: losses, parameters, buffers, gradients, random states."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    kinds.LOSSES.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        model = kind()
    MODELS[:] = [model]  # kept to the end of the run, as by the names of a script
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    rest = [torch.get_rng_state(), torch.rand(1)]
    left = [None if t is None else t.detach().numpy().tobytes() for t in (*tensors, *rest)]
    return [*kinds.LOSSES, *left, random.random(), np.random.rand()]


@pytest.fixture
def in_session(monkeypatch, tmp_path):
    """Returns a function that trains in a session, and returns what that leaves and records."""
    close: list[Any] = []
    monkeypatch.setattr(session, "atexit", SimpleNamespace(register=close.append))
    monkeypatch.setattr(session.sys, "argv", ["halfstep"])

    def trained(kind: Any, name: str, *, is_diagnosing: bool) -> tuple[list[Any], list[str], int]:
        folder = tmp_path / f"{name} {is_diagnosing}"
        given = {"policy": preset("standard"), "every": 50, "amp": None} | OPTIONS[name]
        given["diagnose_seconds"] = 30.0 if is_diagnosing else None
        options = Options(folder=folder, is_quiet=True, **given)
        left: list[Any] = []
        monkeypatch.setattr(session, "execute", lambda *_, **__: left.extend(left_by(kind)))
        Session(Command("train.py", [], is_module=False), options).run()
        close.pop()()
        return left, *recorded(folder)

    return trained


def recorded(folder: Path) -> tuple[list[str], int]:
    """Return the events but those of diagnoses, in any order, and how many of these there are."""
    events = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    others = [
        e | {"time": 0, "is_diagnosing": ""}
        for e in events
        if e["event"] not in ("run", "diagnosis", "note")
    ]
    for event in others:  # autograd adds up gradients in any order
        event.get("tensors", []).sort(key=lambda tensor: (tensor["kind"], tensor["name"]))
    return sorted(map(json.dumps, others)), sum(e["event"] == "diagnosis" for e in events)


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: kind.__name__)
def test_a_script_trains_the_same_with_and_without(kind: Any, in_session) -> None:
    alone, num_found = left_by(kind), 0
    for name, options in OPTIONS.items():
        left, events, _ = in_session(kind, name, is_diagnosing=False)
        if options.get("every"):  # with the most that is looked at
            seen, same_events, num = in_session(kind, name, is_diagnosing=True)
            assert seen == left, name
            assert same_events == events, name
            num_found += num
        if kind in kinds.PLAIN and "amp" not in options:
            assert left == alone, name
    assert num_found or kind is kinds.lbfgs  # which evaluates within its step
