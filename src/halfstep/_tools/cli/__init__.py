"""The ``halfstep`` command.

Each subcommand is a module of this package, listed in ``_build_parser``, with a section in
``help.toml``. It has ``add_arguments(parser)``, and ``run(arguments)``, which returns the exit code
and imports on demand. ``--help`` and the commands that read a record load no PyTorch.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from halfstep import __version__
from halfstep._common.text import did_you_mean, printable
from halfstep._tools.cli.exits import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CommandError,
    ending_at_interrupts,
    options_of,
)
from halfstep.errors import RecordError

_WITHOUT_PYTORCH = ("report", "check", "help")
_HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    # Python handles errors and Ctrl-C of a script, and the script its own streams.
    is_script = words[:1] == ["run"]
    with ending_at_interrupts(by_signal=is_script):
        parser = _build_parser()
        arguments = parser.parse(words)
        arguments.command_line = words
        function: Callable[[argparse.Namespace], int] | None = getattr(arguments, "run", None)
        if function is None:
            parser.print_help()
            return EXIT_USAGE
        if arguments.command not in _WITHOUT_PYTORCH:
            import torch  # noqa: F401 - here, where Ctrl-C ends the import cleanly
    try:
        code = function(arguments)
        if not (is_script or sys.stdout is None):
            sys.stdout.flush()
        return code
    except CommandError as error:
        return _tell(arguments.command, error)
    except (OSError, RecordError, KeyboardInterrupt) as error:
        if is_script:
            raise  # Python ends as it does without halfstep
        if isinstance(error, KeyboardInterrupt):
            print("\nInterrupted.", file=sys.stderr)
            return EXIT_INTERRUPTED
        if isinstance(error, OSError) and sys.stdout is not None:
            # The reader of a pipe has ended (`| head -1`), or the disk is full.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USAGE if isinstance(error, BrokenPipeError) else _tell(arguments.command, error)


def _tell(command: str, error: Exception) -> int:
    print(printable(f"halfstep {command}: {error}"), file=sys.stderr)
    return EXIT_USAGE


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest near names and are safe to print."""

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Return the arguments; report an unknown option as an error of its command."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            command: _Parser = getattr(arguments, "parser", self)
            near = did_you_mean(unknown[0].partition("=")[0], options_of(command))
            if (path := getattr(arguments, "run_path", None)) and unknown[0][:1] != "-":
                near = f"; to compare them: halfstep report {path} --against {unknown[0]}"
            command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return arguments

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Take an optional value only after ``=``: in ``run --guard train.py`` a target follows."""
        words, index = list(sys.argv[1:] if args is None else args), 0
        while index < len(words) and words[index].startswith("-") and words[index] != "--":
            if self.num_values(words[index]) == "?":
                words[index] += f"={self._option_string_actions[words[index]].const}"
            index += 2 if self.num_values(words[index]) is None else 1
        return super().parse_known_args(words, namespace)

    def num_values(self, word: str) -> int | str | None:
        """Return None if a word is an option with a value, ``"?"`` if that may be left out."""
        action = self._option_string_actions.get(word)
        return 0 if action is None else action.nargs

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known: Any = action.choices
        if known is not None and value not in known:
            near = did_you_mean(str(value), known)
            if value in _HELP["instead"]:
                near = f"; {_HELP['instead'][value]}"
            elif action.dest == "command" and f"--{value}" in options_of(known["run"]):
                near = f"; did you mean 'halfstep run --{value}'?"
            choices = ", ".join(map(str, known))
            raise argparse.ArgumentError(action, f"{value!r}: choose one of {choices}{near}")

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that shows an optional value as it is given: ``--guard[=MAX_NORM]``."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return super()._format_action_invocation(action).replace(" [", "[=")


def _build_parser() -> _Parser:
    from halfstep._tools.cli import check, doctor, report, run

    parser = _Parser(
        prog="halfstep",
        description="Automatic mixed precision for PyTorch that is safe, visible and editable.",
    )
    parser.add_argument("--version", action="version", version=f"halfstep {__version__}")
    subcommands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for command in (run, report, check, doctor):
        name = command.__name__.rpartition(".")[2]
        texts = _HELP[name] | {"description": textwrap.fill(_HELP[name]["description"], 79)}
        own = subcommands.add_parser(name, formatter_class=_Help, **texts)
        own.set_defaults(run=command.run, parser=own)
        command.add_arguments(own)
    own = subcommands.add_parser("help", help="show this, or the help of a command")
    own.add_argument("words", nargs="*", metavar="COMMAND", help="a command")
    own.set_defaults(run=lambda given: parser.parse([*given.words, "--help"]))
    return parser
