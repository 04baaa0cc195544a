"""docs/architecture.md says what is true: its rooms, its walks, and what a step may cost."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from tests import forked

from halfstep import GradScaler, Policy, autocast, diagnose

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def training(fused: bool) -> Callable[..., None]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = GradScaler()

    def iterate(max_norm: float | None = None) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()

    for _ in range(5):  # the first steps are measured
        iterate()
    return iterate


def plain_step() -> None:
    training(fused=False)()


def fused_step_with_clipping() -> None:
    training(fused=True)(1.0)


def op_under_a_rule() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    policy = Policy.parse("standard; linear@1:fp32")
    with autocast("cpu", torch.bfloat16, policy=policy, module=model):
        model(torch.ones(2, 4))


def diagnosed_nan() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), GradScaler()
    with diagnose(scaler, model=model, tell=lambda found, step: str(found)):
        for batch in (torch.ones(2, 4), torch.full((2, 4), float("nan"))):
            optimizer.zero_grad()
            scaler.scale(model(batch).mean()).backward()
            scaler.step(optimizer)
            scaler.update()


WALKS = {
    "A loss through a plain step": plain_step,
    "A step with clipping and a fused optimizer": fused_step_with_clipping,
    "An op under a rule for a module": op_under_a_rule,
    "A NaN from the loop to the printed diagnosis": diagnosed_nan,
}


def calls_in(walk: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """Return file and function of every call of halfstep, in order."""
    found = []

    def see(frame: FrameType, event: str, argument: object) -> None:
        _, inside, file = frame.f_code.co_filename.rpartition(f"{os.sep}halfstep{os.sep}")
        if event == "call" and inside:
            found.append((file.replace(os.sep, "/"), frame.f_code.co_qualname))

    sys.setprofile(see)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return iter(found)


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_what_runs(title: str) -> None:
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    lines = re.findall(r"^\d+\. `(\S+)` `(\S+)`", section, flags=re.MULTILINE)
    assert len(lines) == len(re.findall(r"^\d+\. ", section, flags=re.MULTILINE)) > 5
    calls = calls_in(WALKS[title])
    for line in lines:
        assert line in calls, f"{line} does not run, or not in this place"


def test_every_walk_is_tried() -> None:
    assert set(re.findall(r"^### (.*)$", PAGE, flags=re.MULTILINE)) == WALKS.keys()


def test_every_room_is_on_the_map() -> None:
    source = ROOT / "src" / "halfstep"
    files = [*source.glob("_*/__init__.py"), *source.glob("_tools/*/__init__.py")]
    rooms = {path.parent.relative_to(source).as_posix() for path in files} - {"_tools"}
    table = PAGE.split("| room |")[1].split("\n\n")[0]
    first = "\n".join(re.findall(r"^\| .*? \|", table, re.MULTILINE))
    assert set(re.findall(r"`(_[\w/]+)`", first)) == rooms


def test_files_that_the_page_names_are_there() -> None:
    paths = re.findall(r"`((?:tests|src|examples|benchmarks)/[\w/.]+)`", PAGE)
    paths += [f"src/halfstep/{path}" for path in re.findall(r"`(_[\w/]+\.(?:py|toml))`", PAGE)]
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_other_rooms_leave_the_inside_of_a_scaler_alone() -> None:
    """What they need beyond its public calls is ``_scaler/access.py``."""
    inside = r"\._engine\b|halfstep\._scaler\.(engine|iteration|step|ranks)\b"
    rooms = [p for p in (ROOT / "src" / "halfstep").rglob("*.py") if "_scaler" not in p.parts]
    assert len(rooms) > 100
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in rooms
        for line in path.read_text(encoding="utf-8").split("\n")
        if re.search(inside, line)
    ]
    assert not found


def test_a_step_costs_little_more_than_pytorchs() -> None:
    """In a process of its own: what other tests have entered adds hooks to optimizers."""
    done = forked.python(ROOT / "benchmarks" / "step_calls.py", cwd=ROOT)
    assert done.code == 0, done.err
    table = done.out
    rows = {
        line.split("|")[1].strip(): re.findall(r"\d+", line) for line in table.split("\n")[2:-1]
    }
    ways = "", " + clip", " + unscale_ + torch's clip"
    kinds = {kind + way for kind in ("plain", "fused") for way in ways}
    assert rows.keys() == kinds | {"plain, two optimizers with a loss each"}
    for row in rows.values():
        *_, ops, ops_of_torch = map(int, row)
        assert ops <= ops_of_torch, table
