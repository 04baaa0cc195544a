import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the workers of pytest-xdist share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
