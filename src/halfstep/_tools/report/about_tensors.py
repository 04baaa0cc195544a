"""Sentences about the tensors of a run: underflow, lost updates, inf, headroom and zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfstep._common.numbers import bits, count, listed, percent, power, step_list, things
from halfstep._common.text import Code, Sentence, Severity, names, say
from halfstep._tools.report.about_steps import (
    again,
    can_add,
    in_bf16,
    is_scaled,
    is_scaled_by_run,
    island,
    known_origins,
    literal,
    on_ranks,
    severity_of_skips,
)
from halfstep._tools.report.summary import NOTABLE, Layer, Summary

HARMFUL, SEVERE = 0.05, 0.5
"""Limits of warnings and of problems, for shares of underflow and of lost updates."""
LITTLE_HEADROOM = 1.0  # the headroom, in bits, below which an output is close to overflow


def about_samples(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if no tensors were sampled."""
    if summary.layers or not summary.steps.num:
        return
    how, cure = "name the model, ", "halfstep.record(path, model=model)"
    if summary.facts.header.every == 0:
        option = "--every=10" if summary.facts.header.run_as else "every=10"
        how, cure = "sample some steps, ", option
    none = f"No tensors were sampled, so nothing is known about the layers: {how}"
    yield say("notice", none, Code(cure), ".")


