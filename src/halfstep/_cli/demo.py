"""``halfstep demo``: the same training in four precisions, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep._cli.exits import EXIT_INTERRUPTED, require_rich

HELP = "train a small GPT in fp32, bf16 and fp16, and compare"
DESCRIPTION = (
    "Trains a small character-level GPT on English text four times, from the same weights and "
    "data: in fp32, in bf16, in fp16 without and in fp16 with a GradScaler. Prints a table, and "
    "writes a plot and all numbers."
)
EPILOG = """\
examples:
  halfstep demo                                four runs of 200 steps on the CPU
  halfstep demo --quick                        shorter runs, half a minute
  halfstep demo --precision fp32 bf16          only two of the four runs
  halfstep demo --text book.txt --steps 1000   another text, longer runs
  halfstep demo --device cuda --size 43m       a larger model on a GPU

Ctrl-C ends the training and shows the results so far (exit code 130).
More: docs/demo.md.
"""

QUICK_STEPS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--precision",
        nargs="+",
        metavar="P",
        help="one or more of fp32, bf16, fp16-unscaled, fp16 (default: all)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="steps of each run (default: 200)")
    length.add_argument(
        "--quick",
        action="store_const",
        const=QUICK_STEPS,
        dest="steps",
        help=f"{QUICK_STEPS} steps of each run: half a minute on two cores",
    )
    parser.add_argument("--device", help="cpu (default) or cuda")
    parser.add_argument("--size", help="tiny, small (default), medium or 43m")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text (default: Python's own help topics)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of weights and data (default: 0)"
    )
    parser.add_argument(
        "--mean-over",
        type=int,
        metavar="TOKENS",
        help="tokens in a step, of which a batch is a share (default: 524288, as in a large run; "
        "docs/demo.md says why)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("demo-out"),
        help="folder for losses.svg and results.json (default: demo-out)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    require_rich()
    from halfstep._demo.demo import run_demo
    from halfstep._demo.train import DemoSettings

    given = {
        name: getattr(arguments, name)
        for name in ("steps", "device", "size", "text", "seed", "mean_over")
        if getattr(arguments, name) is not None
    }
    if arguments.precision is not None:
        given["precisions"] = tuple(arguments.precision)
    was_finished = run_demo(DemoSettings(**given), arguments.output)
    return 0 if was_finished else EXIT_INTERRUPTED
