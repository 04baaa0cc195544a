"""What agreement costs at 10,000 ranks and 100,000 small gradients: collectives and host time.

PyTorch's fake process group stands for the other ranks, so that the times are those of this host
alone, in which the gradients are tiny: what is left is what each of them costs in Python and in
PyTorch's dispatcher. The optimizers do nothing. torch.amp runs in a process of its own
(``baseline.py``); what counts is the median of the ratios within a round.

    python benchmarks/ranks_cost.py
    python benchmarks/ranks_cost.py --ranks 16 --tensors 1000 --rounds 20
"""

import argparse
import atexit
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from baseline import AGAIN, measure, ratio
from gradient_time import Fused, Plain
from halfstep import GradScaler
from halfstep._common.machine import device_name
from ranks_counts import (
    WARM_UP,
    Call,
    Collective,
    clip_in_step,
    clip_with_torch,
    counted,
    fake_ranks,
    mesh,
    step,
    unscale_then_step,
)

ENTRIES = 4
"""Of each rank's share of a gradient."""

FEW = 500
"""PyTorch's own clipping of more DTensors is left out: its first call takes minutes for 10,000."""

TORCH = "torch.amp"
ALONE = "one rank"
"""halfstep on as many gradients that no other rank has a share of."""
OURS = "halfstep"

CALLS: dict[str, tuple[Call, Call]] = {  # halfstep's, and what torch.amp calls instead
    "step()": (step, step),
    "unscale_(), step()": (unscale_then_step, unscale_then_step),
    "step(max_norm)": (clip_in_step, clip_with_torch),
}
OPTIMIZERS = {"plain": Plain, "fused": Fused}


class Layout(NamedTuple):
    """How the gradients are spread: the names of the mesh's dimensions, and placements in turn."""

    names: tuple[str, ...]
    placements: tuple[tuple[Placement, ...], ...]


LAYOUTS = {
    "plain": Layout((), ()),
    "FSDP2": Layout(("data",), ((Shard(0),),)),
    # As in a transformer: three products for each norm, which tensor parallel leaves whole.
    "FSDP2 + TP": Layout(
        ("data", "tensor"), ((Shard(0), Shard(0)),) * 3 + ((Shard(0), Replicate()),)
    ),
}


def parameters(layout: str, count: int) -> list[nn.Parameter]:
    """Return this rank's share of parameters that have gradients, which are 0."""
    names, placements = LAYOUTS[layout]
    spread = mesh(*names) if names else None
    params = []
    for index in range(count):
        value, grad = torch.ones(ENTRIES), torch.zeros(ENTRIES)
        if spread is not None:
            kind = placements[index % len(placements)]
            value = DTensor.from_local(value, spread, kind, run_check=False)
        param = nn.Parameter(value)
        # As fully_shard makes them: a gradient has the very spec of its parameter.
        param.grad = grad if spread is None else DTensor(grad, param._spec, requires_grad=False)
        params.append(param)
    return params


def scaler(layout: str) -> GradScaler:
    """Return the scaler for a layout: whose gradients plain ones are is known to the user alone."""
    return GradScaler(process_group=dist.group.WORLD if layout == "plain" else None)


def sent(layout: str, count: int, optimizer: str, call: str) -> list[Collective]:
    """Return what halfstep sends in one step."""
    params = parameters(layout, count)
    return counted(scaler(layout), CALLS[call][0], OPTIMIZERS[optimizer](params)).found


def runs(library: Any, ranks: int, layout: str, count: int) -> dict[str, Callable[[], float]]:
    """Return what returns the seconds of every case and variant, by both, in a world of ranks."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    is_torch = library is torch.amp
    world = fake_ranks(ranks)
    world.__enter__()
    atexit.register(world.__exit__, None, None, None)
    spread = parameters(layout, count)
    alone = spread if is_torch or layout == "plain" else parameters("plain", count)
    gc.collect()
    gc.freeze()  # what stays is not looked at again in the middle of a measurement
    found = {}
    for optimizer, name in itertools.product(OPTIMIZERS, CALLS):
        ours, theirs = CALLS[name]
        scalers: dict[str, tuple[Any, Call, Any]] = {}
        if not is_torch:
            scalers[OURS] = scaler(layout), ours, spread
            scalers[ALONE] = GradScaler(process_group="local"), ours, alone
        elif theirs is not clip_with_torch or layout == "plain" or count <= FEW:
            scalers[TORCH] = torch.amp.GradScaler("cpu"), theirs, spread
        for variant, (each, call, params) in scalers.items():
            run = partial(timed, each, call, OPTIMIZERS[optimizer](params))
            found[f"{optimizer:7}{name}: {variant}"] = run
    return found


def timed(scaler: Any, call: Call, optimizer: torch.optim.Optimizer) -> float:
    """Return the processor time of what stands between backward and the next iteration.

    Nothing here waits for anything, so that it is the host time on a machine that does no more.
    """
    scaler.scale(torch.ones(()))
    start = time.thread_time()
    call(scaler, optimizer)
    scaler.update()
    return time.thread_time() - start


def print_row(layout: str, case: str, times: dict[str, list[float]]) -> None:
    ours, theirs = times[f"{case}: {OURS}"], times.get(f"{case}: {TORCH}")
    row = f"{layout:12}{case:26}{statistics.median(ours) * 1e3:8.1f}"
    row += f"   {ratio(ours, times[f'{case}: {ALONE}'])}"
    if theirs is not None:
        row += f"   {ratio(ours, theirs)}   {ratio(times[f'{case}: {TORCH}{AGAIN}'], theirs)}"
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=LAYOUTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # DTensors tell that two collectives could be one: here they are counted.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)

    print(f"{device_name('cpu')}, PyTorch {torch.__version__}")
    print(f"{args.ranks:,} ranks, {args.tensors:,} gradients, {args.rounds} rounds")
    print(f"{'':38}{'ms':>8}   {'to one rank':^21}   {'to torch.amp':^21}   {'noise':^21}")
    for layout in args.layouts:
        rounds = {"rounds": args.rounds, "warm_up": WARM_UP}
        times = measure(runs, args.ranks, layout, args.tensors, **rounds)
        with fake_ranks(args.ranks):
            spread = parameters(layout, args.tensors)
            for optimizer, call in itertools.product(OPTIMIZERS, CALLS):
                print_row(layout, f"{optimizer:7}{call}", times)
                found = counted(scaler(layout), CALLS[call][0], OPTIMIZERS[optimizer](spread))
                print(f"{'':12}sends {', '.join(map(str, found.found)) or 'nothing'}")
    print("medians; in brackets the quartiles of the ratios within a round")


if __name__ == "__main__":
    main()
