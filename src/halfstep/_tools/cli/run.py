"""``halfstep run``: recorded runs of unmodified training scripts."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._common.text import tell
from halfstep._tools.cli.exits import (
    EXIT_USAGE,
    CommandError,
    ending_at_interrupts,
    options_of,
    reason,
)

if TYPE_CHECKING:
    from halfstep import Policy
    from halfstep._tools.run.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "halfstep run [options] [-m] target [arguments ...]"
    parser.allow_abbrev = False  # an abbreviation may be an option of the script
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="which op runs in which dtype: a file, a preset, or the text of a policy "
        "(default: torch, which is PyTorch's own; with --amp: standard)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the record (default: runs/NAME-DATE-TIME)",
    )
    parser.add_argument(
        "--every",
        type=_count,
        metavar="N",
        default=50,
        help="measure tensors every N steps; 0 for never (default: 50)",
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print no diagnosis and no line at the end"
    )
    parser.add_argument(
        "--amp", choices=("fp16", "bf16"), help="use mixed precision in a script that has none"
    )
    parser.add_argument(
        "--masters",
        action="store_true",
        help="step bfloat16 and float16 parameters in float32, so that no update is lost",
    )
    parser.add_argument(
        "--guard",
        nargs="?",
        const="",
        type=_above_0("a norm to clip to", "--guard=1.0", default=""),
        metavar="MAX_NORM",
        help="leave out steps with inf or NaN gradients, restore buffers and the scale after them, "
        "and clip the norm of the gradients to MAX_NORM",
    )
    parser.add_argument(
        "--guard-ranks",
        choices=("alone", "together"),
        help="how several ranks decide about a step where their parameters do not show it: each "
        "alone, if the script averages the gradients itself; together, if each rank has a part of "
        "the model or of the optimizer",
    )
    parser.add_argument(
        "--diagnose",
        nargs="?",
        const=30.0,
        type=_above_0("a number of seconds", "--diagnose=60"),
        metavar="SECONDS",
        help="replay a step whose loss or gradients are inf or NaN, and print the op, the module, "
        "the cause and the cure; begin no replay of a step after SECONDS (default: 30)",
    )
    parser.add_argument(
        "--no-children",
        dest="children",
        action="store_false",
        help="leave the Python processes that the script starts as they are: not recorded, with "
        "PyTorch's classes",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the target is a module")
    parser.add_argument(
        "target",
        nargs=argparse.REMAINDER,
        metavar="target",
        help="a script (with -m a module) and its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the target; its exceptions, also SystemExit and KeyboardInterrupt, propagate."""
    with ending_at_interrupts(by_signal=True):
        session = _prepare(arguments)
    if session is None:
        return EXIT_USAGE
    session.run()
    return 0


def _prepare(arguments: argparse.Namespace) -> Session | None:
    """Return the session that runs the target; without a target, print the help and return None."""
    words = arguments.target[1:] if arguments.target[:1] == ["--"] else arguments.target
    if not words:
        arguments.parser.print_help()
        return None
    target, *rest = words
    os.environ.pop("HALFSTEP_RUN", None)  # of the run that has started this one
    if (arguments.masters or arguments.guard is not None) and arguments.amp == "fp16":
        raise CommandError(
            "--amp fp16 skips bad steps by its own scaler, and is for models in float32: leave "
            "--guard and --masters out, or use --amp bf16"
        )
    if arguments.guard_ranks is not None and arguments.guard is None:
        raise CommandError("--guard-ranks says how the ranks of --guard decide: add --guard")

    import torch

    from halfstep import preset
    from halfstep._common import machine
    from halfstep._tools.run.masters import Additions
    from halfstep._tools.run.session import Command, Options, Session
    from halfstep.errors import RecordError

    # The script's own autocast computes as without halfstep, to the bit.
    default = preset("torch" if arguments.amp is None else "standard")
    policy = default if arguments.policy is None else _policy(arguments.policy)
    if not arguments.module:
        target = _command_in_python(target) or target
        try:
            with open(target, "rb"):
                pass
        except OSError as error:
            why = reason(error, Path(target))
            before = arguments.command_line[-len(arguments.target) - 1]
            if arguments.parser.num_values(before) == "?":
                why += f"; if it is the value of {before}: {before}={target}"
            raise CommandError(f"can't open file {target!r}: {why}") from None
        if not arguments.quiet and machine.rank() == 0:
            _note_options(target, rest, arguments.parser)
    amp = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}[arguments.amp]
    additions = Additions(
        has_masters=arguments.masters,
        is_guarding=arguments.guard is not None,
        max_norm=arguments.guard or None,
        ranks=arguments.guard_ranks,
    )
    launcher = ("torchrun", "...", "-m") if machine.num_ranks() > 1 else ()
    options = Options(
        policy=policy,
        folder=arguments.output,
        every=arguments.every,
        is_quiet=arguments.quiet,
        amp=amp,
        diagnose_seconds=arguments.diagnose,
        has_children=arguments.children,
        additions=additions,
        run_as=(*launcher, "halfstep", "run", *_without_folder(arguments), *words),
    )
    try:
        return Session(Command(target, rest, arguments.module), options)
    except OSError as error:
        where = error.filename or arguments.output
        raise CommandError(
            f"cannot write the record to {where}: {error.strerror}; see -o"
        ) from None
    except RecordError as error:
        raise CommandError(str(error)) from None


def _policy(text: str) -> Policy:
    """Return the policy of a file, a preset, or a text."""
    from halfstep import Policy

    path = Path(text)
    try:
        if path.suffix == ".policy" or os.path.isfile(path):  # False if a text is too long
            return Policy.load(path)
        return Policy.parse(text)
    except OSError as error:
        raise CommandError(f"{text}: {reason(error, path, '.policy')}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error


def _without_folder(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the options of another run like this one, each as one word."""
    given = iter(arguments.command_line[1 : len(arguments.command_line) - len(arguments.target)])
    for word in given:
        if arguments.parser.num_values(word) is None:
            value = next(given)
            yield from () if word in ("-o", "--output") else (f"{word}={value}",)
        elif not re.match("-o|--output=|-q$|--quiet$", word):
            yield word


def _command_in_python(target: str) -> str | None:
    """Return the file of a command such as ``torchrun``, if it is written in Python."""
    found = None if os.path.exists(target) else shutil.which(target)
    if found is None:
        return None
    with open(found, "rb") as file:
        return found if re.match(rb"#!.*python", file.readline()) else None


def _note_options(script: str, rest: list[str], parser: argparse.ArgumentParser) -> None:
    """Print a note on options of halfstep after the script if the script does not mention them."""
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    ours = set(options_of(parser)) - {"--help"}
    for word in rest:
        option = word.partition("=")[0]
        mention = rf"(?<![\w.]){re.escape(option.removeprefix('--'))}(?!\w)"  # not torch.amp
        if option in ours and re.search(mention, text) is None:
            tell(
                f"halfstep: {option} comes after {script}, so the script receives it; if it is "
                f"for halfstep: halfstep run {option} ... {script}",
                sys.stderr,
            )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps: write 50, or 0 for never"
        )
    return int(text)


def _above_0(what: str, example: str, default: str | None = None) -> Callable[[str], float]:
    """Return the type of an option with a positive number; the text ``default`` is 0."""

    def read(text: str) -> float:
        if text == default:
            return 0.0
        with suppress(ValueError):
            if (number := float(text)) > 0:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}: write {example}")

    return read
