"""The figures at the top of the page, each marked with its place in the JSON of the summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from halfstep._common import numbers
from halfstep._common.json import to_plain
from halfstep._report.summary import ScaleWindow, Summary


def value_tag(key: str, value: Any, text: str) -> Markup:
    """Return a text with the exact value that it stands for, as JSON, and where that value is.

    Args:
        key: Names and indices, with dots between.
        value: The value.
        text: How it is shown.
    """
    exact = json.dumps(to_plain(value), allow_nan=False)
    return Markup('<data data-key="{}" value="{}">{}</data>').format(key, exact, text)


@dataclass(frozen=True)
class Figure:
    """Shows numbers of a summary by their place in it."""

    summary: Summary

    def __call__(self, key: str, form: Callable[[Any], str] = numbers.count) -> Markup:
        """Return the number at a place such as ``"steps.num_skipped"``, marked."""
        value: Any = self.summary
        for name in key.split("."):
            value = getattr(value, name)
        return value_tag(key, value, form(value))


@dataclass(frozen=True)
class Tile:
    """One figure with what belongs to it.

    Attributes:
        title: What it is.
        figure: The number.
        lines: More about it.
    """

    title: str
    figure: Markup
    lines: list[Markup]


def tiles(summary: Summary) -> list[Tile]:
    """Return the figures that say most about a run."""
    show = Figure(summary)
    found = [
        Tile("Steps", show("steps.num"), [_join("{} taken", show("steps.num_taken"))]),
        _skips(summary, show),
    ]
    if summary.scale:
        ends = show("scale.min", numbers.power), show("scale.max", numbers.power)
        found.append(
            Tile("Last scale", show("scale.last", numbers.power), [_join("from {} to {}", *ends)])
        )
    if summary.loss:
        found.append(_curve("Last loss", "loss", summary.loss.recent, show))
    if summary.norm:
        found.append(_curve("Last gradient norm", "norm", summary.norm.recent, show))
    if summary.gradients:
        lost = show("gradients.share_lost", numbers.percent)
        at = _join("at scale {}", show("gradients.scale", numbers.power))
        window = _window(summary.gradients.window, show)
        found.append(Tile("Gradients underflow", lost, [at] if not window else [at, window]))
    if summary.facts.seconds_per_step is not None:
        found.append(Tile("Time per step", show("facts.seconds_per_step", numbers.seconds), []))
    return found


def _join(text: str, *figures: Markup) -> Markup:
    return Markup(text).format(*figures)


def _skips(summary: Summary, show: Figure) -> Tile:
    lines = [_join("{} of all", show("steps.share_skipped", numbers.percent))]
    if summary.steps.start_up:
        lines.append(_join("{} out of the ordinary", show("steps.num_skipped_later")))
    return Tile("Skipped", show("steps.num_skipped"), lines)


def _curve(title: str, key: str, recent: float | None, show: Figure) -> Tile:
    last = show(f"{key}.last", numbers.number)
    if recent is None:
        return Tile(title, last, [])
    return Tile(title, last, [_join("{} in the last 20", show(f"{key}.recent", numbers.number))])


def _window(window: ScaleWindow, show: Figure) -> Markup | None:
    if window.is_empty or window.smallest is None:
        return None
    smallest = show("gradients.window.smallest", numbers.power)
    if window.largest is None:
        return _join("none lost at {} or more", smallest)
    return _join("none lost at {} to {}", smallest, show("gradients.window.largest", numbers.power))
