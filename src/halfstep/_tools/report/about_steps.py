"""Sentences about the steps of a run: its end, skips, loss and scale, and what a replay found."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import PurePath

from halfstep._common.numbers import (
    at_steps,
    count,
    listed,
    number,
    percent,
    power,
    seconds,
    things,
)
from halfstep._common.text import SEVERITIES, Code, Sentence, Severity, names, say
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis, parts, predicate, shown
from halfstep._tools.record.run import NO_STEP, OWN_PRECISION, options_in, with_options
from halfstep._tools.report.layers import power_below
from halfstep._tools.report.summary import FEW, BadPlace, Curve, Facts, Origin, StepCounts, Summary
from halfstep._tools.watch.skips import ENDLESS, MANY

_DEFAULT_SCALE = 2.0**16
_AVERAGE = "average the loss where it is a sum, as over pixels, or divide it by a constant;"
_RETURNS = "brings it back once a larger one is usable"
MANIFOLD = 10.0  # the factor from which on a loss has risen, whatever the training


def about_end(summary: Summary) -> Iterator[Sentence]:
    """Yield sentences on how the run ended, unless it ended well, and on gaps in the record."""
    facts, ranks = summary.facts, on_ranks(summary.facts.without_end, summary.facts)
    last = f", the last at {seconds(facts.duration)}" if summary.steps.num else ""
    when = f"after {things(summary.steps.num, 'step')}{last}"
    if facts.error == "KeyboardInterrupt":
        yield say("notice", f"The run was interrupted (Ctrl-C, or a SIGINT) {when}.")
    elif facts.error is not None:
        failed = () if facts.error_rank is None else (facts.error_rank,)
        what = f"The run ended {when}, with an error{on_ranks(failed, facts)}: "
        is_consequence = summary.went_bad_at is not None and not summary.has_recovered
        yield say("bad", what, Code(facts.error), ".", evidence="machine", follows=is_consequence)
    elif facts.state == "running":
        yield say("notice", f"The run is still running {when}.", evidence="machine")
    elif facts.without_end:
        is_process = PurePath(summary.path).name.startswith("process-")  # a pool ends its own
        yield say(
            "warning" if is_process else "bad",
            f"The record stops{ranks} {when}, without an end, and no process here writes it: the "
            "run was killed (out of memory, a job's time limit, kill -9), left by os._exit, or "
            "could not write on (a full disk). Later steps are not known.",
            evidence="machine",
        )
    if facts.without_end and facts.error is not None:
        yield say(
            "warning",
            f"The record stops without an end{ranks}: the process was killed (out of memory, "
            "kill -9), or stopped by the launcher after another rank had failed.",
            evidence="machine",
            follows=True,
        )
    if not summary.steps.num and facts.state == "ended":
        yield say("bad", f"{NO_STEP[0].upper()}{NO_STEP[1:]}.")
    if len(facts.ranks) < facts.world_size:
        some = f"{len(facts.ranks)} of {facts.world_size} processes"
        yield say("notice", f"Only {some} left a record: the others may have behaved differently.")


def on_ranks(ranks: Sequence[int], facts: Facts) -> str:
    """Return `` on rank 1``; an empty string for all ranks, or if there is only one."""
    if facts.world_size == 1 or not ranks or tuple(ranks) == facts.ranks:
        return ""
    return f" on {at_steps(ranks, 'rank')}"


def about_loss(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if the loss was not finite."""
    loss, skipped = summary.loss, summary.steps.reasons.get("loss", 0)
    is_diagnosed = any(
        "loss" in place.diagnosis.ends
        or (place.diagnosis.verdict == "optimizer" and summary.went_bad_at in place.steps)
        for place in summary.bad_places
    )
    cure = () if is_diagnosed else _cure_of_loss(summary)
    if loss is not None and loss.first_non_finite is not None:
        step, is_last = loss.first_non_finite, not math.isfinite(loss.last)
        is_alone = summary.facts.world_size == 1  # the record has the mean of several
        became = number(loss.first_bad) if is_alone else "inf or NaN"
        where = on_ranks(loss.ranks, summary.facts)
        had = f"{things(loss.num_non_finite, 'step')} had such a loss"
        last = ", the last one." if loss.num_non_finite == 1 else ", including the last one."
        later = "and it recovered" if summary.buffers is None else "later losses were finite"
        end = last if is_last else f", {later}."
        is_half = any("float16" in x.dtypes for x in summary.of_kind("parameter"))  # has no guard
        if not (summary.scale or is_half) and summary.has_bad_gradients:
            cure = (*cure, *_guarded(summary.facts, "skips steps with inf or NaN gradients"))
        yield say(
            "bad" if is_last else "warning",
            f"The loss became {became} at step {step}{where}; {had}{end}",
            cure=cure,
            evidence="steps",
            follows=is_diagnosed or (step != summary.went_bad_at and summary.follows_from(step)),
        )
    elif skipped:
        yield say(
            "bad",
            f"{things(skipped, 'step')} {_were(skipped)} skipped because the loss was inf or NaN "
            "before it was scaled.",
            cure=cure,
            evidence="skips",
            follows=is_diagnosed,
        )


