"""Every script in examples/distributed/ trains as one process would, and outlives kills: what it
prints after a restart is what it would have printed without. One of them runs under torchrun.
"""

import contextlib
import functools
import importlib.util
import io
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tests.ranks.pool import Pool, RankFailedError
from torch import nn

import halfstep

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples" / "distributed"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")
LINE = r"^step +\d+  loss \d+\.\d{6}  scale \d+(?:  skipped: .+)?$"


@functools.cache
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("common", FOLDER / "common.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- in ranks that have imported PyTorch ----------------------------------------------------------


def run_in_ranks(names: list[str], folder: Path, *options: object, killed: int = 0) -> str:
    """Run examples one after the other in two new processes; return what they print.

    One of them is killed when it writes its part of checkpoint number ``killed``.
    """
    with contextlib.closing(Pool()) as pool:
        arguments = names, folder, list(map(str, options)), killed
        printed, _ = pool.run(run_on_a_rank, *arguments, timeout=250, group_timeout=200)
    return printed


def run_on_a_rank(
    rank: int, names: list[str], folder: Path, options: list[str], killed: int
) -> str:
    write, written = dcp.FileSystemWriter.write_data, []

    def write_or_die(*args: Any) -> Any:
        written.append(args)
        if rank == 1 and len(written) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())  # torchrun tells it
    sys.path.insert(0, str(FOLDER))
    printed = io.StringIO()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"__main__|common|halfstep")
    with (
        contextlib.redirect_stdout(printed),
        patch.object(dcp.FileSystemWriter, "write_data", write_or_die),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
    ):
        for name in names:
            print("===", name)
            sys.argv = [name, *options, "--folder", str(folder / name)]
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


# --- under torchrun -------------------------------------------------------------------------------