def about_underflow(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence on which gradients underflow, and which scale would lose less."""
    layers = sorted(summary.of_kind("parameter_gradient"), key=lambda layer: -layer.share_lost)
    lossy = [layer for layer in layers if layer.share_lost >= NOTABLE]
    if not lossy:
        return
    worst = lossy[0]
    has_passed = summary.underflows(worst)  # then zeros have other causes too
    least = "At least " if has_passed else ""
    here, would = f"underflow ({percent(worst.share_zeros)} are zero)", "would underflow in"
    parts: list[str | Code] = [
        f"{least}{percent(worst.share_lost)} of the gradient entries of ",
        Code(worst.name),
        f" {here if has_passed else f'{would} {worst.format}'} {_at_scale(summary)}",
    ]
    if len(lossy) > 1:
        parts += [", and ", percent(NOTABLE), " or more in ", *_names(lossy[1:])]
    larger, cure = _better_scale(summary)
    is_limited = summary.is_lowered and not cure
    yield say(
        # It is a lower bound, and most often several times as much underflows.
        _severity(max(worst.share_lost, HARMFUL)) if has_passed else "notice",
        *parts,
        f"{larger}.",
        cure=_island(summary, worst) if is_limited else cure,
        evidence=row_of(summary, worst),
        follows=is_limited and severity_of_skips(summary.steps) in ("bad", "warning"),
    )


def _severity(share_lost: float) -> Severity:
    return "bad" if share_lost >= SEVERE else "warning" if share_lost >= HARMFUL else "notice"


def row_of(summary: Summary, layer: Layer) -> str:
    """Return the id of the row of a layer on the page."""
    return f"layer-{next(n for n, each in enumerate(summary.layers) if each is layer)}"


def about_updates(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence on how many updates rounding has lost, and what would keep them."""
    share = None if summary.lost_updates is None else summary.lost_updates.mean
    weights = [layer for layer in summary.layers if layer.share_lost_updates]
    if share is None or share < NOTABLE or not weights:
        return
    worst = max(weights, key=lambda layer: (layer.is_low_weight, layer.share_lost_updates or 0.0))
    # A float32 weight also stays if its optimizer has converged, or has inf in its state.
    lost = "were lost to rounding: " if worst.is_low_weight else "changed no weight: "
    what = (
        f"{percent(share)} of the measured updates {lost}"
        "gradients were not zero, and weights did not move. The largest share, "
        f"{percent(worst.share_lost_updates)}, was in "
    )
    store = "split" if worst.dtypes[-1] == "bfloat16" else "float32"
    call = Code(f'halfstep.master_weights(optimizer, store="{store}")')
    can_add_masters = can_add("--masters", summary.facts)
    by_option = (again(summary.facts, "--masters"), ", or ") if can_add_masters else ()
    yield say(
        _severity(share) if worst.is_low_weight else "notice",
        what,
        Code(worst.name),
        f" ({worst.dtypes[-1]}).",
        cure=(" Store what rounding drops: ", *by_option, call, "."),  # not of a notice
        evidence=row_of(summary, worst),
    )


def about_motion(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if gradients were there, and no weight moved."""
    gradients = [x for x in summary.of_kind("parameter_gradient") if not x.is_all_zeros]
    if summary.have_weights_moved is not False or not gradients:
        return
    counted = [x.updates for x in summary.of_kind("parameter") if x.updates is not None]
    if any(counted) or summary.lost_updates is not None:
        return  # rounding has lost them, which has its own sentence
    why = (
        "when an optimizer stepped, these were zero: something sets them to zero between backward "
        "and step"
        if counted
        else "no optimizer of the run steps these weights"
    )
    cure = () if counted else (" Give the optimizer ", Code("model.parameters()"), ".")
    yield say(
        "bad",
        "No weight moved: each was the same in all samples "
        f"({step_list(summary.sampled)}), although the backward pass gave them gradients; {why}.",
        cure=cure,
        evidence=row_of(summary, gradients[0]),
    )


def _at_scale(summary: Summary) -> str:
    scale = summary.scale
    if scale is None or summary.gradients is None or not is_scaled(summary):
        return "without a GradScaler"  # a script may multiply its loss by itself
    if scale.min == scale.max:
        return f"at scale {power(scale.min)}"
    return f"at the scales of the samples (the last: {power(summary.gradients.scale)})"


def _better_scale(summary: Summary) -> tuple[str, tuple[str | Code, ...]]:
    """Return the scale that would lose less, as the end of a sentence, and the call to set it."""
    gradients = summary.gradients
    if gradients is None or gradients.best is None or gradients.share_lost_at_best is None:
        return "", ()
    best, window = gradients.best, gradients.window
    call: tuple[str | Code, ...] = ()
    if not is_scaled_by_run(summary):
        call = (" ", Code(f"halfstep.GradScaler(init_scale={literal(best)})"), ".")
    if not window.is_empty and not window.is_at_least:
        top = window.largest
        to = "" if top is None or top == window.smallest else f" to {power(top)}"
        which = "scale of" if is_scaled(summary) else "GradScaler at"
        return f"; a {which} {power(window.smallest)}{to} would lose none", call
    if best <= gradients.scale:
        return f"; a larger scale than {power(best)} would overflow in a sample", ()
    if window.is_empty:
        at_least = "at least " if window.is_at_least or summary.is_lowered else ""
        left = f"{at_least}{percent(gradients.share_lost_at_best)} of those of all parameters"
        is_enough = gradients.share_lost_at_best < HARMFUL
        least = f"; no scale keeps them all, and {power(best)} loses least, {left}"
        return least, call if is_enough else ()
    return (
        f"; a scale from {power(window.smallest)} to {power(best)} loses fewer (how many is not "
        "known)",
        call,
    )


def _island(summary: Summary, worst: Layer) -> tuple[str | Code, ...]:
    """Return which module to keep in float32 if no scale is good enough.

    It is the module in which larger scales overflow if that is known, else the one that underflows.
    """
    known = known_origins(summary, summary.steps.skipped)
    where = str(known[0][0].module) if known else worst.name.rpartition(".")[0]
    call = island(where, summary)
    bf16 = in_bf16(summary) if summary.lower == "fp16" else ()
    if call is None:
        return (" What helps:", *bf16) if bf16 else ()
    overflow = ", where larger scales overflow," if known else ""
    end = (", or", *bf16) if bf16 else (".",)
    return " Keep ", Code(where), f"{overflow} in float32, ", call, *end


def about_non_finite(summary: Summary) -> Iterator[Sentence]:
    """Yield sentences on inf and NaN in outputs and weights."""
    weights = summary.bad_weights
    if weights:
        bad = summary.first_in_doubt
        before = "" if bad is None else f" from before step {bad}"
        lost = "start again" if bad == 1 else f"restore a checkpoint{before}"
        end = f" These weights cannot be recovered: {lost}."
        yield _non_finite(summary, "The weights of ", weights, end)
    outputs = [layer for layer in summary.of_kind("output") if layer.inf or layer.nan]
    if outputs:
        is_curable = outputs[0].inf and not weights
        cure = _keep(outputs[0].name, summary) if is_curable else ()
        yield _non_finite(summary, "The outputs of ", outputs, cure=cure)


def about_buffers(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence if buffers were left inf or NaN, which no loss shows."""
    found = summary.buffers
    if found is None:
        return
    step, is_skipped = found.step, found.step in summary.steps.skipped
    when = f"at step {step}, which was skipped" if is_skipped else f"by step {step}"
    when = f", {found.num_first} of them {when}" if found.num_first < found.num else f" {when}"
    checked = (each for each in summary.sampled if each < step)  # they were finite then
    good = step - 1 if is_skipped else max(checked, default=0)
    good = min(good, (summary.first_in_doubt or step) - 1)
    is_seen = summary.loss is not None and summary.loss.first_non_finite is not None
    of_norms: tuple[str | Code, ...] = ()
    use = "may use"
    if any(name.rpartition(".")[2].startswith("running_") for name in found.names):
        reset, use = Code("reset_running_stats()"), "use"
        of_norms = " (", reset, " of a norm) and run some batches in training mode"
    restoring: tuple[str | Code, ...] = ()
    if summary.steps.num_skipped or summary.has_bad_gradients:
        calls = Code("GradScaler(module=model)"), " and ", Code("guard(optimizer, module=model)")
        run = (again(summary.facts, "--guard"), ", ") if can_add("--guard", summary.facts) else ()
        restoring = " ", *run, *calls, " restore buffers at skipped steps."
    this_model: tuple[str | Code, ...] = ()  # what is said of bad weights is for buffers too
    if not summary.bad_weights:
        load = f"load a checkpoint from step {good} or before, or " if good else ""
        this_model = f" For this model, {load}reset the buffers", *of_norms, "."
    yield say(
        "bad",
        f"{things(found.num, 'buffer')} of the model became inf or NaN{when}",
        f"{on_ranks(found.ranks, summary.facts)}, and stayed so: ",
        *names(found.names, num=found.num),
        f". Evaluations {use} {'it' if found.num == 1 else 'them'}",
        "." if is_seen else ", while no recorded loss shows it.",
        cure=(*restoring, *this_model),
        evidence="steps",
    )


def _keep(module: str, summary: Summary) -> tuple[str | Code, ...]:
    call = island(module, summary)
    return () if call is None else (" Keep it in float32, ", call, ".")


def _non_finite(
    summary: Summary,
    whose: str,
    bad: Sequence[Layer],
    end: str = "",
    cure: tuple[str | Code, ...] = (),
) -> Sentence:
    first = bad[0]
    counts = [f"{count(n)} {what}" for n, what in ((first.inf, "inf"), (first.nan, "NaN")) if n]
    where = f" over all {first.num_samples} sampled steps, first seen at step "
    where = " in the sample of step " if first.num_samples == 1 else where
    what = f" contained {listed(counts)}{where}{first.non_finite_step}"
    others = ("; ", *_names(bad[1:]), " contained some too") if len(bad) > 1 else ()
    return say(
        "bad",
        whose,
        Code(first.name),
        what,
        *others,
        f".{end}",
        cure=cure,
        evidence=row_of(summary, first),
        # A loss that stays bad is reported first, and names the output that overflowed before it.
        follows=(summary.went_bad_at is not None and not summary.has_recovered)
        or summary.follows_from(first.non_finite_step),
    )


def about_range(summary: Summary) -> Iterator[Sentence]:
    """Yield sentences on outputs close to overflow, and weights that the format cannot hold."""
    near = [
        (layer.headroom, layer)
        for layer in summary.of_kind("output")
        if "float16" in layer.dtypes
        and layer.headroom is not None
        and layer.headroom < LITTLE_HEADROOM
    ]
    has_overflowed = any(layer.inf for layer in summary.of_kind("output"))
    if near and not has_overflowed:  # overflow has its own sentence
        headroom, layer = min(near, key=lambda each: each[0])
        others = [other for _, other in near if other is not layer]
        yield say(
            "warning",
            "The outputs of ",
            Code(layer.name),
            f" came within {bits(headroom)} of the largest value of {layer.format} (step "
            f"{layer.headroom_step})",
            *(("; ", *_names(others), " came close too") if others else ()),
            ".",
            cure=_keep(layer.name, summary),
            evidence=row_of(summary, layer),
            follows=summary.follows_from(layer.headroom_step),
        )
    outside = [x for x in summary.of_kind("parameter") if x.overflow.get(x.format)]
    if outside:
        worst = max(outside, key=lambda layer: layer.amax)
        others = [other for other in outside if other is not worst]
        yield say(
            "warning",
            Code(worst.name),
            f" has entries beyond the largest value of {worst.format} "
            f"({count(worst.overflow[worst.format])} in "
            f"{things(worst.num_samples, 'sampled step')}, the largest: {worst.amax:.4g})",
            *(("; ", *_names(others), " too") if others else ()),
            "; a cast to it makes inf.",
            evidence=row_of(summary, worst),
        )


def about_zeros(summary: Summary) -> Iterator[Sentence]:
    """Yield a sentence on the parameters whose gradients are all zeros."""
    gradients = summary.of_kind("parameter_gradient")
    zero = [layer for layer in gradients if layer.is_all_zeros]
    if zero:
        is_lowered = summary.is_lowered and summary.has_run_lower is not False
        is_in_fp16 = is_lowered and summary.lower == "fp16"
        steps = things(max(layer.num_samples for layer in zero), "sampled step")
        or_underflow = ", or all of them underflow, which a larger scale would show"
        yield say(
            "bad" if is_in_fp16 and 2 * len(zero) >= len(gradients) else "warning",
            "All gradient entries of ",
            *_names(zero),
            f" are zero (in {steps}): the loss does not depend on them there"
            f"{or_underflow if is_in_fp16 else ''}.",
            evidence=row_of(summary, zero[0]),
        )


def _names(layers: Sequence[Layer]) -> Iterator[str | Code]:
    return names(layer.name for layer in layers)
