"""The public surface: names and docstrings. What an import loads: test_imports.py."""

from importlib.metadata import version
from pathlib import Path

import pytest
from tests import forked

import halfstep

NAMES = """
CallOrderError Diagnosis Dynamic GradScaler Guard Outcome Policy Reason Rule Static
__version__ autocast custom_bwd custom_fwd diagnose doctor float32_weights guard
is_autocast_available keep lost_updates master_weights preset record self_check trace tune
use_policy
"""
PUBLIC = set(NAMES.split())


def test_the_public_names_are_these() -> None:
    assert set(halfstep.__all__) == PUBLIC
    assert all(hasattr(halfstep, name) for name in PUBLIC)


def test_the_version_stands_in_one_place() -> None:
    assert version("halfstep") == halfstep.__version__


@pytest.mark.parametrize(
    "name",
    sorted(
        PUBLIC - {"__version__", "CallOrderError", "Reason", "custom_bwd", "is_autocast_available"}
    ),
)
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(halfstep, name).__doc__ or "")


@pytest.mark.slow
def test_it_can_be_imported_again() -> None:
    """After ``reload`` and after ``del sys.modules[...]``; what is left of the first goes on."""
    done = forked.python(Path(__file__).parent / "corpus" / "again.py", cwd=Path.cwd())
    assert done.out.split() == ["1.7321"] * 4, done.err
