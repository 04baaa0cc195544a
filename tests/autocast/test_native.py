"""The tests of native_products.py, in a process without the kernels that other tests leave."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.device import DEVICE

FILE = Path(__file__).with_name("native_products.py")


@pytest.mark.skipif(DEVICE != "cpu", reason="is about the CPU's kernels of products")
def test_products_by_pytorchs_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(FILE)], capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
