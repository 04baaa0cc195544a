from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
from tests import device
from tests.simulated import cannot

if TYPE_CHECKING:
    from tests.ranks.pool import Pool

TESTS = Path(__file__).parent

# Under nohup and in the background of a shell, Ctrl-C is ignored, and by every child that a test
# starts too: those that send it to themselves would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What `make quick` leaves out: most of the time of the suite, and little that the rest does not
# touch: modules, and single tests, that compile, start processes, or try very many cases.
SLOW = (
    "autocast/test_checkpoint.py::test_a_compiled_function",
    "autocast/test_compile.py",
    "autocast/test_custom_ops.py::test_a_rule_is_differentiated_and_compiled",
    "autocast/test_functorch.py::test_compiled",
    "autocast/test_functorch.py::test_outside_nothing_changes",
    "autocast/test_gathered.py",
    "autocast/test_islands.py::test_compiled",
    "autocast/test_kernels.py::test_nothing_is_registered_before",
    "autocast/test_kernels.py::test_plain_autocast_is_unchanged_after",
    "autocast/test_module_rules.py::test_a_trace_names_the_rule",
    "autocast/test_module_rules.py::test_compiled",
    "autocast/test_op_audit.py",
    "autocast/test_op_coverage.py",
    "autocast/test_op_lists.py",
    "autocast/test_policy.py::test_a_policy_is_the_same_in_every_process",
    "autocast/test_policy.py::test_text_and_file_give_back_the_policy",
    "autocast/test_sharded.py",
    "autocast/test_sharded_modules.py",
    "autocast/test_tensor_parallel.py",
    "autocast/test_weight_cache.py::test_a_compiled_step_of_held_weights",
    "autocast/test_weight_cache.py::test_a_held_model_is_compiled",
    "autocast/test_weight_libraries.py",
    "cli/test_cli.py",
    "cli/test_run.py",
    "cli/test_tune.py",
    "diagnose/test_faults.py",
    "diagnose/test_hard_cases.py",
    "diagnose/test_ranks.py",
    "diagnose/test_score.py",
    "diagnose/test_sharded.py",
    "diagnose/test_undo.py",
    "diagnose/test_watch.py",
    "doctor/test_programs.py",
    "doctor/test_source.py::test_functions_that_call_each_other_end",
    "doctor/test_source.py::test_there_is_no_false_alarm_in_our_own_code",
    "integrations/test_",
    "numerics/test_measure.py::test_a_large_tensor",
    "numerics/test_rounding.py::test_midpoints",
    "numerics/test_rounding.py::test_random_bits",
    "ranks/test_",
    "record/test_damaged_fuzz.py",
    "record/test_other_code.py::test_a_second_process",
    "record/test_record.py::test_a_killed_run",
    "record/test_record.py::test_a_model_that_is_gone",
    "record/test_several.py",
    "report/test_chromium.py",
    "report/test_page_curves.py::test_a_hundred_thousand_steps",
    "report/test_page_size.py",
    "report/test_summary.py::test_every_layer_of_a_large_run",
    "run/test_",
    "scaler/test_device_state.py::test_an_iteration_is_one_graph",
    "scaler/test_device_state.py::test_inductor",
    "scaler/test_device_state.py::test_the_device_does_the_same_bit_for_bit",
    "scaler/test_reductions.py::test_against_the_loop",
    "scaler/test_scaler_compile.py",
    "scaler/test_scaler_fuzz.py",
    "scaler/test_scaler_machine.py",
    "scaler/test_scaler_outcome.py::test_history_is_bounded",
    "simulate/test_",
    "test_site.py",
    "trace/test_diff.py",
    "trace/test_trace.py::test_torch_compile_is_not_imported",
    "trace/test_waste.py",
    "tune/test_check.py",
    "tune/test_compare.py",
    "tune/test_compiled.py",
    "tune/test_tune.py",
    "test_distributed_examples.py",
    "test_examples.py",
    "test_imports.py",
    "test_pairs.py::test_all_pairs",
    "test_public.py::test_it_can_be_imported_again",
    "test_torch_names.py::test_the_classes_of_checkpoint_that_keep_a_function",
    "test_torch_names.py::test_torch_compile_is_seen",
    "test_typing.py",
)


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    """accelerate keeps the precision of its first Accelerator for the whole process."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "cpu, cuda, or sim:PROFILE, a simulated device: tests/simulated/profiles.py"
    parser.addoption("--device", default="cpu", help=text)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # the workers of pytest-xdist share the cores
    device.choose(config.getoption("--device"))
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # To import the slow modules, and what they need of PyTorch, takes seconds too.
    is_slow = collection_path.relative_to(TESTS).as_posix().startswith(SLOW)
    return True if is_slow and "not slow" in config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SLOW):
            item.add_marker("slow")
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
    # What was imported and collected stays; each collection of garbage would look through it.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else extensions say at the end that these objects leak


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
