"""``halfstep.doctor``: its arguments, and functions whose source is read."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import GradScaler, autocast, doctor

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.ones(2, 4), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": optimizer}, r"doctor\(model=SGD\): pass a torch.nn.Module"),
        ({"optimizer": model}, r"doctor\(optimizer=Linear\): pass a torch.optim"),
        ({"optimizer": [optimizer, 3]}, r"doctor\(optimizer=int\)"),
        ({"scaler": 65536.0}, r"doctor\(scaler=float\): pass a halfstep.* or torch.amp"),
        ({"dtype": "fp16"}, r"doctor\(dtype=str\): pass a torch.dtype"),
        ({"step_fn": 3}, r"doctor\(step_fn=3\): pass the function that does a step"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        doctor(**arguments)


def lines_of(function, *, past: int) -> int:
    return function.__code__.co_firstlineno + past


def test_a_model_with_two_names_is_one() -> None:
    model = inner = nn.Sequential(nn.Linear(4, 1).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return inner(model(x))

    (finding,) = doctor(optimizer=optimizer, step_fn=step)
    assert finding.names == ("0.weight", "0.bias")


def test_a_function_is_read_with_what_its_names_stand_for() -> None:
    scaler, low = torch.amp.GradScaler("cpu"), torch.bfloat16

    def step():
        with autocast("cpu", dtype=low):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    found = doctor(step_fn=step)
    assert [each.id for each in found] == [
        "clip-before-unscale",
        "scaler-with-bf16",
        "torch-scaler",
    ]
    assert found[0].file == __file__
    assert found[0].line == lines_of(step, past=4)
    low = torch.float16
    assert [each.id for each in doctor(step_fn=step)] == ["clip-before-unscale", "torch-scaler"]
    scaler = GradScaler(enabled=False)
    assert [each.id for each in doctor(step_fn=step)] == []


def test_only_that_function_and_what_it_calls_is_read() -> None:
    def good():
        with autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()

    assert list(doctor(step_fn=good)) == []  # and not the rest of this file
    (finding,) = doctor(step_fn=calls_another)
    assert (finding.id, finding.line) == ("backward-in-autocast", lines_of(called, past=3))


def called():
    with autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x), y)
        loss.backward()


def calls_another():
    called()


def test_the_objects_that_a_function_uses_are_looked_at() -> None:
    half = nn.Linear(4, 1).half()
    rest = torch.optim.SGD(half.parameters(), lr=0.1)

    def step():
        half(x).mean().backward()
        rest.step()

    (finding,) = doctor(step_fn=step)
    assert (finding.id, finding.names) == ("half-parameters", ("weight", "bias"))
    assert list(doctor(model, optimizer, step_fn=step)) == []


def test_master_weights_are_the_cure() -> None:
    half = nn.Linear(4, 1).half()
    rest = torch.optim.Adam(half.parameters(), lr=0.1)
    found = doctor(half, rest)
    assert {finding.id for finding in found} == {"half-parameters", "eps-underflow"}
    (finding,) = [finding for finding in found if finding.id == "half-parameters"]
    exec(finding.code.partition("\n")[0], {"halfstep": halfstep, "optimizer": rest})
    assert list(doctor(half, rest)) == []


class Trainer:
    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, closure):
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()


def test_a_method_knows_its_object() -> None:
    trainer = Trainer()
    for function in (trainer.step, functools.partial(trainer.step, None)):
        (finding,) = doctor(step_fn=function)
        assert (finding.id, finding.names) == (
            "closure-not-unscaled",
            ("self.scaler", "self.optimizer"),
        )
    trainer.scaler = GradScaler("cpu")
    assert list(doctor(step_fn=trainer.step)) == []


def test_a_decorated_function_is_read_below_its_decorator() -> None:
    def twice(function):
        @functools.wraps(function)
        def run():
            function()
            function()

        return run

    @twice
    @halfstep.autocast("cpu", torch.bfloat16)
    def step():
        F.mse_loss(model(x), y).backward()

    (finding,) = doctor(step_fn=step)
    assert finding.id == "autocast-around-backward"


def test_a_function_without_source_is_said() -> None:
    for function in (torch.relu, eval("lambda: None"), nn.Linear(2, 2)):
        (finding,) = doctor(step_fn=function)
        assert (finding.id, finding.severity) == ("source-not-read", "notice")


def test_nothing_is_changed_and_nothing_runs() -> None:
    before = [param.clone() for param in model.parameters()]
    state = torch.random.get_rng_state()

    def step():
        raise AssertionError

    doctor(model, optimizer, GradScaler("cpu"), None, step, torch.float16)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(state, torch.random.get_rng_state())
    assert optimizer.state_dict()["state"] == {}


def test_json_holds_everything() -> None:
    values = json.loads(doctor(dtype=torch.float16).to_json())
    assert values["worst"] == "bad"
    (finding,) = values["findings"]
    assert finding["id"] == "fp16-without-scaler"
    assert finding["docs"] == "docs/doctor.md#fp16-without-scaler"


def test_a_function_may_make_its_own_scaler() -> None:
    def loop():
        scaler = GradScaler("cpu")
        with autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def plain():
        with autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    assert list(doctor(step_fn=loop, dtype=torch.float16)) == []
    found = doctor(step_fn=plain, dtype=torch.float16)
    assert {finding.id for finding in found} == {"fp16-without-scaler"}
    assert {finding.line for finding in found} == {0, lines_of(plain, past=1)}
