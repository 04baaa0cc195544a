"""The report as one self-contained HTML page that needs neither a network nor JavaScript."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache, partial
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import halfstep
from halfstep._common import numbers
from halfstep._common.formats import FORMATS
from halfstep._common.numbers import count, number, percent, power, seconds
from halfstep._common.text import SEVERITIES
from halfstep._tools.json import to_plain
from halfstep._tools.record.run import Run
from halfstep._tools.report.about_steps import when
from halfstep._tools.report.compare_runs import RunComparison
from halfstep._tools.report.page_curves import curves
from halfstep._tools.report.page_layers import (
    HEADROOM,
    KIND_TITLES,
    LOST,
    NOT_FINITE,
    css,
    format_limits,
    heat,
    layer_table,
)
from halfstep._tools.report.summarize import beginnings
from halfstep._tools.report.summary import Summary
from halfstep._tools.report.text import FOLLOWED, sentences
from halfstep._tools.trace.rows import short

MOST_SKIPS = 200
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)

_Line: TypeAlias = tuple[str, Callable[[Any], str], *tuple[str, ...]]
"""A text with gaps, the format of the numbers in it, and their keys in a summary."""


def render(summary: Summary, run: Run) -> str:
    """Return the page of a run, with numbers from the summary and drawings from the run."""
    said, command = sentences(summary), summary.facts.header.command
    worst = min((sentence.severity for sentence in said), key=SEVERITIES.index)
    maps, began, skipped = heat(summary, run), beginnings(run), run.skipped[:MOST_SKIPS]
    table = layer_table(summary) if summary.layers else None
    levels = [
        {"title": each.title, "labels": each.labels, "colours": [c[1:] for c in each.ramp]}
        for each in (HEADROOM, LOST)
    ]
    return _render(
        "page.html.jinja",
        summary=summary,
        sentences=said,
        severity=worst,
        script_name=PurePath(command[0]).name if command and command[0] else "Recorded run",
        command=shlex.join(command),
        places=[(when(place, summary), str(place.diagnosis)) for place in summary.bad_places],
        tiles=tiles(summary),
        figure=partial(figure, summary),
        curves=curves({"": run.steps}),
        heat=maps,
        heat_data={"columns": maps.columns, "maps": levels} if maps else None,
        not_finite_colour=css(HEADROOM.colours[NOT_FINITE]),
        table=table,
        limits=format_limits(table.axis) if table else (),
        formats=list(FORMATS),
        kinds=[kind for kind in KIND_TITLES if summary.of_kind(kind)],
        skipped=[(step, began.get((step.step, step.optimizer))) for step in skipped],
        num_skipped=len(run.skipped),
    )


def render_comparison(comparison: RunComparison, runs: Sequence[Run]) -> str:
    return _render(
        "comparison.html.jinja",
        comparison=comparison,
        names=comparison.names,
        runs=list(zip(comparison.names, comparison.runs, strict=True)),
        curves=curves({n: r.steps for n, r in zip(comparison.names, runs, strict=True)}),
        value=value_tag,
    )


def _render(template: str, **values: Any) -> str:
    page = _environment().get_template(template).render(**values)
    # Names come from outside: what reorders text, or is invisible, is shown by its number.
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", page)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("halfstep._tools.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        css=_compact("page.css"),
        script=_compact("page.js"),
        version=halfstep.__version__,
        n=numbers,
        kind_titles=KIND_TITLES,
        followed=FOLLOWED,
        island=_island,
    )
    environment.filters.update(short=short, date=_date)
    return environment


def _compact(name: str) -> Markup:
    """Return the CSS or JavaScript of a template, without comments and indentation."""
    text = (files("halfstep._tools.report") / "templates" / name).read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return Markup("\n".join(line.strip() for line in text.splitlines() if line.strip()))


def _island(data: Any) -> Markup:
    """Return data as JSON for a script tag, escaped so that it cannot close the tag."""
    text = json.dumps(to_plain(data), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# --- words ----------------------------------------------------------------------------------------


def _date(started: str) -> str:
    try:
        return datetime.fromisoformat(started).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return started


# --- figures at the top, tagged with their keys in the JSON ---------------------------------------


def _length(values: Sequence[object]) -> str:
    return count(len(values))


def value_tag(key: str, value: Any, text: str) -> Markup:
    """Return a text tagged with its exact value as JSON and with the key of that value."""
    exact = json.dumps(to_plain(value), allow_nan=False)
    return Markup('<data data-key="{}" value="{}">{}</data>').format(key, exact, text)


def figure(summary: Summary, key: str, form: Callable[[Any], str] = count) -> Markup:
    """Return the tagged number for a key such as ``"steps.num_skipped"``."""
    value = summary.at(key)
    return value_tag(key, value, form(value))


class Tile(NamedTuple):
    """One figure, with lines of details."""

    title: str
    figure: Markup
    lines: list[Markup]


def tiles(summary: Summary) -> list[Tile]:
    """Return the most important figures of a run."""
    found: list[Tile] = []

    def add(title: str, key: str, form: Callable[[Any], str], *lines: _Line | None) -> None:
        """Add a tile, unless its number is None; leave out lines with unknown numbers."""
        if summary.at(key) is None:
            return
        shown = [
            Markup(text).format(*(figure(summary, place, its_form) for place in places))
            for text, its_form, *places in filter(None, lines)
            if all(summary.at(place) is not None for place in places)
        ]
        found.append(Tile(title, figure(summary, key, form), shown))

    was_low = any(map(summary.underflows, summary.of_kind("parameter_gradient")))
    steps, recent, measured = summary.steps, "{} in the last 20", "{} in the last 20 measured"
    add("Steps", "steps.num", count, ("{} taken", count, "steps.num_taken"))
    add(
        "Skipped",
        "steps.num_skipped",
        count,
        ("{} of all", percent, "steps.share_skipped"),
        ("{} at the start", _length, "steps.start_up") if steps.start_up else None,
        ("{} after growth", _length, "steps.after_growth") if steps.after_growth else None,
        ("{} other", count, "steps.num_skipped_later") if steps.num_by_scaling else None,
    )
    add("Last scale", "scale.last", power, ("from {} to {}", power, "scale.min", "scale.max"))
    for name, key in summary.loss_keys.items():
        add(f"Last {name}", f"{key}.last", number, (recent, number, f"{key}.recent"))
    if summary.num_optimizers == 1:  # else the norms are of each in turn
        add("Last measured gradient norm", "norm.last", number, (measured, number, "norm.recent"))
    add(
        "Gradients underflow, at least" if was_low else f"Would underflow in {summary.lower}",
        "gradients.share_lost",
        percent,
        ("at scale {}", power, "gradients.scale"),
    )
    add("Lost updates", "lost_updates.mean", percent, (measured, percent, "lost_updates.recent"))
    add("Time per step", "facts.seconds_per_step", seconds)
    return found
