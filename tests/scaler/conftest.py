"""What several tests of the scaler share."""

from collections.abc import Iterator

import pytest

from halfstep._gradients import scalars


@pytest.fixture
def waiting_device() -> Iterator[None]:
    """Let the CPU do what is done on an accelerator, where reading a number is waiting for it."""
    before = set(scalars.READABLE)
    scalars.READABLE.clear()
    yield
    scalars.READABLE.update(before)
