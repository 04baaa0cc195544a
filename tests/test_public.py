"""The public surface: names and docstrings. What an import loads: test_imports.py."""

from importlib.metadata import version
from pathlib import Path

import pytest
from tests import forked

import halfstep

PUBLIC = {
    "CallOrderError",
    "Diagnosis",
    "Dynamic",
    "GradScaler",
    "Guard",
    "Outcome",
    "Policy",
    "Reason",
    "Rule",
    "Static",
    "__version__",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "doctor",
    "float32_weights",
    "guard",
    "is_autocast_available",
    "keep",
    "lost_updates",
    "master_weights",
    "preset",
    "record",
    "self_check",
    "trace",
    "tune",
    "use_policy",
}


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


AGAIN = """
import importlib, sys
import halfstep, torch

def take_step():
    import halfstep
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), halfstep.GradScaler("cpu", 8.0)
    with halfstep.autocast("cpu", torch.float16):
        loss = model(torch.ones(1, 2)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return lambda: scaler.outcome(optimizer).norm

norms = [take_step()]
assert importlib.reload(halfstep) is halfstep
norms.append(take_step())
for name in [name for name in sys.modules if name.partition(".")[0] == "halfstep"]:
    del sys.modules[name]
norms.append(take_step())
importlib.reload(sys.modules["halfstep._gradients.norms"])
norms.append(take_step())
print(*(round(norm(), 4) for norm in norms))
"""


@pytest.mark.slow
def test_it_can_be_imported_again() -> None:
    """After ``reload`` and after ``del sys.modules[...]``; what is left of the first goes on."""
    done = forked.python("-c", AGAIN, cwd=Path.cwd())
    assert done.out.split() == ["1.7321"] * 4, done.err
