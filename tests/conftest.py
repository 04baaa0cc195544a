from __future__ import annotations

import atexit
import functools
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
from tests import device
from tests.simulated import cannot

from halfstep._scaler.guard import SAID

if TYPE_CHECKING:
    from tests.ranks.pool import Pool

# Under nohup and in the background of a shell, Ctrl-C is ignored, and by every child that a test
# starts too: those that send it to themselves would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    """accelerate keeps the precision of its first Accelerator for the whole process."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _no_guard_has_warned() -> None:
    """A guard warns of a cause once in a process."""
    SAID.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "cpu, cuda, or sim:PROFILE, a simulated device: tests/simulated/profiles.py"
    parser.addoption("--device", default="cpu", help=text)
    text = "write what tests compare with files of golden/ into them, to be reviewed as a diff"
    parser.addoption("--accept", action="store_true", help=text)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Returns a function that compares a text with a file in ``golden``, beside the test."""

    def compare(name: str, text: str) -> None:
        file = request.path.parent / "golden" / name
        if request.config.getoption("--accept"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), "after a review: pytest --accept"

    return compare


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # the workers of pytest-xdist share the cores
    device.choose(config.getoption("--device"))
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    # Almost all that a collection of tests makes stays: looking through it takes two seconds.
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that itself needs what the device lacks, or the CPU: oneDNN's bfloat16 LSTM."""
    before = device.num_ops()
    try:
        result = yield
        item.user_properties.append(("used the device", device.num_ops() != before))
        return result
    except Exception as error:
        if device.is_lack_of_the_test(error):
            pytest.skip(f"this device lacks: {error}")
        if not isinstance(error, RuntimeError):
            raise
        if "LSTM forward propagation primitive" not in str(error):
            raise
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise
        pytest.skip(f"this CPU has no kernel: {error}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if device.PROFILE:
        passed = [
            dict(report.user_properties) for report in terminalreporter.stats.get("passed", ())
        ]
        used = sum(each.get("used the device", False) for each in passed)
        terminalreporter.line(f"{used} of these passed on {device.DEVICE}:{device.PROFILE}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if device.DEVICE != "cpu":
        for item in items:
            why = cannot.reason(item.nodeid.removeprefix("tests/"), device.PROFILE)
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if "ranks4" not in config.option.markexpr:  # four processes are started only if asked for
        four = [item for item in items if "ranks4" in item.keywords]
        config.hook.pytest_deselected(items=four)
        items[:] = [item for item in items if "ranks4" not in item.keywords]


def pytest_collection_finish() -> None:
    gc.enable()
    gc.set_threshold(700, 10, 100)  # what tests import in turn, too, takes a fifth of a second
    _freeze(len(sys.modules) // 400)
    # Else extensions say at the end that these objects leak. Earlier than that, it would be looked
    # through for each of the collections with which pytest itself ends.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    _freeze(len(sys.modules) // 400)  # once more when a test has imported torch._dynamo, or so


@functools.cache
def _freeze(_: int) -> None:
    """Keep what stays out of collections of garbage, and out of searches for live optimizers."""
    gc.collect()
    gc.freeze()


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
