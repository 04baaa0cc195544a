"""A page of the site as a Jupyter notebook."""

import json
import re
import textwrap

BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> str:
    """Return a notebook with a cell for each block of a Markdown page, and for the text between."""
    cells, end = [], 0
    for block in BLOCK.finditer(page):
        cells += [("markdown", page[end : block.start()]), ("code", code_of(*block.groups()))]
        end = block.end()
    cells.append(("markdown", page[end:]))
    content = {
        "cells": [cell(kind, text.strip(), number) for number, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1) + "\n"


def code_of(language: str, text: str) -> str:
    """Return a block as code: of a console, the commands without what they print."""
    if language == "python":
        return textwrap.dedent(text)
    return "\n".join(f"!{command}" for command in re.findall(r"^\$ (.+)$", text, re.MULTILINE))


def cell(kind: str, text: str, number: int) -> dict[str, object]:
    """Return a cell as the format has it."""
    lines = text.splitlines(keepends=True)
    found: dict[str, object] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    outputs = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return found | outputs | {"source": lines}
