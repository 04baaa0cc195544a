"""Measurements of a model with islands: errors, times, casts and ops, each made once."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from msgspec import Struct, convert, to_builtins
from torch import Tensor

from halfstep._autocast import Policy
from halfstep._autocast.access import names_removed
from halfstep._common.formats import dtype_name
from halfstep._common.machine import device_name
from halfstep._tools.json import decoded, to_plain
from halfstep._tools.record.files import has_checksum, line_of
from halfstep._tools.trace.rows import Row
from halfstep._tools.trace.trace import trace
from halfstep._tools.tune.module_check import Comparison, ModuleCheck, origins, worst_of
from halfstep._tools.tune.passes import (
    Lowering,
    Reference,
    StepRunner,
    Task,
    batch_tensors,
    compare_step,
    module_hooks,
    reference_of,
    step_runner,
)
from halfstep._version import __version__
from halfstep.errors import RecordError

# --- measurements in a file -----------------------------------------------------------------------


def fingerprint(task: Task, batches: Sequence[Any], lowering: Lowering) -> dict[str, str]:
    """Return the conditions under which measurements stay valid, as short strings by name."""
    modules = [(name, type(module).__name__) for name, module in task.named_modules()]
    state = [*task.model.parameters(), *task.model.buffers()]
    tensors = list(map(batch_tensors, batches))
    device = task.device(batches[0])
    return {
        "schema": "1",
        "halfstep": __version__,
        "torch": torch.__version__,
        "machine": device_name(device),
        "dtype": dtype_name(lowering.dtype),
        "policy": str(lowering.policy),
        "error": str(lowering.error or "by dtype and depth"),
        "model": f"{type(task.model).__name__} {_hash(str(modules))}",
        "mode": "train" if task.model.training else "eval",
        "weights": _hash(*state),
        "loss": getattr(task.loss_fn, "__qualname__", type(task.loss_fn).__name__),
        "batches": "; ".join(", ".join(map(_described, tensor)) for tensor in tensors),
        "values of the batches": _hash(*chain.from_iterable(tensors)),
    }


def _append(path: Path, event: Mapping[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(line_of(dict(event)))


class _Measurement(Struct, tag_field="event", tag="measured"):
    """A line with a measurement."""

    key: list[Any]
    value: Any


class Measurements:
    """Measurements by key, in memory and optionally in a file, which must be of this tuning."""

    def __init__(self, path: Path | None, fingerprint: Mapping[str, str]) -> None:
        self._known: dict[Hashable, Any] = {}
        self._path = path
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, fingerprint)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, {"event": "tune", **fingerprint})

    def get(self, key: list[Any]) -> Any:
        """Return a measurement, None if it has not been made yet."""
        return self._known.get(json.dumps(key))

    def add(self, key: list[Any], value: Any) -> None:
        plain = to_plain(value)
        self._known[json.dumps(key)] = plain
        if self._path is not None:
            _append(self._path, {"event": "measured", "key": key, "value": plain})

    def __len__(self) -> int:
        return len(self._known)

    def _read(self, path: Path, fingerprint: Mapping[str, str]) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        first, *lines = whole.split(b"\n")
        try:
            header = decoded(dict[str, str], first)
        except ValueError:
            header = {}
        if header.get("event") != "tune":
            raise RecordError(f"{path} is not a record of a tuning: give another file")
        _require_same(path, header, fingerprint)
        if whole != data:  # the last line is incomplete
            path.write_bytes(whole)
        for line in lines:
            with suppress(ValueError):  # a damaged line is measured again
                has_checksum(line)
                event = decoded(_Measurement, line)
                self._known[json.dumps(event.key)] = event.value


def _require_same(path: Path, header: Mapping[str, str], fingerprint: Mapping[str, str]) -> None:
    differs = [
        f"{name}: {header.get(name)!r} there, {value!r} here"
        for name, value in fingerprint.items()
        if header.get(name) != value
    ]
    if differs:
        raise RecordError(
            f"{path} has measurements of something else ({'; '.join(differs)}): give another file, "
            "or restore the same conditions (torch.manual_seed before the model is built)"
        )


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _hash(*values: str | Tensor) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(_described(value).encode())
            held = value.detach().to("cpu").contiguous()
            digest.update(ctypes.string_at(held.data_ptr(), held.nbytes))  # works without NumPy
        else:
            digest.update(value.encode())
    return digest.hexdigest()[:16]


# --- the measurer ---------------------------------------------------------------------------------


ShowProgress: TypeAlias = Callable[[str, int], object]
"""A function that shows the next measurement and the number of finished ones."""


@contextmanager
def show_progress() -> Iterator[ShowProgress]:
    """Show a line on a terminal while the block runs, if rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda what, num_done: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Refreshed only between measurements: a refresh thread would slow them down.
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("measuring", total=None)

        def show(what: str, num_done: int) -> None:
            progress.update(task, description=f"{num_done} measured: {what}", refresh=True)

        yield show


