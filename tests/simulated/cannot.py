"""Which tests cannot run on the simulated device, or on CUDA: ``cannot.toml`` says it, and why."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

TESTS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
TABLES = {"mps": "without float64", "xpu_arc": "without float64", "": "cuda"}
"""The table of a profile beside the one for all; the empty profile is CUDA itself."""

SIMULATED_ONLY = (
    "A gap of the device: see the table in device.py.",
    "Compiles, exports or traces: not on this device.",
    "Sparse CSR and nested tensors: not on this device.",
)
"""What CUDA itself can run."""


def reason(test: str, profile: str) -> str | None:
    """Return why a test cannot run, None if it can."""
    file, _, _ = test.partition("::")
    names = {file, test.partition("[")[0], test}
    for reasons in (TESTS["everywhere"], TESTS.get(TABLES.get(profile, ""), {})):
        for why, tests in reasons.items():
            if not profile and why in SIMULATED_ONLY:
                continue
            if not names.isdisjoint(tests):
                return why
            if any(each.fullmatch(test) for each in _patterns(tuple(tests))):
                return why
    return None


@cache
def _patterns(tests: tuple[str, ...]) -> list[re.Pattern[str]]:
    cases = [test.split("*") for test in tests if "*" in test]
    return [re.compile(".*".join(map(re.escape, parts))) for parts in cases]
