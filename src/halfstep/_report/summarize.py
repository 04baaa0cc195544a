"""Summaries of recorded runs, as pure functions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import NamedTuple

from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._record.run import Culprits, Diagnosed, Note, Run, Step
from halfstep._report.layers import gradients_of, layer_of, lower_of, seen_by_layer
from halfstep._report.summary import (
    BadPlace,
    Curve,
    Facts,
    ModelFacts,
    Origin,
    PolicyInForce,
    ScaleCourse,
    State,
    StatedNote,
    StepCounts,
    Summary,
)

SETTLED = 10
"""This many taken steps in a row end the start-up of dynamic scaling."""
RECENT = 20
"""The recent loss is the mean of this many steps."""
_OVERFLOW, _STUCK = "overflow", "non-finite at any scale"  # as halfstep._scaler.Reason has them
_NUM_PARAMETERS = 20


def summarize(run: Run) -> Summary:
    """Return all numbers of a run."""
    policies = policies_of(run)
    lower = lower_of(policies[-1].dtype) if policies else "fp16"
    overflows = {
        step.step: step.scale
        for step in run.skipped
        if step.reason == _OVERFLOW and step.scale is not None
    }
    found = seen_by_layer(run.samples, overflows, policies)
    layers = tuple(layer_of(*key, seen) for key, seen in found.items())
    iterations = [list(alike) for _, alike in groupby(run.steps, lambda step: step.step)]
    return Summary(
        path=str(run.path),
        facts=_facts(run),
        models=tuple(
            ModelFacts(each.name, each.parameters, len(each.modules), each.rank)
            for each in run.models
        ),
        policies=policies,
        lower=lower,
        has_scaler=any(step.scale is not None for step in run.steps),
        steps=_steps(run, iterations),
        scale=_scale(run.steps, min(overflows.values(), default=None)),
        loss=_loss(run.steps),
        norm=_curve({s.step: s.norm for s in run.steps if s.taken and s.norm is not None}),
        origins=_origins(run),
        bad_places=_bad_places(run),
        sampled=tuple(sample.step for sample in run.samples),
        layers=layers,
        gradients=gradients_of(found, layers, overflows),
        notes=_notes(run),
    )


def _facts(run: Run) -> Facts:
    header = run.header
    times = [step.time for step in run.steps]
    state: State = "no end" if not run.has_ended else "ended" if run.error is None else "failed"
    return Facts(
        halfstep=header.halfstep,
        torch=header.torch,
        python=header.python,
        device=header.device or "unknown",
        machine=header.machine or "unknown",
        cores=header.cores,
        command=header.command,
        started=header.started,
        duration=max(times, default=0.0),
        seconds_per_step=_median_distance(run.steps),
        every=header.every,
        world_size=header.world_size or len(run.ranks),
        ranks=run.ranks,
        num_segments=run.num_segments,
        state="failed" if run.error is not None else state,
        error=run.error,
        error_rank=run.error_rank,
        without_end=run.without_end,
    )


def _median_distance(steps: Iterable[Step]) -> float | None:
    times = {step.step: step.time for step in steps}
    distances = [after - before for before, after in pairwise(times.values())]
    return median(distances) if distances else None


def policies_of(run: Run) -> tuple[PolicyInForce, ...]:
    """Return the policies in order, without the repetitions of a restarted run."""
    found: list[PolicyInForce] = []
    for seen in run.policies:
        policy = PolicyInForce(seen.step, seen.device, seen.dtype, seen.text)
        if not found or (policy.device, policy.dtype, policy.text) != (
            found[-1].device,
            found[-1].dtype,
            found[-1].text,
        ):
            found.append(policy)
    return tuple(found)


# --- steps ----------------------------------------------------------------------------------------


def _steps(run: Run, iterations: list[list[Step]]) -> StepCounts:
    skipped = [not all(step.taken for step in each) for each in iterations]
    numbers = [each[0].step for each in iterations]
    scalers = _by_scaler(iterations, run.starts)
    start_up = tuple(step for each in scalers for step in _start_up(each))
    grown = (step for each in scalers for step in _after_growth(each))
    after_growth = tuple(step for step in grown if step not in start_up)
    normal = {*start_up, *after_growth}
    later = [is_skipped and n not in normal for is_skipped, n in zip(skipped, numbers, strict=True)]
    num, num_skipped = len(run.steps), len(run.skipped)
    num_later = sum(step.step not in normal for step in run.skipped)
    return StepCounts(
        num=num,
        num_taken=num - num_skipped,
        num_skipped=num_skipped,
        share_skipped=num_skipped / num if num else 0.0,
        reasons=dict(Counter(str(step.reason) for step in run.skipped).most_common()),
        skipped=tuple(n for n, is_skipped in zip(numbers, skipped, strict=True) if is_skipped),
        start_up=start_up,
        after_growth=after_growth,
        ranks=tuple(sorted({s.rank for s in run.skipped if s.rank is not None})),
        num_skipped_later=num_later,
        share_skipped_later=num_later / num if num else 0.0,
        longest_in_a_row=max(_lengths(later), default=0),
        skipped_at_end=_lengths(skipped)[-1] if skipped and skipped[-1] else 0,
    )


def _lengths(flags: Iterable[bool]) -> list[int]:
    """Return the lengths of all series of true values."""
    return [len(list(alike)) for flag, alike in groupby(flags) if flag]


def _by_scaler(
    iterations: Iterable[list[Step]], starts: Sequence[int]
) -> Iterable[list[list[Step]]]:
    """Return the iterations by scaler: a restart that does not load the old state has a new one."""
    found: list[list[list[Step]]] = []
    for _, alike in groupby(iterations, lambda each: bisect_right(starts, each[0].step)):
        segment = list(alike)
        if found and segment[0][0].scale == found[-1][-1][-1].scale_after:
            found[-1] += segment
        else:
            found.append(segment)
    return found


def _start_up(iterations: Iterable[list[Step]]) -> tuple[int, ...]:
    """Return the overflows at the start, as long as each one reaches a new lowest scale.

    The start-up ends with the first ten taken iterations in a row. Skips that do not end are not a
    start-up.
    """
    found: list[int] = []
    lowest, taken_in_a_row = math.inf, 0
    for iteration in iterations:
        skipped = [step for step in iteration if not step.taken]
        if not skipped:
            taken_in_a_row += 1
            if taken_in_a_row == SETTLED:
                break
            continue
        scale = skipped[0].scale
        if any(s.reason != _OVERFLOW for s in skipped) or scale is None or scale > lowest:
            break
        lowest, taken_in_a_row = scale, 0
        found.append(iteration[0].step)
    return tuple(found) if taken_in_a_row else ()


def _after_growth(iterations: Iterable[list[Step]]) -> Iterator[int]:
    """Yield the iterations that overflowed right after growth and brought the scale back."""
    before = grown_from = None
    for iteration in iterations:
        scales = [step.scale for step in iteration if step.scale is not None]
        if not scales:
            continue
        scale = scales[-1]
        if before is not None and scale > before:
            grown_from = before
        before = scale
        skipped = [step for step in iteration if not step.taken]
        if not skipped:
            continue
        back_at = skipped[-1].scale_after or 0.0
        is_back = grown_from is not None and back_at >= grown_from
        if is_back and all(step.reason == _OVERFLOW for step in skipped):
            yield iteration[0].step
        grown_from = None


def _scale(steps: Iterable[Step], overflowed_at: float | None) -> ScaleCourse | None:
    scaled = [(step, step.scale) for step in steps if step.scale is not None]
    if not scaled:
        return None
    last_step, before_last = scaled[-1]
    last = before_last if last_step.scale_after is None else last_step.scale_after
    # Each optimizer may have a scaler of its own.
    by_optimizer: dict[str, dict[int, _Used]] = {}
    for step, scale in scaled:
        by_optimizer.setdefault(step.optimizer, {})[step.step] = _Used(scale, step.taken)
    kept = [x for used in by_optimizer.values() for x in _without_probes([*used.values()])]
    seen = [scale for _, scale in scaled]
    return ScaleCourse(
        first=seen[0],
        last=last,
        before_last=before_last,
        min=min(*kept, last),
        max=max(*seen, last),
        overflowed_at=overflowed_at,
        stuck=tuple(dict.fromkeys(step.step for step, _ in scaled if step.reason == _STUCK)),
    )


class _Used(NamedTuple):
    """The scale of one iteration."""

    scale: float
    taken: bool


def _without_probes(used: Sequence[_Used]) -> Iterator[float]:
    """Yield all scales except those that fell for a single iteration after a skip."""
    for index, (scale, _) in enumerate(used):
        before, after = used[max(index - 1, 0)], used[min(index + 1, len(used) - 1)]
        if before.taken or not before.scale > scale < after.scale:
            yield scale


def _loss(steps: Iterable[Step]) -> Curve | None:
    steps = [step for step in steps if step.loss is not None]
    curve = _curve({step.step: step.loss for step in steps if step.loss is not None})
    if curve is None or curve.first_non_finite is None:
        return curve
    ranks = {n for s in steps if s.step == curve.first_non_finite for n in s.bad_losses}
    return replace(curve, ranks=tuple(sorted(ranks)))


def _curve(values: Mapping[int, float]) -> Curve | None:
    if not values:
        return None
    all_of_them = list(values.values())
    finite = [x for x in all_of_them if math.isfinite(x)]
    recent = [x for x in all_of_them[-RECENT:] if math.isfinite(x)]
    bad = [step for step, x in values.items() if not math.isfinite(x)]
    return Curve(
        first=all_of_them[0],
        last=all_of_them[-1],
        recent=fmean(recent) if recent else None,
        min=min(finite, default=None),
        max=max(finite, default=None),
        first_non_finite=bad[0] if bad else None,
        num_non_finite=len(bad),
    )


# --- where skips began, notes ---------------------------------------------------------------------


def _origins(run: Run) -> tuple[Origin, ...]:
    found: dict[str | None, list[Beginning]] = {}
    for beginning in beginnings(run).values():
        found.setdefault(beginning.culprits.began_in, []).append(beginning)
    origins = [_origin(module, alike) for module, alike in found.items()]
    return tuple(sorted(origins, key=lambda origin: -origin.num))


def _origin(module: str | None, alike: Sequence[Beginning]) -> Origin:
    steps = tuple(dict.fromkeys(each.culprits.step for each in alike))
    parameters = dict.fromkeys(name for each in alike for name in each.culprits.parameters)
    ranks = {rank for each in alike for rank in each.ranks}
    return Origin(
        module, len(steps), steps, tuple(parameters)[:_NUM_PARAMETERS], tuple(sorted(ranks))
    )


def _bad_places(run: Run) -> tuple[BadPlace, ...]:
    found: dict[tuple[object, ...], list[Diagnosed]] = {}
    for each in run.diagnoses:
        others = (other for other in each.diagnosis.others if other.verdict != "none")
        for one in (each.diagnosis, *others):
            found.setdefault(_place(one), []).append(Diagnosed(one.rank, each.step, one))
    return tuple(
        BadPlace(
            steps=tuple(sorted({one.step for one in alike})),
            ranks=tuple(sorted({one.rank for one in alike})),
            diagnosis=alike[0].diagnosis,
        )
        for alike in found.values()
    )


def _place(diagnosis: Diagnosis) -> tuple[object, ...]:
    bad = diagnosis.bad
    where = None if bad is None else (bad.name, bad.op, bad.module, bad.phase)
    return (diagnosis.verdict, where, diagnosis.tensor)


def _notes(run: Run) -> tuple[StatedNote, ...]:
    of_models = (Note(each.step, each.note) for each in run.models if each.note)
    notes = (StatedNote(note.step, note.text) for note in (*of_models, *run.notes))
    return tuple({note.text: note for note in reversed(tuple(notes))}.values())[::-1]


_Models = Sequence[tuple[str, int, tuple[str, ...]]]
"""Class, number of parameters, and modules in the order in which they ran."""


# --- where each skipped step began ----------------------------------------------------------------


class Beginning(NamedTuple):
    """The origin of one skipped step.

    Attributes:
        culprits: What the first of these ranks saw.
        ranks: The ranks on which it began there.
    """

    culprits: Culprits
    ranks: tuple[int, ...]


def beginnings(run: Run) -> dict[tuple[int, str], Beginning]:
    """Return where each skipped step began, if known, by iteration and optimizer."""
    alike: dict[tuple[int, str], list[Culprits]] = {}
    for each in run.culprits:
        alike.setdefault((each.step, each.optimizer), []).append(each)
    models = _models(run)
    return {key: _first(found, models) for key, found in alike.items()}


def _models(run: Run) -> Mapping[int, _Models]:
    """Return the models of each rank."""
    models: dict[int, list[tuple[str, int, tuple[str, ...]]]] = {rank: [] for rank in run.ranks}
    others = {model.rank for model in run.models if model.rank is not None}
    for model in run.models:
        for rank in set(run.ranks) - others if model.rank is None else [model.rank]:
            models[rank].append((model.name, model.parameters, model.modules))
    return models


def _first(found: list[Culprits], models: Mapping[int, _Models]) -> Beginning:
    """Return the culprits that the backward pass reached first.

    Within one model, that is the module that ran last. In a pipeline each stage has a model of its
    own: there it is the highest rank, which has the last stage.
    """
    known = [each for each in found if each.began_in is not None] or found
    if all(models[each.rank] == models[known[0].rank] for each in known):
        modules = [name for *_, names in models[known[0].rank] for name in names]
        places = {name: place for place, name in enumerate(modules)}
        first = max(known, key=lambda each: places.get(each.began_in or "", -1))
    else:
        first = max(known, key=lambda each: each.rank)
    ranks = {
        each.rank
        for each in known
        if each.began_in == first.began_in and models[each.rank] == models[first.rank]
    }
    return Beginning(first, tuple(sorted(ranks)))
