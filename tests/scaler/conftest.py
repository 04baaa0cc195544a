"""What several tests of the scaler share."""

from collections.abc import Iterator

import pytest
from tests import device

from halfstep._gradients import scalars


@pytest.fixture
def waiting_device() -> Iterator[None]:
    """Let the CPU do what is done on an accelerator, where reading a number is waiting for it."""
    before = set(scalars.READABLE)
    scalars.READABLE.clear()
    yield
    scalars.READABLE.update(before)


@pytest.fixture(params=["host", "device"])
def host_or_device(request: pytest.FixtureRequest) -> None:
    """Compare on the host, or, as on an accelerator, on the device."""
    if request.param == "device":
        request.getfixturevalue("waiting_device")
    elif device.DEVICE != "cpu":
        pytest.skip("an accelerator compares on the device in both cases")
