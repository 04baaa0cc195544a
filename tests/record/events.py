"""Lines of small records: what the tests of reading, following and watching write."""

from typing import Any

from tests.report import records

write = records.write


def step(number: int, **values: Any) -> records.Event:
    """Return a step that was taken at scale 8; its time is its number."""
    small = {"time": float(number), "optimizer": "SGD", "scale": 8.0, "scale_after": 8.0}
    return records.step(number, **small | {"norm": 1.0, "loss": 1.0} | values)