STEP = "(step)"
"""The key of the whole step among module names."""


def timed_step(runner: StepRunner, scale: float, *, lowered: bool) -> dict[str, float]:
    """Run a step and return its seconds, and those of the forward passes of its modules.

    Sync: several for each module on an accelerator.
    """
    now = _clock(runner.task.device(runner.batch))
    begun: dict[tuple[str, int], float] = {}
    seconds: dict[str, float] = {}

    def before(name: str, call: int, _: Any) -> None:
        begun[name, call] = now()

    def after(name: str, call: int, _: Any) -> None:
        seconds[name] = seconds.get(name, 0.0) + now() - begun[name, call]

    begin = now()
    hooks = module_hooks(runner.task, before, after)
    runner.step(hooks, lowered=lowered, scale=scale)
    return {STEP: now() - begin, **seconds}


def ops_of(runner: StepRunner, scale: float) -> tuple[Row, ...]:
    # Some modules run other ops if they have hooks, as they do in a comparison.
    hooks = module_hooks(runner.task, lambda *_: None, lambda *_: None)
    with trace(runner.task.model) as traced:
        runner.step(hooks, lowered=True, scale=scale)
    return traced.ops


def _clock(device: str) -> Callable[[], float]:
    """Return a clock that synchronizes the device first."""
    if device == "cpu":
        return time.perf_counter

    def now() -> float:
        torch.get_device_module(device).synchronize()
        return time.perf_counter()

    return now


Islands: TypeAlias = tuple[str, ...]
"""Names of modules, ops in modules, and ops everywhere.

Examples: ``"blocks.0.mlp"``, ``"softmax@blocks.0.attn"``, ``"cross_entropy_loss@"``.
"""


@dataclass(frozen=True)
class IslandTrial:
    """The result of a model with some islands."""

    num_failing: int  # modules out of bounds, and 1 more if the loss is not finite
    origins: tuple[str, ...]  # the modules where failures begin; ops if outside of modules
    suspects: tuple[str, ...]  # all possible islands, in the order in which to try them


ROUNDS = 5
"""The number of timed steps of each kind, after one warm-up in this process."""

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")  # the module names that a rule accepts


