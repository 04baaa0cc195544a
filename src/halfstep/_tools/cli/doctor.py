"""``halfstep doctor``: mistakes in scripts, and the best precision for this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep._common.text import TableLine, aligned, did_you_mean, tell
from halfstep._tools.cli.exits import CommandError, reason

if TYPE_CHECKING:
    from halfstep._tools.doctor.finding import Checkup
    from halfstep._tools.doctor.hardware import MachineReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scripts", type=Path, nargs="*", metavar="SCRIPT", help="a Python file")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    more = "print what a finding means, with two programs"
    parser.add_argument("--explain", action="append", metavar="ID", help=more)
    parser.add_argument("--no-machine", action="store_true", help="do not measure the machine")


def run(arguments: argparse.Namespace) -> int:
    if arguments.explain:
        from halfstep._tools.doctor.finding import CATALOG, explanation

        for id in arguments.explain:
            if id not in CATALOG:
                known = f"choose one of {', '.join(CATALOG)}{did_you_mean(id, CATALOG)}"
                raise CommandError(f"--explain {id}: {known}")
        tell("\n\n".join(map(explanation, arguments.explain)))
        return 0
    if arguments.no_machine and not arguments.scripts:
        raise CommandError("--no-machine leaves nothing to do: name a script")
    machine = None
    if not arguments.no_machine:
        from halfstep._tools.doctor.hardware import inspect_machine

        machine = inspect_machine()
    checkup, unread = _read(arguments.scripts)
    scripts = [path for path in arguments.scripts if path not in unread]
    problem = CommandError("\n".join(unread.values()))
    if unread and not scripts:
        raise problem
    if arguments.json:
        print(_json(machine, checkup))
    else:
        parts = [] if machine is None else ["\n".join(_machine_lines(machine))]
        if scripts:
            parts.insert(0, str(checkup) if checkup else _nothing_found(scripts))
        tell("\n\n".join(parts))
    if unread:
        raise problem
    return 0 if checkup.is_well else 1


def _nothing_found(scripts: list[Path]) -> str:
    from halfstep._tools.doctor.doctor import recognized

    files = f"{len(scripts)} files" if scripts[1:] else scripts[0]
    if seen := recognized(scripts):
        return f"good: {files}: nothing found in {seen}"
    return f"{files}: nothing was checked: no autocast, scaler, optimizer or backward()"


def _read(scripts: list[Path]) -> tuple[Checkup, dict[Path, str]]:
    """Return the findings of the scripts, and why those that cannot be read cannot."""
    from halfstep._tools.doctor.doctor import check_file
    from halfstep._tools.doctor.finding import Checkup

    findings, unread = [], {}
    for path in scripts:
        try:
            findings += check_file(path)
        except OSError as error:
            unread[path] = f"{path}: {reason(error, path)}"
        except SyntaxError as error:
            line = "" if error.lineno is None else f":{error.lineno}"
            unread[path] = f"{path}{line}: not Python: {error.msg}"
        except ValueError as error:  # a file with null bytes
            unread[path] = f"{path}: not Python: {error}"
    return Checkup(findings), unread


# --- the machine ----------------------------------------------------------------------------------


def _machine_lines(machine: MachineReport) -> Iterator[str]:
    yield machine.name
    yield ""
    names = list(machine.speeds.gflops["matmul"])
    titles = {"matmul": "matrix products", "conv": "convolutions"}
    table: list[TableLine] = [("GFLOP/s", *names)]
    for kind, rates in machine.speeds.gflops.items():
        ratios = machine.speeds.ratios[kind]
        cells = (
            f"{rates[name]:,.{0 if rates[name] >= 10 else 1}f}"
            + ("" if name == "fp32" else f" ({ratios[name]:.2g} x)")
            for name in names
        )
        table.append((titles[kind], *cells))
    yield from aligned(table, indent=2, right=names)
    yield ""
    yield f"use {machine.advice.precision}: {machine.advice.reason}"


def _json(machine: MachineReport | None, checkup: Checkup) -> str:
    values: dict[str, Any] = {"schema": 1, "kind": "doctor"} | checkup.to_json()
    if machine is not None:
        values["machine"] = asdict(machine)
    return json.dumps(values, allow_nan=False, indent=1)
