"""Reads the pages that the report makes, as a browser without scripts would."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from halfstep._tools.record.read import read_run
from halfstep._tools.report.page import render
from halfstep._tools.report.summarize import summarize

VOID = {"meta", "link", "img", "input", "br"}
CLOSES = {"td": {"td", "th"}, "th": {"td", "th"}, "tr": {"td", "th", "tr"}}
"""Elements whose end may be left out: what the start of an element ends."""


@dataclass
class Element:
    """An element with what is in it; ``pieces`` are texts and elements."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    pieces: list["str | Element"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(p if isinstance(p, str) else p.text for p in self.pieces)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def all(self, tag: str | None = None, **attributes: str) -> Iterator["Element"]:
        """Yield the elements inside that have a tag and attributes (``class_``: one of them)."""
        wanted = attributes.pop("class_", None)
        for piece in self.pieces:
            if isinstance(piece, str):
                continue
            if (
                tag in (None, piece.tag)
                and (wanted is None or wanted in piece.classes)
                and all(piece.attributes.get(key) == value for key, value in attributes.items())
            ):
                yield piece
            yield from piece.all(tag, **attributes | ({"class_": wanted} if wanted else {}))

    def one(self, tag: str | None = None, **attributes: str) -> "Element":
        found = list(self.all(tag, **attributes))
        assert len(found) == 1, f"{len(found)} of {tag} {attributes}"
        return found[0]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("document")]

    def handle_starttag(self, tag, attributes):
        for closed in (CLOSES[tag],) if tag in CLOSES else ():
            while self.open[-1].tag in closed:
                self.open.pop()
        element = Element(tag, dict(attributes))
        self.open[-1].pieces.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.open[-1].pieces.append(Element(tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag in [element.tag for element in self.open]:
            while self.open.pop().tag != tag:
                pass

    def handle_data(self, data):
        self.open[-1].pieces.append(data)


def parse(page: str) -> Element:
    """Return the page as a tree."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    return parser.open[0]


def page_of(folder: Path) -> SimpleNamespace:
    """Return the page of a record as ``text`` and ``tree``, with ``summary`` and ``run``."""
    run = read_run(folder)
    summary = summarize(run)
    text = render(summary, run)
    return SimpleNamespace(text=text, tree=parse(text), summary=summary, run=run)


def at(data: Any, key: str) -> Any:
    """Return what JSON has at a place such as ``"entries.0.values.1"``."""
    for part in key.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


CELLS = {"td", "th"}
LINES = {"h1", "h2", "h3", "p", "li", "dt", "dd", "label", "title", "th", "td"}


def told(element: Element) -> Iterator[str]:
    """Yield what a page tells, as lines: rows of tables, paragraphs, titles, code."""
    for piece in element.pieces:
        if isinstance(piece, str):
            text = " ".join(piece.split())
            if text:
                yield text
        elif piece.tag == "img":
            yield "(picture)"
        elif piece.tag == "pre":
            yield from ("    " + line for line in piece.text.splitlines())
        elif piece.tag == "tr":
            yield " | ".join(
                " ".join(each.text.split()) for each in piece.all() if each.tag in CELLS
            )
        elif piece.tag in LINES:
            yield " ".join(piece.text.split())
        elif piece.tag not in ("script", "style"):
            if piece.tag == "section":
                yield f"[{piece.attributes.get('id', '')}]"
            yield from told(piece)
