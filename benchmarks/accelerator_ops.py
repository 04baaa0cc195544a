"""What halfstep dispatches and waits for on an accelerator, beside torch.amp.

Counted on the simulated device of tests/simulated, which lacks what CUDA lacks: no clock and no
GPU, the same figures in every run. On a GPU each op is a kernel launch of some microseconds of the
host, and each wait stops it. The optimizer's own ops are included on both sides.

    python benchmarks/accelerator_ops.py [--most 4]

With ``--most`` it fails if a step dispatches more ops than that beyond torch.amp's, or waits more
often.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.simulated import device as sim
from tests.simulated.profiles import PROFILES

import halfstep
from halfstep._pytorch.devices import FACTS

NUM_PARAMETERS = 12
WARM_UP = 12
"""Iterations before the one that is counted: state is made, and early clipping looked for."""
COUNTED = "/halfstep/", "/torch/amp/", "/torch/nn/utils/"


@dataclass
class Count:
    """Ops dispatched, without views, which launch nothing; waits and calls of the host."""

    ops: int = 0
    waits: int = 0
    calls: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add what a block does."""
        ops, waits = num_ops(), sim.waits.total()
        sys.setprofile(self._see)
        yield
        sys.setprofile(None)
        self.ops += num_ops() - ops
        self.waits += sim.waits.total() - waits

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in COUNTED):
            self.calls += 1


def num_ops() -> int:
    """Return the number of ops so far."""
    return sum(number for name, number in sim.ops.items() if not is_view(name))


@cache
def is_view(name: str) -> bool:
    """Return whether an op returns a view of an argument that it does not write to."""
    op = getattr(torch.ops.aten, name, None)
    overloads = () if op is None else (getattr(op, each) for each in op.overloads())
    aliases = [result.alias_info for each in overloads for result in each._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


Parameters = list[torch.nn.Parameter]


def parameters(number: int = NUM_PARAMETERS, dtype: torch.dtype = torch.float32) -> Parameters:
    """Return parameters of 8 x 8 on the device."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(8, 8).to(dtype).to("sim")) for _ in range(number)]


def loss_of(params: Parameters) -> Tensor:
    total: Tensor = sum((param * param).sum() for param in params)  # type: ignore[assignment]
    return total


def counted(iterate: Callable[[Count], None]) -> Count:
    """Return what the last of some iterations counted."""
    for _ in range(WARM_UP):
        count = Count()
        iterate(count)
    return count


def step(scaler: Any, max_norm: float | None, *, fused: bool, by_torch: bool = False) -> Count:
    """Count ``scale``, ``step`` and ``update``, with clipping if there is a ``max_norm``.

    ``by_torch``: whether halfstep's scaler leaves it to PyTorch too, after ``unscale_``.
    """
    params = parameters()
    optimizer = torch.optim.AdamW(params, fused=fused or None)

    def iterate(count: Count) -> None:
        optimizer.zero_grad()
        loss = loss_of(params)
        with count.running():
            scaled = scaler.scale(loss)
        scaled.backward()
        with count.running():
            if max_norm is None:
                scaler.step(optimizer)
            elif isinstance(scaler, halfstep.GradScaler) and not by_torch:
                scaler.step(optimizer, max_norm=max_norm)
            else:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, max_norm)
                scaler.step(optimizer)
            scaler.update()

    return counted(iterate)


def unscaled(
    prepare: Callable[[torch.optim.Optimizer], object],
    dtype: torch.dtype = torch.float32,
    number: int = NUM_PARAMETERS,
    max_norm: float | None = None,
) -> Count:
    """Count ``optimizer.step()`` without a scaler, after ``clip_grad_norm_`` if asked for."""
    params = parameters(number, dtype)
    optimizer = torch.optim.AdamW(params)
    prepare(optimizer)

    def iterate(count: Count) -> None:
        optimizer.zero_grad()
        loss_of(params).backward()
        with count.running():
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, max_norm)
            optimizer.step()

    return counted(iterate)


class _Casts(TorchDispatchMode):
    """Counts the casts of a block on the CPU."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def forward() -> Iterator[str]:
    """Yield rows about a forward pass."""
    torch.manual_seed(0)
    # Of ops that torch.autocast lowers on the CPU, where its casts are counted, as on a GPU.
    layers = [torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)]
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), *layers)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with _Casts() as casts, torch.autocast("cpu", torch.bfloat16):  # halfstep: allow
        model(tokens)
    model, tokens = model.to("sim"), tokens.to("sim")

    def casts_and_count(*, enabled: bool) -> tuple[int, Count]:
        count, before = Count(), sim.ops["_to_copy"]
        with count.running(), halfstep.autocast("sim", torch.bfloat16, enabled=enabled):
            model(tokens)
        return sim.ops["_to_copy"] - before, count

    casts_and_count(enabled=True)
    (ours, lowered), (_, plain) = casts_and_count(enabled=True), casts_and_count(enabled=False)
    yield f"autocast, forward: casts | {ours} | {casts.num} | {ours - casts.num:+d}"
    other = lowered.ops - ours
    yield f"autocast, forward: other ops | {other} | {plain.ops} | {other - plain.ops:+d}"


