"""What the tests of the simulated device share: they need it, and begin with all of it."""

from collections.abc import Iterator

import pytest
from tests import device as chosen  # DEVICE is not known yet
from tests.simulated.profiles import PROFILES


@pytest.fixture(autouse=True)
def _everything_is_there() -> Iterator[None]:
    if chosen.DEVICE != "sim":
        pytest.skip("needs --device sim:PROFILE, which changes the whole process")
    from tests.simulated import device

    device.use(PROFILES["all"])
    device.ops.clear()
    device.waits.clear()
    yield
    device.use(PROFILES[chosen.PROFILE])
