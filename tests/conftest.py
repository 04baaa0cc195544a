from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from tests.ranks.pool import Pool


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the workers of pytest-xdist share the cores
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if "ranks4" not in config.option.markexpr:  # four processes are started only if asked for
        four = [item for item in items if "ranks4" in item.keywords]
        config.hook.pytest_deselected(items=four)
        items[:] = [item for item in items if "ranks4" not in item.keywords]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two ranks; the processes start at the first ``run``."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four ranks, for tests that are marked ``ranks4``."""
    yield from _pool(4)


def _pool(num_ranks: int) -> Iterator[Pool]:
    # Imported here: most tests have one rank only.
    from tests.ranks.pool import Pool

    pool = Pool(num_ranks)
    yield pool
    pool.close()
