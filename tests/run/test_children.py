"""Processes that a script starts: each records itself, and computes as without halfstep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
def train(steps):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(steps, model.weight.sum().item(), flush=True)
"""

# Each is run as `train.py`, which imports `work.py` (TRAIN).
PROCESSES = """
import multiprocessing, sys
from work import train

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for steps in 3, 4:
        process = context.Process(target=train, args=(steps,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""

TWO_RANKS = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def work(rank):
    dist.init_process_group("gloo", f"file://{os.path.abspath('store')}", rank=rank, world_size=2)
    torch.manual_seed(0)
"""
LEAVE = """
    dist.barrier()  # else a rank may abort when the other one is gone
    dist.destroy_process_group()

if __name__ == "__main__":
"""
RANKS = f"""{TWO_RANKS}
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4) + rank).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    if rank == 0:
        print(model.module.weight.sum().item(), flush=True)
{LEAVE}"""
SPAWNED = RANKS + "    torch.multiprocessing.spawn(work, nprocs=2)\n"
LAUNCHED = (
    RANKS
    + """\
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        import subprocess
        launcher = "-m", "torch.distributed.run", "--nproc-per-node", "2"
        subprocess.run([sys.executable, *launcher, __file__], check=True)
"""
)

AVERAGED = f"""{TWO_RANKS}
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), torch.inf if step == 1 > rank else 1.0)).mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    print(f"{{model.weight.sum().item():.6f}}\\n", end="", flush=True)
{LEAVE}
    torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
"""

LIGHTNING = """
import sys, torch, lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
"""

NOTEBOOK = """
import torch

def cell():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()

if __name__ == "__main__":
    from accelerate import notebook_launcher
    notebook_launcher(cell, num_processes=2)
"""