class Run:
    """A script under torchrun, with two ranks."""

    def __init__(self, log: Path, script: Path, *arguments: object) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self.log = log
        with log.open("w") as file:
            self.torchrun = subprocess.Popen(
                [sys.executable, *torchrun, *map(str, [script, *arguments])],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def printed(self) -> str:
        return self.log.read_text()

    @property
    def lines(self) -> list[str]:
        return lines_of(self.printed)

    def wait_until(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not seen():
            assert self.torchrun.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.001)

    def ranks(self) -> list[int]:
        """The processes that torchrun has started."""
        return [pid for pid, (_, parent) in processes().items() if parent == self.torchrun.pid]


def processes() -> dict[int, tuple[str, int]]:
    """State and parent of every process, as Linux lists them."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        found[int(stat.parent.name)] = (state, int(parent))
    return found


def lines_of(printed: str) -> list[str]:
    return re.findall(LINE, printed, re.MULTILINE)


def resumed_at(printed: str) -> int:
    return int(re.search(r"^going on from .*/step-(\d+)$", printed, re.MULTILINE)[1])


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[3]) for line in lines]


@functools.cache
def one_process() -> list[float]:
    """The first losses of what the examples compute, without ranks."""
    torch.manual_seed(0)
    text = common().Text()
    model = common().new_model(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008)
    scaler = halfstep.GradScaler()
    found = []
    for _ in range(8):
        inputs, targets = text.draw(torch.device("cpu"))
        optimizer.zero_grad()
        with halfstep.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        found.append(loss.item())
    return found


def check_training(lines: list[str], steps: int) -> None:
    assert [int(line.split()[1]) for line in lines] == list(range(1, steps + 1))
    assert losses(lines)[:8] == pytest.approx(one_process(), rel=1e-3)
    assert losses(lines)[-1] < 0.7 * losses(lines)[0]


OPTIONS = ("--steps", 20, "--checkpoint-every", 9)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the examples, run once and not interrupted, and what they print."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_in_ranks(EXAMPLES, folder, *OPTIONS)


def test_what_is_printed_after_a_restart(whole: tuple[Path, str]) -> None:
    folder, printed = whole
    names = [name for name in EXAMPLES if name != "ddp"]
    again = run_in_ranks(names, folder, *OPTIONS)
    for name in EXAMPLES:
        assert "skipped: overflow" in of_one(name, printed)
        check_training(lines_of(of_one(name, printed)), steps=20)
    for name in names:
        first, second = (lines_of(of_one(name, each)) for each in (printed, again))
        assert resumed_at(of_one(name, again)) == 18
        assert second == first[18:]


def of_one(name: str, printed: str) -> str:
    return re.search(rf"^=== {name}$([^=]*)", printed, re.MULTILINE)[1]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
def test_what_is_printed_after_kills(whole: tuple[Path, str], tmp_path: Path) -> None:
    options = "--steps", 20, "--checkpoint-every", 5
    expected, folder = lines_of(of_one("ddp", whole[1])), tmp_path / "ddp"
    with pytest.raises(RankFailedError, match="rank 1: the process died with exit code -9"):
        run_in_ranks(["ddp"], tmp_path, *options, killed=2)
    assert saved(folder) == ["step-00000005"]
    assert (folder / "unfinished").exists()  # it was killed in the middle of saving

    torchrun_killed = Run(tmp_path / "log.txt", FOLDER / "ddp.py", *options, "--folder", folder)
    torchrun_killed.wait_until(lambda: len(torchrun_killed.lines) > 2)
    orphans = torchrun_killed.ranks()
    torchrun_killed.torchrun.kill()
    torchrun_killed.torchrun.wait()
    assert resumed_at(torchrun_killed.printed) == 5
    assert torchrun_killed.lines == expected[5:][: len(torchrun_killed.lines)]

    last = run_in_ranks(["ddp"], tmp_path, *options)
    assert [processes().get(pid, "Z")[0] for pid in orphans] == ["Z", "Z"]  # gone, or unburied
    assert 5 <= resumed_at(last) < 20
    assert lines_of(last) == expected[resumed_at(last) :]


# --- what they share, in this process -------------------------------------------------------------


class Training:
    """A small model that is trained and saved after every second step."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = halfstep.GradScaler()
        options = Namespace(folder=folder, checkpoint_every=2)
        self.checkpoints = common().Checkpoints(
            options, self.model, self.optimizer, self.scaler, common().Text()
        )

    def step(self, number: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(1, 2)).sum() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.checkpoints.save_after(number)

    def states(self) -> list[Any]:
        return [self.model.state_dict(), self.optimizer.state_dict()]

    def end(self) -> None:
        os.close(self.checkpoints.lock)


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[[], Training]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda: Training(tmp_path)
    dist.destroy_process_group()


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_kill_while_saving_leaves_the_last_checkpoint(new, tmp_path, monkeypatch):
    def save_half(state: object, checkpoint_id: Path) -> None:
        checkpoint_id.mkdir()
        (checkpoint_id / ".metadata").write_text("half of it")
        raise KeyboardInterrupt

    first = new()
    for step in (1, 2, 3):
        first.step(step)
    with monkeypatch.context() as context:
        context.setattr(dcp, "save", save_half)
        with pytest.raises(KeyboardInterrupt):
            first.step(4)
    first.end()
    assert saved(tmp_path) == ["step-00000002"]

    second = new()
    assert second.checkpoints.load() == 2
    for step in (3, 4):
        second.step(step)
    second.end()
    torch.testing.assert_close(second.states(), first.states(), rtol=0, atol=0)
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert saved(tmp_path) == ["step-00000002", "step-00000004"]


def test_the_last_two_are_kept_and_none_before_the_first_step(new, tmp_path):
    training = new()
    assert training.checkpoints.load() == 0
    for step in (1, 2):
        training.step(step, factor=math.inf)
    assert saved(tmp_path) == []  # AdamW has no state yet, and none could be loaded
    for step in range(3, 9):
        training.step(step)
    assert saved(tmp_path) == ["step-00000006", "step-00000008"]
    training.end()


def test_a_run_waits_for_the_one_before(new, capsys):
    first, second = new(), []
    thread = threading.Thread(target=lambda: second.append(new()))
    thread.start()
    while "waiting for the run that still uses" not in capsys.readouterr().out:
        time.sleep(0.001)
    assert not second
    first.end()
    thread.join()
    second[0].end()


def test_ranks_draw_the_rows_of_one_batch() -> None:
    cpu, (whole, *parts) = torch.device("cpu"), (common().Text() for _ in range(5))
    length = len(whole.windows) // common().BATCH
    for text in (whole, *parts):
        text.load_state_dict({"batches_drawn": length - 1})
    drawn = []
    for _ in range(2):  # the last batch of the first epoch and the first of the second
        rows = [text.draw(cpu, part, 4) for part, text in enumerate(parts)]
        inputs, targets = whole.draw(cpu)
        assert torch.equal(torch.cat([each for each, _ in rows]), inputs)
        assert torch.equal(torch.cat([each for _, each in rows]), targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        drawn.append(inputs)
    assert drawn[0].shape == drawn[1].shape == (common().BATCH, common().CONTEXT)
    assert not torch.equal(drawn[1], common().Text().draw(cpu)[0])  # another order
    assert whole.state_dict() == {"batches_drawn": length + 1}


# --- and what holds for all of them ---------------------------------------------------------------


def test_each_example_is_listed() -> None:
    readme = (FOLDER.parent / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[distributed/(\w+)\.py\]", readme, re.MULTILINE)) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_reads_as_promised(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert f"\nRun: torchrun --nproc-per-node 2 examples/distributed/{name}.py\n" in source
    assert "\nRules to remember:\n- " in source
    assert "torch.amp" not in source
    assert "torch.autocast" not in source
    assert len(source.splitlines()) <= 105
