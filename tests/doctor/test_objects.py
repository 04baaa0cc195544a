"""What is found in models, optimizers, scalers and schedules."""

import ast
import re

import pytest
import torch
from tests.scaler.containers import Parts
from torch import nn

import halfstep
from halfstep import doctor
from halfstep._tools.doctor.finding import Checkup

FP16, BF16 = torch.float16, torch.bfloat16


def ids(checkup: Checkup) -> list[str]:
    for finding in checkup:
        ast.parse(finding.code)
        assert finding.cure
    return [finding.id for finding in checkup]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_sound_training_has_no_finding() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = halfstep.GradScaler("cpu")
    found = doctor(model, optimizer, scaler, FP16)
    assert (list(found), str(found)) == ([], "good: nothing found")
    assert ids(doctor(model, optimizer, None, BF16)) == []
    assert ids(doctor()) == []


# --- scaler and dtype -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaler", "dtype", "wanted"),
    [
        (None, FP16, ["fp16-without-scaler"]),
        (None, BF16, []),
        (None, None, []),
        (halfstep.GradScaler(enabled=False), FP16, ["fp16-without-scaler"]),
        (halfstep.GradScaler(enabled=False), BF16, []),
        (halfstep.GradScaler("cpu"), FP16, []),
        (halfstep.GradScaler("cpu"), BF16, ["scaler-with-bf16"]),
        (halfstep.GradScaler("cpu", 1.0, schedule=halfstep.Static()), BF16, []),
        (torch.amp.GradScaler("cpu"), FP16, ["torch-scaler"]),
        (torch.amp.GradScaler("cpu"), BF16, ["scaler-with-bf16", "torch-scaler"]),
        (torch.amp.GradScaler("cpu", enabled=False), None, []),
    ],
)
def test_scaler_and_dtype(scaler: object, dtype: torch.dtype | None, wanted: list[str]) -> None:
    assert ids(doctor(scaler=scaler, dtype=dtype)) == wanted


def test_the_dtype_of_a_model_in_bfloat16_is_known() -> None:
    model = nn.Linear(4, 1).to(BF16)
    assert ids(doctor(model, scaler=halfstep.GradScaler("cpu"))) == ["scaler-with-bf16"]


# --- parameters in lower precision ----------------------------------------------------------------


def test_parameters_in_float16_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).half())
    (finding,) = doctor(model, sgd(model))
    assert (finding.id, finding.severity) == ("half-parameters", "bad")
    assert finding.names == ("1.weight", "1.bias")
    assert "SGD updates 2 parameters in float16 (1.weight, 1.bias)" in finding.text
    assert ids(doctor(model, sgd(model[0]))) == []


def test_parameters_in_bfloat16_are_a_notice() -> None:
    model = nn.Linear(4, 1).to(BF16)
    found = doctor(model, sgd(model))
    assert (ids(found), found.worst) == (["bf16-parameters"], "notice")


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_updates_below_the_named_share_are_lost_in_all_weights(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1).to(dtype)
    (finding,) = doctor(model, sgd(model))
    share = int(re.search(r"below 1/(\d+) of a weight", finding.text)[1])
    weights = torch.linspace(1, 2, 1000).to(dtype)[:-1]
    updates = (weights.double() / share).nextafter(torch.zeros((), dtype=torch.double))
    assert torch.equal((weights.double() + updates).to(dtype), weights)


@pytest.mark.parametrize(
    ("make", "is_lost"),
    [
        (lambda params: torch.optim.Adam(params), True),
        (lambda params: torch.optim.Adam(params, foreach=True), True),
        (lambda params: torch.optim.Adam(params, fused=True), False),
        (lambda params: torch.optim.Adam(params, eps=1e-4), False),
        (lambda params: torch.optim.Adagrad(params), True),
        (lambda params: torch.optim.RMSprop(params), True),
    ],
)
def test_eps_of_an_optimizer_is_judged_by_what_a_step_does(make, is_lost: bool) -> None:
    param = nn.Parameter(torch.ones(4, dtype=FP16))
    optimizer = make([param])
    assert ("eps-underflow" in ids(doctor(optimizer=optimizer))) == is_lost
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.isnan().any().item() == is_lost
    in_float32 = make([nn.Parameter(torch.ones(4))])
    assert ids(doctor(optimizer=in_float32)) == []


NORMS = [
    lambda eps: nn.LayerNorm(4, eps=eps),
    lambda eps: nn.GroupNorm(2, 4, eps=eps),
    lambda eps: nn.RMSNorm(4, eps=eps),
    lambda eps: nn.BatchNorm1d(4, eps=eps),
    lambda eps: nn.LayerNorm(4, eps=eps, elementwise_affine=False),
]


@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_eps_of_a_norm_is_judged_by_its_gradient(make, eps: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(eps)).half()
    found = doctor(model)
    assert ids(found) == (["eps-underflow"] if eps == 1e-12 else [])
    x = torch.zeros(3, 4, dtype=FP16, requires_grad=True)
    y = model[1](x)
    y.backward(
        torch.tensor([1.0, -2.0, 3.0, 1.0], dtype=FP16).expand(3, 4) * torch.ones(3, 1).half()
    )
    assert x.grad.isfinite().all().item() == (eps == 1e-5)
    if found:
        assert found[0].names == ("1",)
    assert ids(doctor(nn.Sequential(nn.Linear(4, 4), make(eps)))) == []


def test_the_cure_of_a_norm_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=1e-12)).half()
    (finding,) = doctor(model)
    exec(finding.code, {"halfstep": halfstep, "model": model})
    x = torch.zeros(3, 4, dtype=FP16, requires_grad=True)
    model(x).float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert list(doctor(model)) == []


def test_optimizers_in_a_container() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(BF16)
    container = Parts([sgd(model[0]), sgd(model[1])])
    found = doctor(model, container)
    assert [(each.id, each.names) for each in found] == [
        ("bf16-parameters", ("0.weight", "0.bias")),
        ("bf16-parameters", ("1.weight", "1.bias")),
    ]
    for optimizer in container.each():
        halfstep.master_weights(optimizer)
    assert ids(doctor(model, container)) == []
