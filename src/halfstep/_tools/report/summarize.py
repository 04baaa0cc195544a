"""Pure functions that summarize recorded runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, takewhile
from statistics import fmean, median
from typing import NamedTuple

from msgspec import structs

from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.record.run import Culprits, Measured, Model, PolicySeen, Run, Step, share_lost
from halfstep._tools.report.layers import layers_and_gradients, lower_of
from halfstep._tools.report.summary import (
    OTHER_CAUSES,
    BadBuffers,
    BadPlace,
    Curve,
    Facts,
    ModelFacts,
    OptimizerLoss,
    Origin,
    ScaleCourse,
    State,
    StepCounts,
    Summary,
)
from halfstep._tools.trace.rows import grouped
from halfstep._tools.watch.skips import ENDLESS, ScaleSearch, Search, are_a_start, are_rare

RECENT = 20  # the number of steps that recent values average over
_OVERFLOW, _STUCK = "overflow", "non-finite down to min_scale"  # values of halfstep.Reason
_NUM_PARAMETERS = 20


def summarize(run: Run) -> Summary:
    """Return all numbers of a run."""
    policies = _policies(run)
    overflows = {
        step.step: step.scale
        for step in run.skipped
        if step.reason == _OVERFLOW and step.scale is not None
    }
    layers, gradients = layers_and_gradients(run.samples, overflows, policies)
    products = sum((Counter(each.num) for each in run.products), Counter[str]())
    return Summary(
        path=str(run.path),
        facts=_facts(run),
        models=tuple(
            ModelFacts(model.name, model.parameters, len(model.modules), model.rank)
            for model in run.models
        ),
        policies=policies,
        products=dict(products.most_common()),
        lower=lower_of(policies),
        steps=_steps(run),
        scale=_scale(run.steps, min(overflows.values(), default=None)),
        num_optimizers=len(tracks_of("", run.steps)),
        loss=_loss(run.steps),
        losses=_losses(run.steps),
        norm=_curve({s.step: s.norm for s in run.steps if s.taken and s.norm is not None}),
        lost_updates=_lost_updates(run.steps),
        origins=_origins(run),
        buffers=_buffers(run),
        bad_places=_bad_places(run),
        sampled=tuple(sample.step for sample in run.samples),
        have_weights_moved=_have_weights_moved(run),
        layers=layers,
        gradients=gradients,
        notes=tuple({note.text: note for note in reversed(run.notes)}.values())[::-1],
    )


def _facts(run: Run) -> Facts:
    header, times = run.header, {step.step: step.time for step in run.steps}
    distances = [after - before for before, after in pairwise(times.values())]
    state: State = "ended" if not run.without_end else "running" if run.is_running else "no end"
    return Facts(
        header=structs.replace(
            header, device=header.device or "unknown", machine=header.machine or "unknown"
        ),
        duration=max(times.values(), default=0.0),
        seconds_per_step=median(distances) if distances else None,
        world_size=header.world_size or len(run.ranks),
        ranks=run.ranks,
        num_segments=len(run.starts),
        state="failed" if run.error is not None else state,
        error=run.error,
        error_rank=run.error_rank,
        without_end=run.without_end,
    )


def _policies(run: Run) -> tuple[PolicySeen, ...]:
    """Return the policies in order, without repetitions due to restarts."""
    by_policy = groupby(run.policies, lambda seen: (seen.device, seen.dtype, seen.text))
    return tuple(next(alike) for _, alike in by_policy)


# --- steps ----------------------------------------------------------------------------------------


def _steps(run: Run) -> StepCounts:
    iterations = [list(alike) for _, alike in groupby(run.steps, lambda step: step.step)]
    skipped = [(each[0].step, not all(step.taken for step in each)) for each in iterations]
    scalers = _by_scaler(iterations, run.starts)
    at_end = [step for step, _ in takewhile(lambda each: each[1], reversed(skipped))]
    others = {each.step for each in run.diagnoses if each.diagnosis.verdict in OTHER_CAUSES}
    others.update(at_end if len(at_end) >= ENDLESS else ())  # a search ends with a taken step
    others.update(step.step for step in run.steps if not math.isfinite(step.loss or 0.0))
    kinds = [
        (step, kind) for scaler in scalers for step, kind in _search(scaler) if step not in others
    ]
    start_up = tuple(step for step, kind in kinds if kind == "start")
    after_growth = tuple(step for step, kind in kinds if kind == "growth")
    if not are_a_start(len(start_up), len(iterations)):
        start_up = ()
    if not are_rare(len(after_growth), len(iterations)):
        after_growth = ()
    normal = {*start_up, *after_growth}
    later = [is_skipped and step not in normal for step, is_skipped in skipped]
    num, num_skipped = len(iterations), sum(is_skipped for _, is_skipped in skipped)
    reasons = {(step.step, str(step.reason)): None for step in run.skipped}
    return StepCounts(
        num=num,
        num_taken=num - num_skipped,
        num_skipped=num_skipped,
        share_skipped=num_skipped / num if num else 0.0,
        reasons=dict(Counter(reason for _, reason in reasons).most_common()),
        skipped=tuple(step for step, is_skipped in skipped if is_skipped),
        partly=tuple(of[0].step for of in iterations if len({step.taken for step in of}) > 1),
        start_up=start_up,
        after_growth=after_growth,
        ranks=tuple(sorted({s.rank for s in run.skipped if s.rank is not None})),
        num_skipped_later=sum(later),
        share_skipped_later=sum(later) / num if num else 0.0,
        longest_in_a_row=max((sum(alike) for _, alike in groupby(later)), default=0),
        skipped_at_end=len(at_end),
    )


def _by_scaler(
    iterations: Iterable[list[Step]], starts: Sequence[int]
) -> Iterable[list[list[Step]]]:
    """Return the iterations by scaler; a restart that does not load the old state has a new one."""
    found: list[list[list[Step]]] = []
    for _, alike in groupby(iterations, lambda each: bisect_right(starts, each[0].step)):
        segment = list(alike)
        if found and segment[0][0].scale == found[-1][-1][-1].scale_after:
            found[-1] += segment
        else:
            found.append(segment)
    return found


def _search(iterations: Iterable[list[Step]]) -> list[tuple[int, Search]]:
    """Return the iterations by which dynamic scaling searched for the largest usable scale.

    Unending skips are not a start, unless they are few: the run may have been too short.
    """
    search = ScaleSearch()
    found: list[tuple[int, Search]] = []
    for iteration in iterations:
        scales = [step.scale for step in iteration if step.scale is not None]
        skipped = [step for step in iteration if not step.taken]
        kind = search.kind_of(
            scales[-1] if scales else None,
            (skipped[-1].scale_after or 0.0) if skipped else 0.0,
            is_taken=not skipped,
            is_overflow=all(step.reason == _OVERFLOW for step in skipped),
        )
        if kind is not None:
            found.append((iteration[0].step, kind))
    is_endless = search.is_starting and not search.taken_in_a_row and len(found) >= ENDLESS
    return [] if is_endless else found


def _scale(steps: Iterable[Step], overflowed_at: float | None) -> ScaleCourse | None:
    scaled = [(step, step.scale) for step in steps if step.scale is not None]
    if not scaled:
        return None
    last_step, before_last = scaled[-1]
    last = before_last if last_step.scale_after is None else last_step.scale_after
    seen = [scale for _, scale in scaled]
    # A loss that was bad before, as with a guard, is not caused by the backward pass. Later steps
    # of a run of skips have the reason too, at scales from its beginning on.
    stuck = {
        step.step: scale
        for step, scale in scaled
        if step.reason == _STUCK and (step.loss is None or math.isfinite(step.loss))
    }
    stuck_at = min(stuck.values(), default=None)
    return ScaleCourse(
        first=seen[0],
        last=last,
        before_last=before_last,
        min=min(*seen, last),
        max=max(*seen, last),
        overflowed_at=overflowed_at,
        stuck_at=stuck_at,
        stuck=tuple(step for step, scale in stuck.items() if scale == stuck_at),
    )


def _loss(steps: Iterable[Step]) -> Curve | None:
    seen = [(step, step.loss) for step in steps if step.loss is not None]
    usual = Counter(step.num_losses for step, _ in seen).most_common(1)[0][0] if seen else 1
    losses: dict[int, float] = {}  # of several optimizers one that is not finite, or the last
    for step, loss in seen:
        is_like = step.num_losses == usual or not math.isfinite(loss)  # to others, in micro-batches
        if is_like and math.isfinite(losses.get(step.step, 0.0)):
            losses[step.step] = loss
    curve = _curve(losses)
    if curve is None or curve.first_non_finite is None:
        return curve
    ranks = {n for s, _ in seen if s.step == curve.first_non_finite for n in s.bad_losses}
    return replace(curve, ranks=tuple(sorted(ranks)))


def _losses(steps: Sequence[Step]) -> tuple[OptimizerLoss, ...]:
    """Return the loss of each optimizer, empty if all have the same loss."""
    tracks = [track for track in tracks_of("", steps) if any(s.loss is not None for s in track[1])]
    series = [[str(step.loss) for step in track.steps] for track in tracks]
    if all(a == b for other in series[1:] for a, b in zip(series[0], other, strict=False)):
        return ()
    curves = ((track.name, _loss(track.steps)) for track in tracks)
    return tuple(OptimizerLoss(name, curve) for name, curve in curves if curve is not None)


def _curve(values: Mapping[int, float]) -> Curve | None:
    if not values:
        return None
    seen = list(values.values())
    finite = [x for x in seen if math.isfinite(x)]
    recent = [x for x in seen[-RECENT:] if math.isfinite(x)]
    bad = [step for step, x in values.items() if not math.isfinite(x)]
    early = seen[:RECENT] if len(seen) >= 2 * RECENT else []
    return Curve(
        first=seen[0],
        last=seen[-1],
        mean=fmean(finite) if finite else None,
        recent=fmean(recent) if recent else None,
        early_max=max(filter(math.isfinite, early), default=None),
        min=min(finite, default=None),
        max=max(finite, default=None),
        first_non_finite=bad[0] if bad else None,
        first_bad=values[bad[0]] if bad else None,
        num_non_finite=len(bad),
    )


def _lost_updates(steps: Sequence[Step]) -> Curve | None:
    """Return the course of the share of lost updates; its means weigh all updates alike."""
    by_step = grouped([s for s in steps if s.share_lost_updates is not None], lambda s: s.step)
    recent = [step for alike in [*by_step.values()][-RECENT:] for step in alike]
    curve = _curve({n: share_lost(alike) or 0.0 for n, alike in by_step.items()})
    return curve and replace(curve, mean=share_lost(steps), recent=share_lost(recent))


def _have_weights_moved(run: Run) -> bool | None:
    """Return whether a weight has other statistics in a later sample, None without two samples."""
    taken = [step.step for step in run.steps if step.taken]
    first: dict[str, tuple[int, Measured]] = {}
    is_known = False
    for sample in run.samples:
        for tensor in sample.tensors:
            if tensor.kind != "parameter":
                continue
            at, before = first.setdefault(tensor.name, (sample.step, tensor))
            # What a sample shows of a weight is its value before the step.
            is_known |= any(at <= step < sample.step for step in taken)
            if _values(tensor) != _values(before):
                return True
    return False if is_known else None


def _values(weight: Measured) -> tuple[object, ...]:
    return weight.amax, weight.amin, weight.zeros, weight.nan, weight.inf, weight.histogram


# --- where skips began ----------------------------------------------------------------------------


def _origins(run: Run) -> tuple[Origin, ...]:
    found = grouped(beginnings(run).values(), lambda each: each.culprits.began_in)
    origins = []
    for module, alike in found.items():
        steps = tuple(dict.fromkeys(each.culprits.step for each in alike))
        parameters = dict.fromkeys(name for each in alike for name in each.culprits.parameters)
        ranks = sorted({rank for each in alike for rank in each.ranks})
        names = tuple(parameters)[:_NUM_PARAMETERS]
        origins.append(Origin(module, len(steps), steps, names, tuple(ranks)))
    return tuple(sorted(origins, key=lambda origin: -origin.num))


def _buffers(run: Run) -> BadBuffers | None:
    by_rank = grouped(run.buffers, lambda each: each.rank)
    ends = (list(takewhile(lambda each: each.names, reversed(seen))) for seen in by_rank.values())
    left = [end for end in ends if end]
    if not left:
        return None
    last, first = min(((end[0], end[-1]) for end in left), key=lambda pair: pair[1].step)
    is_whole = last is left[0][0] and last.num_buffers == len(last.names)
    return BadBuffers(
        names=tuple(dict.fromkeys(name for last, *_ in left for name in last.names)),
        num=left[0][0].num_buffers,
        step=first.step,
        num_first=len({*last.names} & {*first.names}) if is_whole else left[0][0].num_buffers,
        ranks=tuple(sorted(end[0].rank for end in left)),
    )


def _bad_places(run: Run) -> tuple[BadPlace, ...]:
    return tuple(
        BadPlace(
            steps=tuple(sorted({each.step for each in alike})),
            ranks=tuple(sorted({each.rank for each in alike})),
            diagnosis=alike[0].diagnosis,
        )
        for alike in grouped(run.diagnoses, lambda each: _place(each.diagnosis)).values()
    )


def _place(diagnosis: Diagnosis) -> tuple[object, ...]:
    bad = diagnosis.bad
    where = None if bad is None else (bad.name, bad.op, bad.module, bad.phase)
    return (diagnosis.verdict, where, diagnosis.tensor)


# --- where each skipped step began ----------------------------------------------------------------


class Beginning(NamedTuple):
    """The origin of one skipped step."""

    culprits: Culprits  # the bad gradients of the first of these ranks
    ranks: tuple[int, ...]  # the ranks on which the step began in that module


def beginnings(run: Run) -> dict[tuple[int, str], Beginning]:
    """Return the origins of skipped steps, if known, by iteration and optimizer."""
    models = _models(run)
    # A loss that was bad before, as under a guard, is not caused by the backward pass.
    bad = {(s.step, s.optimizer) for s in run.skipped if not math.isfinite(s.loss or 0.0)}
    culprits = (
        structs.replace(each, began_in=None) if (each.step, each.optimizer) in bad else each
        for each in run.culprits
    )
    by_step = grouped(culprits, lambda each: (each.step, each.optimizer))
    return {key: _first(alike, models) for key, alike in by_step.items()}


def _models(run: Run) -> Mapping[int, list[Model]]:
    """Return the models of each rank: its own, or those of the first rank."""
    own = grouped(run.models, lambda model: model.rank)
    models = {rank: own.get(rank, own.get(None, [])) for rank in run.ranks}
    return {n: [structs.replace(x, step=1, rank=None) for x in of] for n, of in models.items()}


def _first(found: Sequence[Culprits], models: Mapping[int, list[Model]]) -> Beginning:
    """Return the culprits that the backward pass reached first.

    In one model, they are in the module that ran last. In a pipeline each stage has its own model;
    there they are on the highest rank, which has the last stage.
    """
    known = [each for each in found if each.began_in is not None] or found
    if all(models[each.rank] == models[known[0].rank] for each in known):
        modules = [name for model in models[known[0].rank] for name in model.modules]
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


# --- steps by optimizer ---------------------------------------------------------------------------


class Track(NamedTuple):
    """The steps of one optimizer of one run, named after both."""

    name: str
    steps: tuple[Step, ...]


def tracks_of(run: str, steps: Sequence[Step]) -> list[Track]:
    """Split the steps of a run by optimizer; those of the same class have numbers."""
    found = grouped(steps, lambda step: (step.optimizer, step.number or 1))
    if len(found) == 1:
        return [Track(run, tuple(steps))]
    return [
        Track(f"{run} {name}{f' {number}' if number > 1 else ''}".strip(), tuple(alike))
        for (name, number), alike in found.items()
    ]
