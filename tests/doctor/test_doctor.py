"""``halfstep.doctor``: its arguments."""

import json

import pytest
import torch
from torch import nn

import halfstep
from halfstep import GradScaler, doctor

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": optimizer}, r"doctor\(model=SGD\): pass a torch.nn.Module"),
        ({"optimizer": model}, r"doctor\(optimizer=Linear\): pass a torch.optim"),
        ({"optimizer": [optimizer, 3]}, r"doctor\(optimizer=int\)"),
        ({"scaler": 65536.0}, r"doctor\(scaler=float\): pass a halfstep.* or torch.amp"),
        ({"dtype": "fp16"}, r"doctor\(dtype=str\): pass a torch.dtype"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        doctor(**arguments)


def test_master_weights_are_the_cure() -> None:
    half = nn.Linear(4, 1).half()
    rest = torch.optim.Adam(half.parameters(), lr=0.1)
    found = doctor(half, rest)
    assert {finding.id for finding in found} == {"half-parameters", "eps-underflow"}
    (finding,) = [finding for finding in found if finding.id == "half-parameters"]
    exec(finding.code.partition("\n")[0], {"halfstep": halfstep, "optimizer": rest})
    assert list(doctor(half, rest)) == []


def test_nothing_is_changed() -> None:
    before = [param.clone() for param in model.parameters()]
    state = torch.random.get_rng_state()
    doctor(model, optimizer, GradScaler("cpu"), torch.float16)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(state, torch.random.get_rng_state())
    assert optimizer.state_dict()["state"] == {}


def test_json_holds_everything() -> None:
    values = json.loads(doctor(dtype=torch.float16).to_json())
    assert values["worst"] == "bad"
    (finding,) = values["findings"]
    assert finding["id"] == "fp16-without-scaler"
    assert finding["docs"] == "docs/doctor.toml [fp16-without-scaler]"
