"""Tests that cannot run on the simulated device, each with its reason.

What a test itself asks for, and the device's profile lacks, needs no line here: pytest skips a test
whose error comes from there without passing through halfstep.
"""

from __future__ import annotations

EVERYWHERE: dict[str, tuple[str, ...]] = {}
"""Tests by reason: a file below tests/, or one of its functions, or one of the function's cases."""

WITH: dict[str, dict[str, tuple[str, ...]]] = {}
"""The same for single profiles."""


def reason(test: str, profile: str) -> str | None:
    """Return why a test cannot run, None if it can."""
    file, _, _ = test.partition("::")
    names = {file, test.partition("[")[0], test}
    for reasons in (EVERYWHERE, WITH.get(profile, {})):
        for why, tests in reasons.items():
            if not names.isdisjoint(tests):
                return why
    return None
