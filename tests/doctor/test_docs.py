"""explained.toml has an entry for every id: its wrong program is found, its right one is not."""

import tomllib
from pathlib import Path

import pytest
import torch

import halfstep
from halfstep._tools.doctor import finding
from halfstep._tools.doctor.doctor import check_source
from halfstep._tools.doctor.finding import CATALOG

FILE = Path(finding.__file__).with_name("explained.toml")
FINDINGS = tomllib.loads(FILE.read_text(encoding="utf-8"))
EXAMPLES = [
    pytest.param(id, kind, entry[kind], id=f"{id}-{kind}")
    for id, entry in FINDINGS.items()
    for kind in list(entry)[1:]
]
PREAMBLE = """\
import torch
import torch.nn.functional as F
from torch import nn
import halfstep
from halfstep import GradScaler, autocast
"""


def test_every_id_has_its_entry_in_the_order_of_the_catalog() -> None:
    assert list(FINDINGS) == list(CATALOG)
    for id, entry in FINDINGS.items():
        assert entry.keys() <= {"text", "wrong", "right"}, id
        assert 10 <= len(entry["text"].split()) <= 90, id


def test_all_have_examples() -> None:
    ids = [example.values[0] for example in EXAMPLES]
    assert sorted(set(ids)) == sorted(set(CATALOG))
    assert all(ids.count(id) == 2 for id in ids)


def ids_found(block: str) -> list[str]:
    return [finding.id for finding in check_source(PREAMBLE + block)]


def names() -> dict[str, object]:
    """What the examples use without making it."""
    namespace: dict[str, object] = {}
    exec(PREAMBLE, namespace)
    model = torch.nn.Linear(4, 1)
    x, y = torch.ones(2, 4), torch.ones(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler("cpu")

    def loss_fn() -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(x), y)

    return namespace | {
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "batches": [(x, y), (x, y)],
        "x": x,
        "y": y,
        "device": "cpu",
        "loss_fn": loss_fn,
    }


@pytest.mark.parametrize(("id", "kind", "block"), EXAMPLES)
def test_an_example_has_what_it_is_for_and_nothing_else(id: str, kind: str, block: str) -> None:
    assert ids_found(block) == ([id] if kind == "wrong" else [])


@pytest.mark.parametrize(
    ("id", "block"),
    [
        pytest.param(id, block, id=id)
        for id, kind, block in (example.values for example in EXAMPLES)
        if kind == "right"
    ],
)
def test_what_is_right_runs(id: str, block: str) -> None:
    exec(block, names())
