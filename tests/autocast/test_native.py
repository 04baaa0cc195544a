"""The tests of native_products.py, in a process without the kernels that other tests leave."""

from pathlib import Path

import pytest
from tests import forked
from tests.device import DEVICE

FILE = Path(__file__).with_name("native_products.py")


@pytest.mark.skipif(DEVICE != "cpu", reason="is about the CPU's kernels of products")
def test_products_by_pytorchs_kernels() -> None:
    arguments = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(FILE)]
    code = f"import pytest, sys; sys.exit(pytest.main({arguments}))"
    done = forked.python("-c", code, cwd=Path.cwd())
    assert done.code == 0, done.out[-5000:]
    assert " passed" in done.out