@dataclass
class Measurer:
    """The measurements of a task with different islands."""

    task: Task
    batches: Sequence[Any]
    lowering: Lowering
    known: Measurements
    show_progress: ShowProgress
    _reference: tuple[int, Reference] | None = field(default=None, init=False)
    _is_warm: bool = field(default=False, init=False)

    def measure(self, islands: Islands) -> IslandTrial:
        """Compare the model with some islands to float32, for the search."""
        comparisons = self.comparisons(islands)
        rows = worst_of([comparison.rows for comparison in comparisons])
        is_loss_good = all(comparison.is_loss_good for comparison in comparisons)
        num_failing = sum(not row.passed for row in rows) + (not is_loss_good)
        if not num_failing:
            return IslandTrial(0, (), ())
        begin = dict.fromkeys(name for each in comparisons for name in origins(each.rows))
        outside = tuple(f"{op}@" for op in self.ops().get("", ()))
        if "" in begin or not (begin or is_loss_good):
            begin |= dict.fromkeys(outside)
        return IslandTrial(num_failing, tuple(begin), (*outside, *_suspects(rows)))

    def rows(self, islands: Islands) -> list[ModuleCheck]:
        """Return the worst check of each module over the batches."""
        return worst_of([comparison.rows for comparison in self.comparisons(islands)])

    def comparisons(self, islands: Islands) -> list[Comparison]:
        return [self._comparison(islands, number) for number in range(len(self.batches))]

    def _comparison(self, islands: Islands, number: int) -> Comparison:
        def measure() -> Any:
            reference = self._reference_of(number)
            with self._runner(islands, number) as runner:
                return to_builtins(compare_step(runner, reference))

        what = f"batch {number + 1} of {len(self.batches)} with {_islands_text(islands)}"
        values = self._once(["compare", sorted(islands), number], what, measure)
        return convert(values, Comparison, strict=False)  # strict mode rejects "inf"

    def times(self, islands: Islands) -> dict[str, dict[str, float]]:
        """Return median times for ``"fp32"``, ``"lower"`` and, if there are any, ``"islands"``.

        The times are seconds of a step on the first batch, and of the forward pass of each module.
        The kinds are measured in turn, so that other load on the machine affects all of them.
        """
        kinds: dict[str, tuple[Islands, bool]] = {"fp32": ((), False), "lower": ((), True)}
        if islands:
            kinds["islands"] = (islands, True)

        def measure() -> dict[str, dict[str, float]]:
            seconds = {}
            for kind, (kept, lowered) in kinds.items():
                with self._scaled_runner(kept) as (runner, scale):
                    seconds[kind] = timed_step(runner, scale, lowered=lowered)
            return seconds

        rounds = []
        for number in range(ROUNDS):
            key = ["time", sorted(islands), number]
            if self.known.get(key) is None and not self._is_warm:
                self._is_warm = bool(measure())
            rounds.append(self._once(key, f"time, {number + 1} of {ROUNDS}", measure))
        runs = {kind: [each[kind] for each in rounds] for kind in kinds}
        return {
            kind: {name: median(run[name] for run in of if name in run) for name in of[0]}
            for kind, of in runs.items()
        }

    def casts(self, islands: Islands) -> tuple[int, int]:
        """Return the number and the bytes of the casts in a step on the first batch."""

        def measure() -> Any:
            with self._scaled_runner(islands) as (runner, scale):
                casts = [cast for row in ops_of(runner, scale) for cast in row.casts]
            return [len(casts), sum(cast.bytes for cast in casts)]

        num, size = self._once(["casts", sorted(islands)], "casts", measure)
        return num, size

    def ops(self) -> dict[str, list[str]]:
        """Return the ops that rules could keep in float32, for modules that contain modules.

        These ops computed in lower precision in the forward pass. They are grouped by innermost
        module and have the names that rules use. Lowered ops outside of all modules are left out:
        a rule that keeps them in float32 would apply in all modules.
        """

        def measure() -> Any:
            with self._scaled_runner(()) as (runner, scale):
                rows = ops_of(runner, scale)
            found: dict[str, dict[str, None]] = {}
            for row in rows:
                is_low = row.phase == "forward" and row.compute == dtype_name(self.lowering.dtype)
                if is_low and (row.module or row.action != "lower"):
                    found.setdefault(row.module, {})[row.name] = None
            return {module: list(names) for module, names in found.items()}

        ops: dict[str, list[str]] = self._once(["ops"], "ops", measure)
        containers = [row.module for row in self.rows(()) if not (row.is_leaf and row.module)]
        return {name: list(filter(_is_nameable, ops.get(name, []))) for name in containers}

    def _once(self, key: list[Any], what: str, measure: Callable[[], Any]) -> Any:
        if self.known.get(key) is None:
            self.show_progress(what, len(self.known))
            self.known.add(key, measure())
        return self.known.get(key)

    def _reference_of(self, number: int) -> Reference:
        """Return the float32 values of a batch. Only one batch is cached: values may be large."""
        if self._reference is None or self._reference[0] != number:
            self._reference = None
            with self._runner((), number) as runner:
                self._reference = number, reference_of(runner)
        return self._reference[1]

    @contextmanager
    def _scaled_runner(self, islands: Islands) -> Iterator[tuple[StepRunner, float]]:
        """Yield a runner of steps on the first batch, and the scale of its comparison."""
        scale = self._comparison(islands, 0).scale
        with self._runner(islands, 0) as runner:
            yield runner, scale

    @contextmanager
    def _runner(self, islands: Islands, number: int) -> Iterator[StepRunner]:
        lowering = replace(self.lowering, policy=with_islands(self.lowering.policy, islands))
        step = step_runner(self.task, self.batches[number], lowering)
        with names_removed(self.task.model if islands else None), step as runner:
            yield runner


def module_of(island: str) -> str:
    """Return the name of the module that is the island or contains the op."""
    return island.rpartition("@")[2]


def with_islands(policy: Policy, islands: Sequence[str]) -> Policy:
    """Return a policy with rules that keep modules, and ops in modules, in float32."""
    rules = [f"{each.removesuffix('@') if '@' in each else '@' + each}:fp32" for each in islands]
    return policy | "; ".join(rules) if rules else policy


def _is_nameable(op: str) -> bool:
    """Return whether a policy accepts a rule for an op."""
    try:
        Policy(()) | f"{op}:fp32"
    except ValueError:
        return False
    return True


def _suspects(rows: Sequence[ModuleCheck]) -> tuple[str, ...]:
    """Return the possible islands: leaves first, then containers, innermost first."""

    def order(row: ModuleCheck) -> tuple[bool, int, float]:
        depth = 0 if row.is_leaf else -row.module.count(".")
        return not row.is_leaf, depth, -row.added

    return tuple(row.module for row in sorted(rows, key=order) if _NAME.fullmatch(row.module))


def _islands_text(islands: Islands) -> str:
    if len(islands) > 3:
        return f"{len(islands)} modules or ops in fp32"
    return ", ".join(islands) + " in fp32" if islands else "nothing in fp32"
