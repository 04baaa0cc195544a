"""The tests of the integrations are slow: each imports a framework."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder, and only these: pytest asks the conftest.py beside them."""
    item.add_marker("slow")
