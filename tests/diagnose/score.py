"""Score of diagnoses, the share that is right: ``python -m tests.diagnose.score``.

Exit code 1 below 99 % of ops and modules, 95 % of verdicts, 98 % of cures, or with a false alarm;
and below 95 % of anything in the variants of the kinds, 94 % of cures.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from tests.diagnose import clean_runs, formulas, runs
from tests.diagnose.faults import cases, clean_cases
from tests.diagnose.kinds import table
from tests.diagnose.training import Training
from tests.diagnose.truths import Case
from tests.dtype_errors import dtype_programs
from torch import Tensor

import halfstep

LEAST = {"named": 0.99, "verdict": 0.95, "cure": 0.98}
COLUMNS = ("named", "phase", "line", "verdict", "cure", "untouched")


@dataclass(frozen=True)
class Judgement:
    """Parts of a diagnosis that were right; None for parts that do not apply.

    ``named``: the op and its module, or the tensor where the data were bad. ``phase``: with the op
    whose gradient it is. ``cure``: the step, rebuilt with it, is finite. ``untouched``: the
    training is as it was. ``said``: the diagnosis.
    """

    case: Case
    named: bool
    phase: bool | None
    line: bool | None
    verdict: bool
    cure: bool | None
    untouched: bool
    replays: int
    said: str


def judge(case: Case) -> Judgement:
    """Diagnose a case and compare with the truth."""
    training, truth = case.make(), case.truth
    if case.warm:
        training.step()
    diagnosis, untouched = diagnose(training)
    bad, is_data = diagnosis.bad, truth.verdict == "data"
    return Judgement(
        case=case,
        named=_names(case, diagnosis),
        phase=None if is_data else _has_phase(case, bad),
        line=None if is_data else _has_line(case, bad),
        verdict=diagnosis.verdict == truth.verdict,
        cure=_cures(case, diagnosis.cure) if _is_curable(case) else None,
        untouched=untouched,
        replays=diagnosis.num_replays,
        said=str(diagnosis),
    )


def diagnose(training: Training) -> tuple[Any, bool]:
    """Return the diagnosis, and whether the training is as it was."""
    before = _state_of(training)
    diagnosis = halfstep.diagnose(training.step, model=training.model)
    return diagnosis, _state_of(training) == before


def _state_of(training: Training) -> list[object]:
    """Return the bits of all that a step changes."""
    model = training.model
    grads = [p.grad for p in model.parameters()]
    return [
        *map(_bits, model.state_dict().values()),
        *(None if grad is None else _bits(grad) for grad in grads),
        _bits(torch.get_rng_state()),
        str(training.scaler.state_dict()),
        str(training.optimizer.state_dict()),
        model.training,
    ]


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


# --- comparing with the truth ---------------------------------------------------------------------


def _names(case: Case, diagnosis: Any) -> bool:
    truth, bad = case.truth, diagnosis.bad
    if truth.tensor is not None:
        return diagnosis.tensor is not None and bool(re.search(truth.tensor, diagnosis.tensor))
    return bad is not None and bad.op in truth.ops and bad.module == truth.module


def _has_phase(case: Case, bad: Any) -> bool:
    truth = case.truth
    if bad is None or bad.phase != truth.phase:
        return False
    return truth.forward_op is None or bad.forward_op == truth.forward_op


def _has_line(case: Case, bad: Any) -> bool:
    """Return whether the line is right; in the backward pass, that of the forward op."""
    lines = [] if bad is None else [bad.forward_line, bad.line]
    return any(line and (Path(line.file).name, line.number) in case.truth.lines for line in lines)


def _is_curable(case: Case) -> bool:
    return case.truth.verdict in ("scale", "range") and not case.truth.by_hand


def _cures(case: Case, cure: Any) -> bool:
    """Rebuild the step with the cure, and run it."""
    if cure is None:
        return False
    dtype = cure.dtype and getattr(torch, cure.dtype)
    given = {"policy": cure.policy, "scale": cure.scale, "dtype": dtype}
    changes = {name: value for name, value in given.items() if value is not None}
    return bool(changes) and case.make(**changes).is_finite()


# --- the command ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print the score."""
    parser = argparse.ArgumentParser(prog="python -m tests.diagnose.score")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="about so many instead of all")
    parser.add_argument("--fault", help="the cases of this fault alone, and no clean ones")
    parser.add_argument("--variants", type=int, default=5, help="of every kind; 0 for no kinds")
    parser.add_argument("--kinds", action="store_true", help="the kinds alone")
    parser.add_argument(
        "--forms", nargs="+", choices=table.FORMS, default=["step", "loop"], help="of the kinds"
    )
    parser.add_argument("--kind", help="the variants of this kind alone")
    parser.add_argument("--runs", nargs="*", metavar="NAME", help="whole runs, these or all, alone")
    parser.add_argument("--verbose", action="store_true", help="print what was said wrongly")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.kind or options.kinds:
        return 0 if _of_kinds(options) else 1
    if options.runs is not None:
        return 0 if _of_runs(options.runs or runs.RUNS, options.verbose) else 1
    chosen = [c for c in cases(options.seed) if options.fault in (None, c.fault)]
    chosen = chosen[:: max(1, len(chosen) // (options.cases or len(chosen)))]
    judgements = list(_judged(chosen, options.verbose))
    for line in _table(judgements):
        print(line)
    num_clean = 0 if options.fault else min(200, options.cases or 200)
    alarms = list(_alarms(islice(clean_cases(options.seed), num_clean)))
    for line in alarms:
        print(line)
    code = _conclude(judgements, num_clean, len(alarms))
    if options.fault:
        return code
    others = (
        _of_kinds(options),
        _of_dtypes(options.verbose),
        _of_formulas(options.verbose),
        _of_runs(runs.RUNS, options.verbose),
        _of_clean_runs(),
    )
    return 0 if code == 0 and all(others) else 1


def _of_kinds(options: argparse.Namespace) -> bool:
    """Print the score of the kinds in every form; return whether it is enough."""
    warnings.simplefilter("ignore", UserWarning)  # of PyTorch, of what is bad
    is_good = True
    for form in options.forms if options.variants else ():
        found = []
        for case in table.judged(form, options.variants, options.seed, options.kind):
            found.append(case)
            if table.wrong(case):
                print(f"--- {case.program} as a {form}: {', '.join(table.wrong(case))}")
                if options.verbose:
                    print(indent(case.said, "    "))
        line, is_enough = table.summary(form, found)
        print(line)
        is_good &= is_enough
    return is_good


def _of_dtypes(verbose: bool) -> bool:
    """Print the score of errors about dtypes; return whether all is right but known misses."""
    judged = {}
    programs = dtype_programs.ALL | dtype_programs.REST | dtype_programs.WHOLE
    for name, program in programs.items():
        # A folder for each: Python keeps the lines of a file by its name.
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(None):
            judged[name] = dtype_programs.judge(program, Path(folder))
    for name, each in judged.items():
        if verbose and not each.is_right:
            print(f"--- {name}: not said: {each.missing}\n{indent(each.explanation, '    ')}")
    wrong = {name for name, each in judged.items() if not each.is_right}
    known = {name for name, program in dtype_programs.ALL.items() if program.is_missed}
    for name in sorted(wrong ^ known):
        print(f"{name}: {'is wrong' if name in wrong else 'is right, and no miss any more'}")
    newer = dtype_programs.NEWER | dtype_programs.LIBRARIES
    for number, names in (("", judged), (" of them, which are newer", newer)):
        print(f"{len(names)}{number or ' errors about dtypes'}: {_dtype_shares(judged, names)}")
    return wrong <= known


def _dtype_shares(judged: dict[str, Any], names: Iterable[str]) -> str:
    some = [judged[name] for name in names]
    parts = {
        "line": [each.has_line for each in some],
        "tensors and origins": [not each.missing for each in some],
        "a cure that runs": [each.is_cured for each in some if each.is_cured is not None],
        "first": [each.does_first for each in some if each.is_cured is not None],
    }
    return ", ".join(f"{name} {sum(right)} of {len(right)}" for name, right in parts.items())


def _of_formulas(verbose: bool) -> bool:
    """Print the score of cures that are trained with; return whether all learn."""
    learn, words = [], 0
    for name in formulas.FORMULAS:
        with tempfile.TemporaryDirectory() as folder:
            judged = formulas.judge(name, Path(folder))
        cure = judged.found.cure
        if cure is not None and not cure.edits and cure.is_finite:
            words += 1
            continue
        learn.append(judged.learns)
        if verbose and not judged.learns:
            print(f"--- {name}: {judged.before} to {judged.after}\n{judged.found}")
    print(
        f"{len(formulas.FORMULAS)} formulas: a pasted cure that learns {sum(learn)} of "
        f"{len(learn)}, {words} said in words"
    )
    return all(learn)


def _of_runs(names: Iterable[str], verbose: bool) -> bool:
    """Print the score of whole runs; return whether all is right."""
    warnings.simplefilter("ignore", UserWarning)
    judged: dict[str, runs.Judged] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            each = judged[name] = runs.judge(name, Path(folder))
        if each.wrong:
            said = f"\n{indent(each.said, '    ')}" if verbose else ""
            print(f"--- {name}: {', '.join(each.wrong)}{said}", flush=True)
    shares = []
    for column in runs.COLUMNS:
        answers = [a for each in judged.values() if (a := getattr(each, column)) is not None]
        shares.append(f"{column} {sum(answers)} of {len(answers)}")
    print(f"{len(judged)} whole runs: {', '.join(shares)}")
    return not any(each.wrong for each in judged.values())


def _of_clean_runs() -> bool:
    """Print the number of false alarms in long runs; return whether there is none."""
    runs = [clean_runs.alarms_in(setting) for setting in clean_runs.settings()]
    said, skipped = [each for found, _ in runs for each in found], sum(n for _, n in runs)
    for text in said:
        print(f"false alarm: {text}")
    print(
        f"{len(said)} false alarms in {len(runs)} clean runs of {clean_runs.STEPS:,} steps, of "
        f"which dynamic scaling skipped {skipped}"
    )
    return not said


def _judged(chosen: Iterable[Case], verbose: bool) -> Iterator[Judgement]:
    for case in chosen:
        judgement = judge(case)
        wrong = [name for name in COLUMNS if getattr(judgement, name) is False]
        if wrong and verbose:
            truth = case.truth
            print(f"--- {case}: {', '.join(wrong)}")
            print(f"    {case.setting}, warm={case.warm}, decoy={case.decoy}")
            print(
                f"    true: {truth.verdict}, {'|'.join(truth.ops)} in {truth.module!r}, "
                f"{truth.phase}, {truth.tensor or sorted(truth.lines)}"
            )
            print("    " + judgement.said.replace("\n", "\n    "), flush=True)
        yield judgement


def _alarms(trainings: Iterable[Training]) -> Iterator[str]:
    for training in trainings:
        diagnosis, untouched = diagnose(training)
        if diagnosis.verdict != "none" or not untouched:
            yield f"false alarm: {training.setting}: {diagnosis}"


def _table(judgements: list[Judgement]) -> Iterator[str]:
    yield f"{'fault':24}{'cases':>6}" + "".join(f"{c:>10}" for c in COLUMNS) + f"{'replays':>9}"
    for fault, group in groupby(judgements, lambda judgement: judgement.case.fault):
        yield _row(fault, list(group))
    yield _row("all", judgements)


def _row(name: str, judgements: list[Judgement]) -> str:
    text = f"{name:24}{len(judgements):>6}"
    for column in COLUMNS:
        right, number = _count(judgements, lambda j, column=column: getattr(j, column))
        text += f"{'-' if not number else f'{right}/{number}':>10}"
    return text + f"{sum(j.replays for j in judgements) / max(1, len(judgements)):>9.1f}"


def _count(
    judgements: list[Judgement], what: Callable[[Judgement], bool | None]
) -> tuple[int, int]:
    said = [answer for answer in map(what, judgements) if answer is not None]
    return sum(said), len(said)


def _conclude(judgements: list[Judgement], num_clean: int, num_alarms: int) -> int:
    shares, is_good = [], num_alarms == 0
    for column in COLUMNS:
        right, number = _count(judgements, lambda j, column=column: getattr(j, column))
        shares.append(f"{column} {100 * right / number:.1f} %" if number else f"{column} -")
        is_good &= right >= LEAST.get(column, 0) * number
    print(
        f"{len(judgements)} cases: {', '.join(shares)}; "
        f"{num_alarms} false alarms in {num_clean} clean runs"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.exit(main())
