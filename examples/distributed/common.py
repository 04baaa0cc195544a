"""What the four examples share: options, text, the printed line, checkpoints that outlive a kill.

Rules to remember:
- All ranks draw the same batches and each takes its rows. So the place in the data is one number,
  the same on all ranks, and a run may go on with another number of ranks.
- A checkpoint is written under another name and gets its own when it is whole.
- Beside model and optimizer it holds the scaler, the place in the data and the step.
"""

import argparse
import fcntl
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state

from halfstep import GradScaler

sys.path.append(str(Path(__file__).parents[1]))
from train_text import GPT, Corpus, GPTConfig

BATCH, CONTEXT = 16, 32  # windows of a batch, of all ranks together; characters of a window
TORCHRUN = os.getppid()


def start(name: str) -> tuple[argparse.Namespace, torch.device]:
    """Read the options and join the other ranks; return the options and the device of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=_count, default=60)
    parser.add_argument("--checkpoint-every", type=_count, default=10, help="in steps")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints", name))
    options = parser.parse_args()

    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same first weights on all ranks
    return options, device


def leave() -> None:
    """Leave the other ranks, when ``main`` has ended.

    What of the model and its process groups outlives ``main``, in cycles, goes first: with gloo,
    PyTorch may hang or abort at the end of a process that still has some.
    """
    gc.collect()
    dist.destroy_process_group()


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count: pass 1 or more")
    return number


class Text:
    """The text of train_text.py in windows, in a new random order in each epoch."""

    def __init__(self) -> None:
        corpus = Corpus()
        length = CONTEXT + 1
        self.vocab = corpus.vocab
        self.windows = corpus.train[: len(corpus.train) // length * length].view(-1, length)
        self.batches_drawn = 0

    def draw(self, device: torch.device, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Return this part of the next batch: inputs and targets, [BATCH / parts, CONTEXT]."""
        epoch, number = divmod(self.batches_drawn, len(self.windows) // BATCH)
        order = torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(epoch))
        batch = self.windows[order[number * BATCH : (number + 1) * BATCH]]
        self.batches_drawn += 1
        rows = batch.chunk(parts)[part].to(device)
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data."""
        return {"batches_drawn": self.batches_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a place in the data."""
        self.batches_drawn = state["batches_drawn"]


def new_model(text: Text) -> GPT:
    """Return the GPT of train_text.py, with 55 thousand parameters."""
    return GPT(GPTConfig(text.vocab, CONTEXT, layers=4, heads=2, width=32))


class ModelAndOptimizer:
    """Both as `torch.distributed.checkpoint` saves them: by name, whatever wraps or shards them."""

    # Flat: stages of a pipeline have different parameters, and a list of them would be saved once.
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by the names of the parameters."""
        states = dcp_state.get_state_dict(self.model, self.optimizer, options=self.options)
        return dict(zip(("model", "optimizer"), states, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them into model and optimizer."""
        dcp_state.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


class Checkpoints:
    """The last two checkpoints of a run, in a folder that all ranks see.

    `step-00000010` is whole: it got this name when all ranks had written. What a kill leaves behind
    is called `unfinished`.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        text: Text,
    ) -> None:
        self.folder, self.every, self.scaler = options.folder, options.checkpoint_every, scaler
        both = ModelAndOptimizer(model, optimizer)
        self.parts: dict[str, Any] = {"training": both, "scaler": scaler, "text": text}
        self.is_first = dist.get_rank() == 0
        if self.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._wait_for_last_run()

    def _wait_for_last_run(self) -> None:
        """Lock the folder: ranks whose torchrun was killed may write for a moment longer.

        The lock is free when the process that holds it is gone, however that ended.
        """
        self.lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for the run that still uses {self.folder}", flush=True)
            fcntl.flock(self.lock, fcntl.LOCK_EX)

    def load(self) -> int:
        """Load the last whole checkpoint and return its step, 0 if there is none."""
        # One rank looks and tells the others: on a network file system they may see another state.
        last = [self._whole()[-1:] if self.is_first else None]
        dist.broadcast_object_list(last)
        state = {"step": 0, **self.parts}
        for checkpoint in last[0]:
            dcp.load(state, checkpoint_id=checkpoint)
            if self.is_first:
                print(f"going on from {checkpoint}", flush=True)
        return state["step"]

    def save_after(self, step: int) -> None:
        """Save if it is time."""
        # An optimizer that has not taken a step yet has no state that could be loaded.
        if step % self.every or not self.scaler.counts().taken:
            return
        unfinished = self.folder / "unfinished"
        if self.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        dcp.save({"step": step, **self.parts}, checkpoint_id=unfinished)  # waits for all ranks
        if self.is_first:
            unfinished.rename(self.folder / f"step-{step:08}")
            for old in self._whole()[:-2]:
                shutil.rmtree(old)

    def _whole(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def count_steps(first: int, last: int) -> Iterator[int]:
    """Count from first to last; end if torchrun is gone, as nobody else would end this process."""
    for step in range(first, last + 1):
        if os.getppid() != TORCHRUN:
            raise SystemExit("torchrun was killed")
        yield step


def report(step: int, loss: Tensor, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Print one line on rank 0; `loss` is the share of this rank, and the ranks' sum is printed."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        outcome = scaler.outcome(optimizer)
        skipped = f"  skipped: {outcome.reason}" if outcome.skipped else ""
        line = f"step {step:4}  loss {total.item():.6f}  scale {outcome.scale:.0f}{skipped}"
        print(line, flush=True)
