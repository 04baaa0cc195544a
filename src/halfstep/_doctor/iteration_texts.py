"""The findings about the calls of an iteration: text, cure and code of each."""

from halfstep._doctor.finding import Finding


def finding(id: str, line: int, **values: object) -> Finding:
    """Return a finding; the values are what its text names: scaler, optimizer, loss, lines."""
    text, cure, code = (part.format(**values) for part in _TEXTS[id])
    names = [str(values[each]) for each in ("scaler", "optimizer", "loss") if each in values]
    return Finding(id, text, cure, code, tuple(names), line=line)


_TEXTS = {
    "clip-before-unscale": (
        "gradients are clipped while they are still multiplied by the scale (65536 at first) of "
        "`{scaler}`: after unscaling they are almost zero, and training looks stuck",
        "unscale before you clip, or let halfstep's `{scaler}` clip, in one pass less",
        "{scaler}.unscale_({optimizer})  # before clipping\n"
        "# or: {scaler}.step({optimizer}, max_norm=1.0)",
    ),
    "gradients-dropped": (
        "`zero_grad` stands between `backward` (line {first}) and the step of `{optimizer}` (line "
        "{step}): the gradients are gone before they are used, and nothing is learned",
        "call it before `backward`, or after the step",
        "",
    ),
    "loss-not-scaled": (
        "`{scaler}.step({optimizer})` divides gradients by the scale (65536 at first), but the "
        "loss of this `backward` was not multiplied by it: the updates are almost zero",
        "scale the loss whose gradients this step uses",
        "{scaler}.scale({loss}).backward()",
    ),
    "scaled-twice": (
        "`{loss}` is multiplied by the scale of `{scaler}` twice, and divided by it once: the "
        "gradients are 65536 times too large, or inf",
        "scale each loss once, in the call of `backward`",
        "{scaler}.scale(loss).backward()",
    ),
    "scaler-bypassed": (
        "`{optimizer}.step()` takes gradients that `{scaler}` has multiplied by the scale: "
        "they are 65536 times too large, and inf and NaN get through",
        "step through the scaler, then call `{scaler}.update()`",
        "{scaler}.step({optimizer})\n{scaler}.update()",
    ),
    "scaler-in-loop": (
        "a new `{scaler}` is made for each step: the scale starts at 65536 every time, never "
        "learns from an overflow, and the same steps are skipped again and again",
        "make one scaler before the loop, beside the optimizer",
        "",
    ),
    "step-twice": (
        "`{optimizer}` is stepped a second time with the same gradients (first in line {first}): "
        "the second `{scaler}.step` raises, and a plain step moves the weights twice",
        "step each optimizer once for each `{scaler}.update()`",
        "",
    ),
    "unscale-of-another": (
        "`{scaler}.unscale_({other})` before clipping, but it is `{optimizer}` that is stepped: "
        "its gradients are clipped while they are still multiplied by the scale",
        "unscale the optimizer whose gradients are clipped",
        "{scaler}.unscale_({optimizer})",
    ),
    "unscale-twice": (
        "`{scaler}.unscale_({optimizer})` comes after `{first}` of the same optimizer, without "
        "`{scaler}.update()` between: it raises, or the gradients are divided twice",
        "unscale once, before the step; with accumulation only in the pass that steps",
        "",
    ),
    "update-before-step": (
        "`{scaler}.update()` comes between `backward` and the step of `{optimizer}`: it raises "
        "where nothing was checked yet, else the gradients are divided by another scale than "
        "their loss was multiplied by",
        "update once, after all steps of the iteration",
        "{scaler}.step({optimizer})\n{scaler}.update()",
    ),
    "update-missing": (
        "`{scaler}.step` without `{scaler}.update()` before the next one: the scale never moves, "
        "and the second step is refused",
        "call it once at the end of each iteration, after the last step",
        "{scaler}.update()",
    ),
}
"""Text, cure and code of the findings."""
