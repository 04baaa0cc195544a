"""Tests that cannot run on the simulated device, each with its reason.

What a test itself asks for, and the device's profile lacks, needs no line here: pytest skips a test
whose error comes from there without passing through halfstep.
"""

from __future__ import annotations

CANNOT: dict[str, str] = {}
"""Reasons by the beginning of a test's name, below tests/."""

NOT_WITH: dict[str, dict[str, str]] = {}
"""The same for single profiles."""


def reason(test: str, profile: str) -> str | None:
    """Return why a test cannot run, None if it can."""
    for lines in (CANNOT, NOT_WITH.get(profile, {})):
        for beginning, why in lines.items():
            if test.startswith(beginning):
                return why
    return None
