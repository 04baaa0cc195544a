"""The public surface: names, docstrings, wrong arguments. What an import loads: test_imports.py."""

import traceback
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tests import forked
from torch import nn

import halfstep
from halfstep import CallOrderError, GradScaler, Policy

NAMES = """
CallOrderError Diagnosis Dynamic GradScaler Guard Outcome Policy Reason Rule Static
__version__ autocast custom_bwd custom_fwd diagnose float32_weights guard
is_autocast_available keep lost_updates master_weights preset record self_check trace tune
use_policy
"""
PUBLIC = set(NAMES.split())


def test_the_public_names_are_these() -> None:
    assert set(halfstep.__all__) == PUBLIC
    assert all(hasattr(halfstep, name) for name in PUBLIC)


def test_the_version_stands_in_one_place() -> None:
    assert version("halfstep") == halfstep.__version__


@pytest.mark.parametrize(
    "name",
    sorted(
        PUBLIC - {"__version__", "CallOrderError", "Reason", "custom_bwd", "is_autocast_available"}
    ),
)
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(halfstep, name).__doc__ or "")


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


ANYTHING = [None, 3, 2.5, "text", [1], {"a": 1}, torch.ones(2), nn.Linear(1, 1), sgd(), len, int]
LINEAR = nn.Linear(1, 1)
CALLS = {
    name: getattr(halfstep, name)
    for name in PUBLIC - {"__version__", "is_autocast_available", "preset"}
    if name[0].islower() or name in ("GradScaler", "Policy", "Dynamic", "Static")
} | {
    "Policy.parse": Policy.parse,
    "dtype": lambda each: halfstep.autocast("cpu", each),
    "policy": lambda each: halfstep.autocast("cpu", policy=each),
    "max_norm": lambda each: halfstep.guard(sgd(), each),
    "module": lambda each: GradScaler(module=each),
    "store": lambda each: halfstep.master_weights(sgd(), each),
    "loss_fn": lambda each: halfstep.self_check(LINEAR, torch.ones(1, 1), each),
    "custom_fwd.device_type": lambda each: halfstep.custom_fwd(device_type=each),
    **{
        name: lambda each, name=name: getattr(GradScaler("cpu"), name)(each)
        for name in ("scale", "unscale_", "step", "load_state_dict", "retry")
    },
}


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.filterwarnings("ignore::halfstep.errors.HalfstepWarning")
def test_an_argument_of_a_wrong_type_is_an_error_of_ours(name: str) -> None:
    others: list[Exception] = []
    for each in ANYTHING:
        try:
            CALLS[name](each)
        except (TypeError, ValueError, CallOrderError) as error:
            at = traceback.extract_tb(error.__traceback__)[-1].filename
            is_ours = "/halfstep/" in at or "missing" in str(error) or "takes" in str(error)
            others += [] if is_ours else [error]
    assert others == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: halfstep.autocast("gpu"), "; did you mean 'cuda'?"),
        (lambda: GradScaler("rocm"), "no such device; did you mean 'cuda'?"),
        (lambda: GradScaler(sgd()), "GradScaler(device=SGD): the device comes first, such as 'c"),
        (lambda: Policy.parse("standard; mul[gpu]:fp32"), "did you mean 'cuda'?"),
        (lambda: halfstep.guard(sgd(), "1"), "max_norm is '1' (str): pass a number such as 1.0"),
        (lambda: halfstep.Dynamic(backoff_factor="x"), "(str): pass a number such as 0.5"),
        (lambda: GradScaler("cpu", "1"), "init_scale is '1' (str): pass a number such as 65536.0"),
        (lambda: GradScaler(module=torch.ones(1)), "torch.nn.Module that is trained, got Tensor"),
        (lambda: Policy("standard"), "write Policy.parse('standard')"),
        (lambda: Policy.parse(None), "got None (NoneType); pass a text"),
        (lambda: Policy.load(3), "Policy.load(): got 3 (int); pass the path of a file"),
        (lambda: Policy([]).save(None), "Policy.save(): got None (NoneType); pass the path"),
        (lambda: halfstep.preset(["fp32"]), "preset(): got ['fp32'] (list); pass a name"),
        (lambda: halfstep.preset("fp32") | 3, "made of Rule values, got 3 (int)"),
    ],
)
def test_an_error_says_what_to_pass(call, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert message in str(caught.value)


def test_what_a_person_prints_says_what_it_is() -> None:
    assert repr(halfstep.guard(sgd(), 1.0)) == "Guard(SGD, max_norm=1.0)"
    assert repr(halfstep.lost_updates(sgd())) == "lost_updates(SGD)"


@pytest.mark.slow
def test_it_can_be_imported_again() -> None:
    """After ``reload`` and after ``del sys.modules[...]``; what is left of the first goes on."""
    done = forked.python(Path(__file__).parent / "corpus" / "again.py", cwd=Path.cwd())
    assert done.out.split() == ["1.7321"] * 4, done.err
