"""The English of pages, docstrings, comments and messages: phrases that must not come back."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A phrase, and what to write. A space stands for any break, also between the lines of a comment
# and between the parts of a literal.
PHRASES = {
    r"a training(?! (?:call|class|job|loop|mode|object|process|program|run|script|step)s?\b)": (
        "a run, a training script; training, without an article"
    ),
    r"trainings": "runs, models",
    r"mend(?:s|ed|ing)?": "fix",
    r"ma(?:de|kes?) good": "fix",
    r"ke(?:pt|eps?) books": "update state",
    r"look(?:s|ed|ing)? at": "read, check, inspect",
    r"looks? whether": "check whether",
    r"for want of": "because there is no",
    r"of (?:yours|theirs|ours)": "your, their, our",
    r"see(?:s|ing)? to it": "guarantee, make sure",
    r"for ever": "permanently",
    r"without a word": "silently",
    r"go(?:es)? by the name": "use the name",
    r"whoever": "those who, whatever",
    r"the house": "say the thing",
    r"no (?:matter of|part in it)": "is not caused by",
    r"(?:has|have|had|knows?) not(?=[.,;:|)])": "has no ...",
    r"works? on(?=[.,;:|)])": "is still usable, continues",
    r"(?:is|are|was|were|been) told(?! (?:apart|from))": "is reported",
    r"tells? (?:you|the user|the reader)": "reports",
    r"what is no": "anything but",
    r"can(?:not)? bear": "name what fails",
    r"implemented anew": "its own",
    r"the very (?:numbers?|same)": "bitwise identical, exactly the same",
    r"bad values": "inf and NaN, non-finite values",
    r"[Bb]est (?:undo|leave|keep)": "preferably",
}

BREAK = r"(?:\s|[\"'#]|(?<=\s)f(?=[\"']))+"
PATTERNS = {
    re.compile(r"\b" + phrase.replace(" ", BREAK) + r"(?!\w)", re.IGNORECASE): instead
    for phrase, instead in PHRASES.items()
}

TEXTS = sorted(
    {
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "cookbook"),
        *(file for kind in ("md", "py") for file in (ROOT / "examples").rglob(f"*.{kind}")),
        *(
            file
            for kind in ("py", "toml", "jinja", "js")
            for file in (ROOT / "src").rglob(f"*.{kind}")
        ),
    }
)


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with a phrase, and what to write instead."""
    for pattern, instead in PATTERNS.items():
        for hit in pattern.finditer(text):
            yield text.count("\n", 0, hit.start()) + 1, f"{hit[0]!r}: write {instead!r}"


def test_english() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in TEXTS
        for line, what in found_in(file.read_text(encoding="utf-8"))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A training ends", 1),
        ("# it is looked\n# at", 1),
        ('("fine, "\n f"whoever made it")', 2),
        ('("no mesh of "\n f"theirs")', 1),
        ("| 9 kernels that it has not |", None),
        ("that it has not, as", 1),
        ("recommend amends; a training loop; told apart, works on CPUs", None),
    ],
)
def test_what_is_found(text: str, line: int | None) -> None:
    assert [where for where, _ in found_in(text)] == ([] if line is None else [line])