LOADER = """
import sys, torch

if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1]
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(TRAIN)
    return tmp_path


def write(folder: Path, source: str) -> str:
    (folder / "train.py").write_text(source)
    return "train.py"


def steps_of(folder: Path) -> dict[str, int]:
    """Return the number of recorded steps by file; each record has an end."""
    found = {}
    for file in sorted((folder / "runs").rglob("rank*.jsonl")):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        assert [each["event"] for each in events][-1] == "end"
        name = "/".join(file.relative_to(folder / "runs").parts[1:])
        found[name] = sum(each["event"] == "step" for each in events)
    return found


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes(method, halfstep_run, python, folder):
    """They have no rank: a folder each, in the order of their first steps."""
    script = write(folder, PROCESSES)
    done, alone = halfstep_run(script, method), python(script, method)
    assert (done.code, done.out) == (alone.code, alone.out) == (0, alone.out)
    assert steps_of(folder) == {"process-1/rank0.jsonl": 3, "process-2/rank0.jsonl": 4}
    assert "halfstep: 2 processes of the program recorded: halfstep report runs/train-" in done.err


def test_forks_of_a_script_that_trains_itself(halfstep_run, folder):
    script = write(folder, "import work\nwork.train(2)\n" + PROCESSES)
    done = halfstep_run(script, "fork")
    assert [line.split()[0] for line in done.out.splitlines()] == ["2", "3", "4"]
    files = {"rank0.jsonl": 2, "process-1/rank0.jsonl": 3, "process-2/rank0.jsonl": 4}
    assert steps_of(folder) == files
    assert "halfstep: 2 steps recorded, 0 skipped, and 2 processes that the program" in done.err


@pytest.mark.parametrize("source", [SPAWNED, LAUNCHED], ids=["spawn", "launcher"])
def test_ranks(source, halfstep_run, python, folder):
    alone = python(write(folder, SPAWNED))  # a launcher starts the same ranks, but takes longer
    (folder / "store").unlink(missing_ok=True)
    done = halfstep_run(write(folder, source))
    assert (done.code, done.out) == (alone.code, alone.out) == (0, alone.out)
    assert steps_of(folder) == {"rank0.jsonl": 5, "rank1.jsonl": 5}


@pytest.mark.parametrize("launcher", [("-m", "torch.distributed.run"), ("torchrun",)])
def test_a_launcher_is_a_script_too(launcher, halfstep_run, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    script = write(folder, LAUNCHED)
    done = halfstep_run("-o", "runs/x", *launcher, "--nproc-per-node", 2, script)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 5, "rank1.jsonl": 5}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_lightning(strategy, halfstep_run, folder):
    pytest.importorskip("lightning")
    done = halfstep_run("--amp", "bf16", write(folder, LIGHTNING), strategy)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 4, "rank1.jsonl": 4}


def test_a_launcher_of_notebooks(halfstep_run, folder):
    pytest.importorskip("accelerate")
    done = halfstep_run(write(folder, NOTEBOOK))
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 4, "rank1.jsonl": 4}


RAY = """
import ray, work
ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
ray.get([ray.remote(work.train).remote(steps) for steps in (30, 40)])
"""


def test_workers_of_ray(halfstep_run, folder):
    """They are killed at the end, and lose their last steps."""
    pytest.importorskip("ray")
    done = halfstep_run(write(folder, RAY))
    assert done.code == 0, done.err
    files = sorted((folder / "runs").rglob("process-*/rank0.jsonl"))
    assert [file.read_text().count('"event":"step"') > 0 for file in files] == [True, True]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_data_loader_leave_nothing(method, halfstep_run, folder):
    done = halfstep_run(write(folder, LOADER), method)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 4}
    assert done.err.startswith("halfstep: 4 steps recorded, 0 skipped; nothing ran in a lower")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_children(method, halfstep_run, folder):
    source = PROCESSES + "    train(2)\n"
    done = halfstep_run("--no-children", write(folder, source), method)
    assert done.code == 0, done.err
    assert steps_of(folder) == {"rank0.jsonl": 2}


def test_options_hold_in_a_process(halfstep_run, folder):
    source = PROCESSES.replace("import train", "import dtype as train")
    (folder / "work.py").write_text(
        "def dtype(steps):\n"
        "    import torch\n"
        "    with torch.autocast('cpu', torch.bfloat16):\n"
        "        print(torch.ones(2, 2, dtype=torch.bfloat16).softmax(0).dtype, flush=True)\n"
    )
    rule = ("--policy", "torch; softmax:fp32")
    done = halfstep_run(*rule, write(folder, source), "spawn")
    assert done.out == "torch.float32\n" * 2
    assert "no optimizer step was seen" in done.err


def test_a_guard_of_ranks_that_average_by_hand(halfstep_run, folder):
    done = halfstep_run("--guard=1.0", "--guard-ranks=alone", write(folder, AVERAGED))
    assert done.code == 0, done.err
    one, other = done.out.split()
    assert one == other != "nan"


def test_a_diagnosis_in_a_process(halfstep_run, folder):
    (folder / "work.py").write_text(TRAIN.replace(".mean()", ".mean().sub(9).log()"))
    done = halfstep_run("--diagnose", write(folder, PROCESSES), "spawn")
    assert done.code == 0, done.err
    assert "log" in done.err
    assert "step 1 went bad" in done.err


def hooked(folder: Path, *more: str) -> dict[str, str]:
    """Return the environment of a process of a run, with folders that are searched for modules."""
    from halfstep._tools.run.session import HOOK, VARIABLE

    values = {"folder": str(folder / "runs/x"), "policy": "torch", "every": 50}
    values |= {"amp": None, "is_quiet": False, "is_diagnosing": False}
    paths = os.pathsep.join([HOOK, *more, os.environ.get("PYTHONPATH", "")])
    return os.environ | {VARIABLE: json.dumps(values), "PYTHONPATH": paths}


def run_python(source: str, environ: dict[str, str], *options: str) -> tuple[int, str, str]:
    command = [sys.executable, *options, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    return done.returncode, done.stdout, done.stderr


def test_the_sitecustomize_that_is_hidden_runs(folder):
    (folder / "sitecustomize.py").write_text("print('hidden', __file__ in __file__)\n")
    source = "import sys; print(sys.modules['sitecustomize'].__file__, 'torch' in sys.modules)"
    code, out, err = run_python(source, hooked(folder, str(folder)))
    assert (code, err) == (0, "")
    assert out == f"hidden True\n{folder / 'sitecustomize.py'} False\n"


def test_a_process_without_pytorch_loads_nothing_of_it(folder):
    source = "import sys; print(*(m for m in sys.modules if 'halfstep' in m or 'torch' in m))"
    assert run_python(source, hooked(folder)) == (0, "\n", "")


def test_an_interpreter_without_halfstep_goes_on(folder):
    """A `torch` of its own stands for another environment."""
    (folder / "torch.py").write_text("print('another torch')\n")
    (folder / "halfstep.py").write_text("raise ImportError('not here')\n")
    source = "import torch; print('end')"
    assert run_python(source, hooked(folder, str(folder))) == (0, "another torch\nend\n", "")


@pytest.mark.parametrize("first", ["torch", "halfstep"])
def test_which_is_imported_first_does_not_matter(first, folder):
    source = f"import {first}\nfrom halfstep import GradScaler\nimport work\nwork.train(3)"
    code, out, err = run_python(source, hooked(folder, str(folder)))
    assert (code, out.split()[0], err) == (0, "3", "")
    assert steps_of(folder) == {"process-1/rank0.jsonl": 3}


def test_a_process_that_cannot_record_trains(folder):
    (folder / "runs").write_text("a file")
    code, out, err = run_python("import work; work.train(3)", hooked(folder, str(folder)))
    assert (code, out.split()[0]) == (0, "3")
    assert "can no longer write" in err
