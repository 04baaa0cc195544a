"""``halfstep policy``: display of policies."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._common.text import fill
from halfstep._tools.cli.exits import CommandError, reason

if TYPE_CHECKING:
    from halfstep import Policy

HELP = "show a policy: which op runs in which dtype"
DESCRIPTION = (
    "Shows a policy: which op runs in which dtype. A file with a mistake is an error that names "
    "its line."
)
EPILOG = """\
POLICY is a file, a preset (standard, torch, torch-cuda, bf16-lean, fp32),
or the text of a policy, which is a preset and rules:
"standard; softmax[bf16]:lower".

examples:
  halfstep policy show standard               the rules of the default
  halfstep policy show standard --op exp      the rule that decides for exp
  halfstep policy show my.policy --op exp --module head
                                              the same in one module
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", title="verbs", metavar="show", required=True)

    show = verbs.add_parser("show", help="print the rules, or the rule that decides for one op")
    show.set_defaults(parser=show)
    show.add_argument("policy", metavar="POLICY", help="a file, a preset, or a text")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="print one line per rule, in order")
    form.add_argument(
        "--op", metavar="NAME", help="print the rule for this op: softmax, F.layer_norm, conv*"
    )
    show.add_argument(
        "--module", metavar="NAME", default="", help="with --op: in this module, blocks.0.attn"
    )


def run(arguments: argparse.Namespace) -> int:
    policy = read_policy(arguments.policy)
    if arguments.op is None:
        print(policy)
        print("\n".join(map("  {}".format, policy.rules) if arguments.all else _groups(policy)))
        return 0
    try:
        print(policy.explain(arguments.op, module=arguments.module))
    except ValueError as error:
        raise CommandError(str(error)) from error
    return 0


def _groups(policy: Policy) -> Iterator[str]:
    """Yield the rules, grouped by action, in lines that fit the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    for title, ops in policy.by_action().items():
        for indent, text in ((" " * 2, title), (" " * 6, ", ".join(ops))):
            yield fill(text, width, first=indent, further=indent)


def read_policy(text: str) -> Policy:
    """Return the policy of a file, a preset, or a text."""
    from halfstep import Policy

    path = Path(text)
    try:
        if path.suffix == ".policy" or path.is_file():
            return Policy.load(path)
        return Policy.parse(text)
    except OSError as error:
        raise CommandError(f"{text}: {reason(error, path, '.policy')}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
