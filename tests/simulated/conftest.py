"""What the tests of the simulated device share: they begin with a device that lacks nothing."""

from collections.abc import Iterator

import pytest
from tests import device as chosen  # DEVICE is not known yet
from tests.simulated.profiles import PROFILES


@pytest.fixture(autouse=True)
def _everything_is_there() -> Iterator[None]:
    from tests.simulated import device

    device.use(PROFILES["all"])
    device.ops.clear()
    device.waits.clear()
    yield
    device.use(PROFILES[chosen.PROFILE])