def about_gradients(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if a step was taken with inf or NaN gradients, which no loss shows."""
    norm = summary.norm
    if norm is not None and norm.first_bad is not None and summary.went_bad_at is None:
        yield say(
            "warning" if math.isfinite(norm.last) else "bad",
            f"The gradients became {number(norm.first_bad)} at step {norm.first_non_finite}, which "
            f"was taken; {things(norm.num_non_finite, 'measured step')} had such gradients.",
            cure=_guarded(summary.facts, "skips such steps"),
            evidence="steps",
        )


def about_rise(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if the loss ended above where it began."""
    # Several losses, as those of a GAN, rise and fall.
    curves = [(name, summary.at(key)) for name, key in summary.loss_keys.items()]
    more = ", clip the gradients, and compare with a run in float32"
    if summary.has_run_lower is False:
        more = ", and clip the gradients"
    for name, loss in curves:
        rose = "" if loss is None else _rise(loss, MANIFOLD if summary.losses else 1.0)
        if rose and summary.steps.num > 2:
            yield say(
                "warning",
                f"The {name} rose: {rose}.",
                cure=(f" If it should fall, lower the learning rate{more}.",),
                evidence="steps",
                follows=summary.went_bad_at is not None,
            )


def _rise(loss: Curve, factor: float) -> str:
    """Return how far a loss rose; empty if it rose by less than a factor, or is not finite."""
    before, after = loss.first, loss.last
    text = f"the first was {number(before)}, the last {number(after)}"
    is_late = loss.early_max is not None and 0 < MANIFOLD * loss.early_max < after
    if loss.early_max is not None and loss.recent is not None and not (is_late and before > 0):
        after = loss.recent
        text = f"the mean of the last 20 is {number(after)}, the "
        if before > 0 and after > MANIFOLD * before:  # it may have risen in the first 20
            text += f"first was {number(before)}"
        else:
            before = loss.early_max
            text += f"largest of the first 20 was {number(before)}"
    else:  # too few for a mean, or it rose in the last few
        factor = 2.0 if factor == 1.0 and loss.min == before else MANIFOLD
    limit = before if factor == 1.0 else before * factor if before > 0 else math.inf
    return text if math.isfinite(loss.last) and after > limit else ""


def _cure_of_loss(summary: Summary) -> tuple[str | Code, ...]:
    overflowed = next((x for x in summary.of_kind("output") if x.inf), None)
    if overflowed is None or summary.bad_weights:
        in_float32 = "" if summary.has_run_lower is False else ", which should run in float32"
        cure = (
            " Check the batch of that step, the learning rate, and log(), division and sqrt() at 0 "
            f"in the loss{in_float32}."
        )
        of_scale = (
            " If the loss depends on the scale, as a gradient penalty may, start at a smaller "
            "init_scale."
        )
        return (cure, of_scale) if is_scaled(summary) else (cure,)
    call = island(overflowed.name, summary)
    keep: tuple[str | Code, ...] = ()
    if call is not None:
        keep = ": keep that module in float32, ", call, ", unless its inputs had inf already"
    return (" The outputs of ", Code(overflowed.name), " had inf", *keep, ".")


def about_skips(summary: Summary) -> Iterator[Sentence]:
    """Yield sentences on the number of skips, where they began, and what would help."""
    steps, scale = summary.steps, summary.scale
    explained = _explained(summary)
    if scale is not None and not explained.issuperset(scale.stuck):
        cure = (
            " Check the backward pass for sqrt(), norm() or pow() at 0, 0/0, a NaN hidden by "
            "where(), values too large for float16, and NaN in the parameters."
        )
        at = f" at the smallest scale too ({power(scale.stuck_at)})" if is_scaled(summary) else ""
        yield say(
            "bad",
            f"The gradients were inf or NaN{at}, while the loss was finite "
            f"({at_steps(scale.stuck)}).",
            cure=() if summary.bad_places else (cure,),
            evidence="skips",
            follows=summary.follows_from(scale.stuck[0]),
        )
    left_out = steps.reasons.get("left out by the script", 0)
    if steps.num_skipped_later > left_out:
        yield _skipped(summary, steps)
    if steps.num and not (steps.num_taken or steps.partly or steps.num_skipped_later):
        yield say(
            "warning",
            "No recorded step was taken: the scale was still coming down, as it does at the start.",
            cure=(" Let it run longer.",),
            evidence="skips",
        )
    after = steps.reasons.get("non-finite after unscale_")
    if after:
        yield say(
            "warning",
            f"In {things(after, 'step')} the gradients were finite when they were unscaled, and "
            "the script made them inf or NaN between unscale_() and step().",
            cure=(
                " Check what it divides by (a norm of 0, inf or NaN), its sums over ranks, and its "
                "clipping: ",
                Code("clip_grad_norm_(..., error_if_nonfinite=True)"),
                " raises at once.",
            ),
            evidence="skips",
        )
    if left_out:
        yield say(
            "notice",
            f"The script left out {things(left_out, 'step')} whose gradients were finite: it "
            "unscaled them and did not step.",
            evidence="skips",
        )


def _were(num: int) -> str:
    return "was" if num == 1 else "were"


def _by_scaling(steps: StepCounts) -> str:
    """Return the normal skips as text: ``by dynamic scaling (13 at the start ...)``."""
    kinds = (
        (len(steps.start_up), "at the start"),
        (len(steps.after_growth), "after the scale had grown"),
    )
    seen = [(num, when) for num, when in kinds if num]
    if len(seen) == 1:
        return f"by dynamic scaling {seen[0][1]}"
    return f"by dynamic scaling ({listed([f'{count(num)} {when}' for num, when in seen])})"


def kinds_of_skips(steps: StepCounts) -> str:
    """Return the kinds of skips, to follow their number: ``, 24 by ... and 1 other``.

    All forms of the report use this text; it is empty if no skip is due to dynamic scaling.
    """
    later = steps.num_skipped_later
    if not steps.num_by_scaling:
        return ""
    if not later:
        return f", {'all ' if steps.num_skipped > 1 else ''}{_by_scaling(steps)}"
    others = f"{count(later)} {'other' if later == 1 else 'others'}"
    return f", {count(steps.num_by_scaling)} {_by_scaling(steps)} and {others}"


def _skipped(summary: Summary, steps: StepCounts) -> Sentence:
    num, later = steps.num_skipped_later, steps.later
    what = (
        f"{count(num)} of {things(steps.num, 'step')} {_were(num)} skipped "
        f"({percent(steps.share_skipped_later)}, {at_steps(later)})"
    )
    if steps.longest_in_a_row > 2:
        what += f", up to {count(steps.longest_in_a_row)} in a row"
    if steps.num_by_scaling:
        what += f", besides {count(steps.num_by_scaling)} {_by_scaling(steps)}"
    if partly := set(later).intersection(steps.partly):
        which = "it" if num == 1 else f"{count(len(partly))} of them"
        what += f"; another optimizer took {which}"
    parts = [what, *_began(summary, later), "."]
    if steps.skipped_at_end >= ENDLESS:
        last = steps.skipped[-steps.skipped_at_end :]
        end = ", and nothing was learned in them" if partly.isdisjoint(last) else ""
        parts.append(
            f" The skips do not end: the last {count(len(last))} steps were all skipped{end}."
        )
    has_other_cause = (
        _explained(summary).issuperset(later)
        or steps.reasons.get("loss", 0) >= num
        or (summary.scale is not None and bool(summary.scale.stuck))
        or summary.follows_from(later[0])
    )
    return say(
        severity_of_skips(steps),
        *parts,
        cure=_cure(summary, later),
        evidence="skips",
        follows=has_other_cause,
    )


def severity_of_skips(steps: StepCounts) -> Severity:
    """Return the severity of the skips that are not part of normal dynamic scaling."""
    share, overflows = steps.share_skipped_later, steps.reasons.get("overflow", 0)
    if steps.num_skipped_later == 1 and overflows == steps.num_by_scaling + 1:
        return "notice"  # the search for a scale has not ended: it fell once
    if share > MANY or steps.skipped_at_end >= ENDLESS:
        return "bad"
    return "warning" if share > FEW or steps.longest_in_a_row >= ENDLESS else "notice"


def _explained(summary: Summary) -> set[int]:
    """Return the steps of which a diagnosis names the cause."""
    places = (p for p in summary.bad_places if p.diagnosis.verdict not in ("none", "unknown"))
    return {step for place in places for step in place.steps}


def known_origins(summary: Summary, later: Sequence[int]) -> list[tuple[Origin, int]]:
    """Return the modules where these skips began, with their counts, the most frequent first."""
    known = (origin for origin in summary.origins if origin.module is not None)
    found = ((origin, len(set(origin.steps).intersection(later))) for origin in known)
    return sorted((each for each in found if each[1]), key=lambda each: -each[1])


def _began(summary: Summary, later: Sequence[int]) -> Iterator[str | Code]:
    known = known_origins(summary, later)
    if not known:
        if where := on_ranks(summary.steps.ranks, summary.facts):
            yield f"; inf or NaN was met{where}"
        return
    origin, num = known[0]
    which = f"in {count(num) if num < len(later) else 'all'} of them " if len(later) > 1 else ""
    yield f"; {which}inf or NaN came first in the gradients of "
    yield Code(origin.module or "(the model)")
    if where := on_ranks(origin.ranks, summary.facts):
        yield f"{where} (inf or NaN in "
        yield from names(origin.parameters[:2])  # of a list that may be cut
        yield ")"
    for other, num in known[1:3]:
        yield f", in {count(num)} in those of "
        yield Code(other.module or "(the model)")
    if left := known[3:]:
        yield f", in others in those of {things(len(left), 'more module')}"


def _cure(summary: Summary, later: Sequence[int]) -> Iterator[str | Code]:
    scale, steps = summary.scale, summary.steps
    if steps.reasons.get("overflow", 0) <= steps.num_by_scaling:
        return  # the scale is not the cause
    if summary.lower == "bf16":
        yield (
            " bf16 has the range of fp32, so no smaller scale helps: lower the learning rate, clip "
            "the gradients, and check the batches of these steps."
        )
        return
    known = known_origins(summary, later)
    call = island(known[0][0].module, summary) if known else None
    gradients = summary.gradients
    is_possible = gradients is None or not gradients.window.is_empty
    yield " What helps:"
    overflowed_at = None if scale is None else scale.overflowed_at
    if overflowed_at is not None and overflowed_at <= 1 and steps.skipped_at_end < ENDLESS:
        yield f" {_AVERAGE}"  # which is a smaller scale, and one was small enough
    if is_possible and overflowed_at is not None and overflowed_at > 1:
        if steps.skipped_at_end >= ENDLESS and scale and scale.before_last >= overflowed_at:
            # Which smaller one is finite is not known.
            yield " a smaller scale, or one that moves, "
            yield Code("halfstep.GradScaler()")
            yield ", or"
        elif not is_scaled_by_run(summary):
            below = power_below(overflowed_at)
            first = "" if below >= _DEFAULT_SCALE else f"init_scale={literal(below)}, "
            yield " stay below the scales that overflow, "
            yield Code(f"halfstep.GradScaler({first}max_scale={literal(below)})")
            yield ", or"
    elif call is not None:  # where the scale alone is too large, other modules overflow next
        yield " keep that module in float32, "
        yield call
        yield ", or"
    yield from in_bf16(summary)


def about_scale(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if the scale ended where it was useless, or is not needed at all."""
    scale = summary.scale
    if scale is None or not is_scaled(summary):
        return
    if summary.lower == "bf16" and summary.policies:
        yield say(
            "notice",
            "Autocast lowers to bf16, which has the range of fp32 and needs no GradScaler. ",
            *(
                ("Run ", again(summary.facts, "--amp=bf16"))
                if is_scaled_by_run(summary)
                else ("Leave it out, or give it ", Code("enabled=False"))
            ),
            ".",
            evidence="policy",
        )
    elif max(scale.before_last, scale.last) <= 1 < scale.first:  # not just before a trial
        yield say(
            "bad",
            f"The scale began at {power(scale.first)} and ended at {power(scale.last)}, where it "
            "protects no gradient from underflow.",
            cure=(
                f" What helps: {_AVERAGE} check where the skips began, keep that module in "
                "float32, or",
                *in_bf16(summary),
                *(() if summary.steps.skipped_at_end else _guarded(summary.facts, _RETURNS)),
            ),
            evidence="steps",
            follows=summary.went_bad_at is not None or summary.steps.num_skipped_later > 0,
        )


def _guarded(facts: Facts, effect: str) -> tuple[str | Code, ...]:
    return (" ", again(facts, "--guard"), f" {effect}.") if can_add("--guard", facts) else ()


def is_scaled(summary: Summary) -> bool:
    """Return whether the loss was multiplied by a scale; a guard scales nothing."""
    return summary.scale is not None and not summary.scale.min == summary.scale.max == 1


def about_course(summary: Summary) -> str:
    """Return the course of loss and scale in a few words, for the verdict."""
    losses = [(name, summary.at(key)) for name, key in summary.loss_keys.items()]
    words = [f"the {name} {_course(x, is_one=len(losses) == 1)}" for name, x in losses if x]
    scale = summary.scale
    if scale is not None and is_scaled(summary):
        if scale.min == scale.max:
            words.append(f"the scale stayed at {power(scale.last)}")
        elif scale.first == scale.last:
            words.append(f"the scale ended where it began, at {power(scale.last)}")
        else:
            words.append(f"the scale went from {power(scale.first)} to {power(scale.last)}")
    return listed(words)


def _course(loss: Curve, *, is_one: bool) -> str:
    first, last = number(loss.first), number(loss.last)
    if loss.min == loss.max:
        return f"was {last}"
    is_peak = loss.max is not None and loss.max > MANIFOLD * max(abs(loss.first), abs(loss.last))
    peak = f" (largest: {number(loss.max)})" if is_peak else ""
    if is_one:
        return f"went from {first} to {last}{peak}"
    # An optimizer may step on two losses in turn.
    return f"was {first} in its first step and {last} in the last{peak}"


# --- steps that were replayed ---------------------------------------------------------------------

MOST_PLACES = 5  # the largest number of places with a sentence of their own; the rest are counted
_REPLAYED = {
    True: " Cure, finite in a replay: ",
    False: " Tried, and not enough: ",
    None: " Cure, not tried: ",
}


def about_diagnoses(summary: Summary) -> Iterator[Sentence]:
    """Yield sentences on which ops made steps bad, with the cures."""
    weights, first = {x.name for x in summary.of_kind("parameter")}, summary.went_bad_at
    for num, place in enumerate(summary.bad_places[:MOST_PLACES], start=1):
        # An op that reads a weight which an earlier bad step has left with inf or NaN.
        follows = first is not None and first < place.steps[0] and place.diagnosis.tensor in weights
        yield say(
            severity_of(place, summary),
            when(place, summary).capitalize(),
            *_found(place.diagnosis),
            ".",
            cure=_cure_of_place(place.diagnosis.cure, summary.bad_places[num:MOST_PLACES]),
            evidence="diagnoses",
            follows=follows,
        )
    left = summary.bad_places[MOST_PLACES:]
    if left:
        severities = [severity_of(place, summary) for place in left]
        yield say(
            min(severities, key=SEVERITIES.index),
            f"{things(len(left), 'more place')} went bad in other steps.",
            evidence="diagnoses",
        )


def severity_of(place: BadPlace, summary: Summary) -> Severity:
    """Return the severity of a place: as bad as its skips, if these and a scale were all of it."""
    steps, is_scale = summary.steps, place.diagnosis.verdict == "scale"
    if place.diagnosis.verdict == "none":
        return "notice"
    if not set(steps.skipped) >= set(place.steps) or not (is_scale or summary.has_recovered):
        return "bad"
    if is_scale and set(steps.later).isdisjoint(place.steps):
        return "notice"
    of_skips = severity_of_skips(steps)
    return of_skips if is_scale or of_skips == "bad" else "warning"


def when(place: BadPlace, summary: Summary) -> str:
    """Return the steps and, if there are several processes, the ranks: ``step 3 on rank 1``."""
    steps = at_steps(place.steps)
    return steps if summary.facts.world_size == 1 else f"{steps} on {at_steps(place.ranks, 'rank')}"


def _found(found: Diagnosis) -> Iterator[str | Code]:
    """Yield what made the steps bad, as a text that follows the step numbers."""
    yield f" {predicate(found)}"
    if found.verdict == "none" and not found.happened:
        yield ", but in the replay every loss and gradient was finite"
    else:
        yield ": "
        yield from parts(found)
    if found.verdict in ("none", "unknown") and found.notes:
        yield f" ({'; '.join(found.notes)})"


def _cure_of_place(cure: Cure | None, later: Sequence[BadPlace]) -> Iterator[str | Code]:
    if cure is None:
        return
    if wider := next((place for place in later if _has(place.diagnosis.cure, cure)), None):
        yield f" Its cure is part of that of {at_steps(wider.steps)}."
        return
    if cure.kind in ("data", "look"):  # nothing to paste
        yield f" What to do: {cure.text.replace(chr(10), '; ').replace(':; ', ': ')}"
    else:
        yield _REPLAYED[cure.is_finite]
        is_one = "(\n" in cure.text and "#" not in cure.text and _is_code(cure.text)
        lines = [ast.unparse(ast.parse(cure.text))] if is_one else cure.text.splitlines()
        for number, text in enumerate(map(str.strip, lines)):
            is_code = _is_code(text)
            yield "" if not number else " " if is_code else "; "
            yield Code(text) if is_code else text
    yield "".join(f"; {text}" for text in shown(cure)) + "."


def _has(cure: Cure | None, other: Cure) -> bool:
    """Return whether one cure does what another does: the same, or all of its rules."""
    if cure is None or cure.policy is None or other.policy is None or other.kind != "policy":
        return cure is not None and cure.text == other.text
    return {*other.policy.split("; ")} <= {*cure.policy.split("; ")}


def _is_code(text: str) -> bool:
    """Return whether a line is Python, such as the head of a block, or a command; no sentence."""
    if "halfstep run " in text:
        return True
    with suppress(SyntaxError):
        ast.parse(text if not text.split("  #")[0].endswith(":") else f"{text}\n    pass")
        return True
    return False


# --- commands and code to paste -------------------------------------------------------------------


def again(facts: Facts, option: str) -> Code:
    """Return the command that was run with another option, in place of the same one."""
    command = facts.header.command
    program = command if command and command[0].endswith(".py") else ("train.py",)
    return Code(with_options(facts.header.run_as or ("halfstep", "run", *program), option))


def can_add(option: str, facts: Facts) -> bool:
    """Return whether the run could have had an option that it did not have."""
    given = {word.partition("=")[0] for word in options_in(facts.header.run_as)}
    return bool(facts.header.run_as) and option not in given and not has_amp(facts, "fp16")


def is_scaled_by_run(summary: Summary) -> bool:
    """Return whether ``halfstep run`` scaled the loss, so that no code of the script can."""
    return has_amp(summary.facts, "fp16") and not _has_own(summary, " GradScaler")


def _has_own(summary: Summary, what: str = "") -> bool:
    return any(f"{OWN_PRECISION}{what}" in note.text for note in summary.notes)


def has_amp(facts: Facts, to: str = "") -> bool:
    """Return whether ``halfstep run`` was to lower the script, to a precision or to any."""
    return any(word.startswith(f"--amp={to}") for word in options_in(facts.header.run_as))


def in_bf16(summary: Summary) -> tuple[str | Code, ...]:
    """Return the advice to use bf16, the end of a sentence: an option if ``run`` chose fp16."""
    advice = " use bf16 where the device has it"
    if is_scaled_by_run(summary) and not _has_own(summary):
        return f"{advice}, ", again(summary.facts, "--amp=bf16"), "."
    return (f"{advice}.",)


def island(module: str | None, summary: Summary) -> Code | None:
    """Return the call, or the command, that keeps a module in float32.

    None if no rule can name the module.
    """
    from halfstep._autocast import Policy  # imports PyTorch, which few reports need

    text = f"{summary.policy.text if summary.policy else 'standard'}; @{module}:fp32"
    # Names in a second model are prefixed with its number, and no rule matches them.
    if summary.has_run_lower is False or not module or "[" in module or "(" in module:
        return None
    try:
        Policy.parse(text)
    except ValueError:
        return None
    if summary.facts.header.run_as and summary.policies:
        return again(summary.facts, f"--policy={text}")
    return Code(f'halfstep.autocast(..., policy="{text}", module=model)')


def literal(power: float) -> str:
    """Return a power of two as code."""
    return f"2.0**{math.log2(power):g}"
