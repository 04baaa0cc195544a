"""What agreement costs at 10,000 ranks and 100,000 small gradients: collectives and host time.

PyTorch's fake process group stands for the other ranks, so that the times are those of this host
alone, in which the gradients are tiny: what is left is what each of them costs in Python and in
PyTorch's dispatcher. The optimizers do nothing. All variants of a case run in turn and in a new
random order each round; what counts is the median of the ratios within a round.

    python benchmarks/ranks_cost.py
    python benchmarks/ranks_cost.py --ranks 16 --tensors 1000 --rounds 20
"""

import argparse
import gc
import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gradient_time import Fused, Plain, ratio
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
AGAIN = "torch.amp, again"
"""The same once more: what is noise."""
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


def measure(
    layout: str,
    optimizer: type[Plain],
    call: str,
    spread: Sequence[nn.Parameter],
    alone: Sequence[nn.Parameter],
    rounds: int,
) -> dict[str, list[float]]:
    """Return the seconds of every variant in every round."""
    ours, theirs = CALLS[call]
    variants: dict[str, tuple[Callable[[], Any], Call, Sequence[nn.Parameter]]] = {
        OURS: (partial(scaler, layout), ours, spread),
        ALONE: (partial(GradScaler, process_group="local"), ours, alone),
    }
    if theirs is not clip_with_torch or layout == "plain" or len(spread) <= FEW:
        amp = partial(torch.amp.GradScaler, "cpu")
        variants |= dict.fromkeys((TORCH, AGAIN), (amp, theirs, spread))
    runs = {
        name: partial(timed, make(), each, optimizer(params))
        for name, (make, each, params) in variants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-WARM_UP, rounds):
        for name in random.sample(list(runs), len(runs)):
            seconds = runs[name]()
            if round_ >= 0:
                times[name].append(seconds)
    return times


def timed(scaler: Any, call: Call, optimizer: torch.optim.Optimizer) -> float:
    """Return the processor time of what stands between backward and the next iteration.

    Nothing here waits for anything, so that it is the host time on a machine that does no more.
    """
    scaler.scale(torch.ones(()))
    start = time.thread_time()
    call(scaler, optimizer)
    scaler.update()
    return time.thread_time() - start


def print_row(title: str, times: dict[str, list[float]]) -> None:
    row = f"{title:38}{statistics.median(times[OURS]) * 1e3:8.1f}"
    row += f"   {ratio(times[OURS], times[ALONE])}"
    if TORCH in times:
        row += f"   {ratio(times[OURS], times[TORCH])}   {ratio(times[AGAIN], times[TORCH])}"
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
    with fake_ranks(args.ranks):
        for layout in args.layouts:
            spread = parameters(layout, args.tensors)
            alone = spread if layout == "plain" else parameters("plain", args.tensors)
            gc.collect()
            gc.freeze()  # what stays is not looked at again in the middle of a measurement
            for optimizer, call in itertools.product(OPTIMIZERS, CALLS):
                times = measure(layout, OPTIMIZERS[optimizer], call, spread, alone, args.rounds)
                print_row(f"{layout:12}{optimizer:7}{call}", times)
                found = counted(scaler(layout), CALLS[call][0], OPTIMIZERS[optimizer](spread))
                print(f"{'':12}sends {', '.join(map(str, found.found)) or 'nothing'}")
    print("medians; in brackets the quartiles of the ratios within a round")


if __name__ == "__main__":
    main()
