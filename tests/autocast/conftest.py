"""Each test begins like a process: with halfstep's kernels of products, and nothing seen."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from halfstep._autocast import context, kernels, native
from halfstep._autocast.kernels import observe_ops
from halfstep._pytorch import dispatch


@pytest.fixture(autouse=True)
def _new_watches() -> None:
    for products in native.products.values():
        products.num_holds = 0
        products.watches.clear()
        products.pinned.clear()
        products._lasting.remove()
        products._lasting = dispatch.PythonKernels()
        products.settle()


@pytest.fixture(params=["native", "ours"])
def both_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Apply rules by PyTorch's kernels where they agree, then by halfstep's alone, as traces do."""
    with observe_ops(lambda *_: nullcontext()) if request.param == "ours" else nullcontext():
        yield


@pytest.fixture
def forgotten_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget policies for devices that are not here: blocks that observe ops serve them, too."""
    monkeypatch.setattr(kernels, "_prepared", [*kernels._prepared])
    monkeypatch.setattr(kernels, "_numbers", {**kernels._numbers})
    monkeypatch.setattr(context, "_settled", {})
