"""Each test begins like a process: with halfstep's kernels of products, and nothing seen."""

import pytest

from halfstep._autocast import native


@pytest.fixture(autouse=True)
def _new_watches() -> None:
    for products in native.products.values():
        products.num_pins = 0
        products.watches.clear()
        products.settle()