def table(most: int | None) -> tuple[list[str], bool]:
    """Return the rows of the table, and whether a step exceeds the budget."""
    rows, is_over = [], False
    of_torch = {  # before anything of halfstep runs in this process
        (fused, max_norm): step(torch.amp.GradScaler("sim"), max_norm, fused=fused)
        for fused in (False, True)
        for max_norm in (None, 1.0)
    }
    for kind, fused in (("plain", False), ("fused", True)):
        for max_norm in (None, 1.0):
            theirs = of_torch[fused, max_norm]
            ours = step(halfstep.GradScaler("sim"), max_norm, fused=fused)
            rows.append(_row(kind + " + clip" * bool(max_norm), ours, theirs))
            more = ours.ops - theirs.ops, ours.waits - theirs.waits
            is_over |= most is not None and (more[0] > most or more[1] > 0)
        ours = step(halfstep.GradScaler("sim"), 1.0, fused=fused, by_torch=True)
        rows.append(_row(f"{kind} + unscale_ + torch's clip", ours, theirs))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"guard, {str(dtype).removeprefix('torch.')}"
        plain = unscaled(lambda optimizer: None, dtype)
        rows.append(_row(name, unscaled(halfstep.guard, dtype), plain))
        clipped = unscaled(lambda optimizer: None, dtype, max_norm=1.0)
        clips = unscaled(lambda optimizer: halfstep.guard(optimizer, max_norm=1.0), dtype)
        rows.append(_row(f"{name} + clip", clips, clipped))
    for number in (NUM_PARAMETERS, 2 * NUM_PARAMETERS):
        split = unscaled(halfstep.master_weights, torch.bfloat16, number)
        plain = unscaled(lambda optimizer: None, torch.float32, number)
        rows.append(_row(f"master_weights, split, {number} parameters", split, plain))
    return [*rows, *forward()], is_over


def _row(name: str, ours: Count, theirs: Count) -> str:
    ops, waits = ours.ops - theirs.ops, ours.waits - theirs.waits
    cells = [f"{each.ops}; {each.waits}; {each.calls}" for each in (ours, theirs)]
    return " | ".join([name, *cells, f"{ops:+d}; {waits:+d}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--most", type=int, help="ops that a step may dispatch more than torch.amp")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sim.install()
    sim.use(PROFILES["cuda"])
    FACTS["sim"] = FACTS["cuda"]
    rows, is_over = table(args.most)
    print(f"PyTorch {torch.__version__}, the simulated device: not a GPU")
    print("| ops; waits; calls | halfstep | torch.amp, or without | more ops; waits |")
    print("|---|---|---|---|")
    print("\n".join(f"| {row} |" for row in rows))
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
