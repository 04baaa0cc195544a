"""Comparison of separately compiled modules with their eager code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._common.numbers import listed, things
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch.compiler import compiled_anew, lacks_cpp_compiler, raised_inside
from halfstep._trace.rows import short
from halfstep._tune.alone import ModuleCall, Repetition, calls_of, float32, perturbed, repeat
from halfstep._tune.measurer import ShowProgress
from halfstep._tune.module_check import (
    BoundedError,
    Difference,
    ModuleCheck,
    check_lines,
    difference,
    error_text,
    is_leaf,
    is_within,
    module_name,
    short_dtype,
)
from halfstep._tune.passes import Lowering, StepRunner, compare_step, reference_of
from halfstep._tune.tolerances import MOST, tolerance_beside

INDUCTOR = "inductor"
"""The default backend of torch.compile."""
WHAT = {
    "output": "output",
    "input_gradient": "gradient of its inputs",
    "parameters": "gradient of its parameters",
}
"""Descriptions of the compared tensors, by kind."""
NO_CPP_COMPILER = (
    "self_check(compiled=True): torch.compile finds no C++ compiler. Install one (g++ or clang), "
    "or name it in the environment variable CXX; compiled='aot_eager' needs none, and compares all "
    "of torch.compile but the code that it generates"
)


@dataclass(frozen=True)
class CompiledModule(ModuleCheck):
    """The check of a compiled module, run on the inputs and gradients of eager code.

    As in ``ModuleCheck``, errors are relative to float32 results, here for the same inputs.

    Attributes:
        parameter_tolerance: The largest permitted error of the gradients of its parameters;
            ``gradient_tolerance`` applies to the gradients of its inputs.
        problem: A difference in dtypes or shapes, ``"returns fp32[8, 4], eager code fp16[8, 4]"``;
            empty if there is none.
    """

    parameter_tolerance: float
    problem: str

    @property
    def gradient(self) -> BoundedError:
        """The gradient error of inputs or parameters, the larger one relative to its tolerance."""
        of_inputs = BoundedError(self.input_gradient.error, self.gradient_tolerance)
        of_parameters = BoundedError(self.parameters.error, self.parameter_tolerance)
        return max(of_inputs, of_parameters, key=BoundedError.severity)

    @property
    def passed(self) -> bool:
        """Whether its outputs and gradients are within tolerance, and nothing else differs."""
        return not self.problem and self.is_output_good and self.are_gradients_good


@dataclass(frozen=True)
class CompiledCheck:
    """The result of ``self_check(..., compiled=True)``; its ``str()`` is a table.

    Attributes:
        rows: The compared modules, worst first; ``""`` is the whole model.
        origins: The names of the modules where differences begin: no module inside them differs
            when it is compiled alone.
        not_compared: The reasons why modules could not be compared, by module name.
        breaks: The reasons for graph breaks, by module name; for nested modules only the
            innermost.
        dtype: The lower precision.
        backend: The backend of torch.compile.
        scale: The scale of the loss.
    """

    rows: tuple[CompiledModule, ...]
    origins: tuple[str, ...]
    not_compared: Mapping[str, str]
    breaks: Mapping[str, str]
    dtype: torch.dtype
    backend: str
    scale: float

    @property
    def passed(self) -> bool:
        """Whether at least one module was compared, and all compared modules passed."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def __str__(self) -> str:
        notes = {row.module: row.problem for row in self.rows}
        left = [f"not compared: {module_name(k)}: {why}" for k, why in self.not_compared.items()]
        breaks = [f"graph break: {module_name(k)}: {why}" for k, why in self.breaks.items()]
        table = check_lines(self.rows, self.origins, notes) if self.rows else []
        return "\n".join([self._summary(), "", *table, *left, *breaks])

    def _summary(self) -> str:
        low, num = short_dtype(self.dtype), things(len(self.rows), "module")
        by = f"compiled alone by {self.backend}"
        if not self.rows:
            return f"FAILED: no module could be compared, {by} and eager, in {low}"
        left = things(len(self.not_compared), "module")
        also = f"; {left} could not be compared" if self.not_compared else ""
        if self.passed:
            return f"passed: {num}, {by}, agree with eager code in {low}{also}"
        num_failed = sum(not row.passed for row in self.rows)
        text = f"FAILED: {num_failed} of {num}, {by}, differ too much from eager code in {low}"
        text += f"; it begins in {listed([module_name(name) for name in self.origins])}"
        around = [module_name(name) for name in self._spanning()]
        return text + (f"; no part of {listed(around)} differs alone" if around else "") + also

    def _spanning(self) -> list[str]:
        """Return the origins that contain modules, all of which were compared."""
        modules = {row.module: row for row in self.rows}
        return [
            name
            for name in self.origins
            if not modules[name].is_leaf
            and not any(is_within(other, name) for other in self.not_compared)
        ]

    def __repr__(self) -> str:
        result = "passed" if self.passed else "FAILED"
        return f"<CompiledCheck {self.backend} {result}, {things(len(self.rows), 'module')}>"


def check_compiled(
    runner: StepRunner, lowering: Lowering, backend: str, show_progress: ShowProgress
) -> CompiledCheck:
    """Compile each module alone and compare it with its eager code.

    Raises:
        RuntimeError: The backend needs a C++ compiler, and there is none.
    """
    show_progress("a step of eager code", 0)
    scale = compare_step(runner, reference_of(runner)).scale
    modules = dict(runner.task.named_modules())
    rows: list[CompiledModule] = []
    not_compared: dict[str, str] = {}
    breaks: dict[str, str] = {}
    for number, (name, calls) in enumerate(calls_of(runner, scale).items()):
        show_progress(f"{module_name(name)}, compiled by {backend}", number)
        found = _Beside(runner, lowering, backend, name, modules[name], calls)
        try:
            row = found.row()
        except NotComparable as error:
            not_compared[name] = str(error)
        else:
            if row is not None:
                rows.append(row)
        if found.breaks:
            breaks[name] = "; ".join(found.breaks)
    failing = [row.module for row in rows if not row.passed]
    begin = list(_innermost(dict.fromkeys(failing, "")))
    rows.sort(key=lambda row: (row.module not in begin, row.passed, -row.severity))
    return CompiledCheck(
        tuple(rows),
        tuple(begin),
        not_compared,
        _innermost(breaks),
        lowering.dtype,
        backend,
        scale,
    )


class NotComparable(Exception):  # noqa: N818
    """An error for a module that cannot be compared; the message gives the reason."""


@dataclass
class _Beside:
    """The comparison of one compiled module with its eager code."""

    runner: StepRunner
    lowering: Lowering
    backend: str
    name: str
    module: nn.Module
    calls: Sequence[ModuleCall]
    breaks: tuple[str, ...] = field(default=(), init=False)

    def row(self) -> CompiledModule | None:
        """Return the comparison, None if the module returns no floating-point tensor.

        Raises:
            NotComparable: The module cannot be run alone, or its results are not repeatable.
        """
        wanted = self._repeated("does not run alone in float32", lowered=False, change=float32)
        if not any(each.outputs for each in wanted):
            return None
        near = self._repeated("does not run alone in float32", lowered=False, change=perturbed)
        eager = self._repeated("does not run alone")
        with compiled_anew() as captured:
            compiled = torch.compile(self.module, backend=self.backend, options=self._options())
            seen = self._repeated("does not compile", compiled)
            self.breaks = captured().breaks
            if not captured().num_graphs and max(each.depth for each in eager) > 1:
                self.breaks = self.breaks or ("torch.compile makes no graph of it",)
        again = self._repeated("does not run alone")
        _require_repeatable(eager, again, seen)
        return self._row(wanted, near, eager, seen)

    def _repeated(
        self,
        problem: str,
        run: Callable[..., Any] | None = None,
        *,
        lowered: bool = True,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Repetition]:
        """Replay all calls with eager or compiled code."""
        function = self.module if run is None else run
        try:
            return [
                repeat(self.runner, self.module, call, function, lowered=lowered, change=change)
                for call in self.calls
            ]
        except Exception as error:
            if lacks_cpp_compiler(error):
                raise RuntimeError(NO_CPP_COMPILER) from error
            inner = raised_inside(error)
            text = str(inner).strip().partition("\n")[0]
            raise NotComparable(f"it {problem}: {type(inner).__name__}: {text}") from error

    def _options(self) -> dict[str, Any] | None:
        # Otherwise Inductor uses its own random numbers, and dropout drops other entries.
        return {"fallback_random": True} if self.backend == INDUCTOR else None

    def _row(
        self,
        wanted: list[Repetition],
        near: list[Repetition],
        eager: list[Repetition],
        seen: list[Repetition],
    ) -> CompiledModule:
        of_eager, of_near = _differences(eager, wanted), _differences(near, wanted)
        depth = max(each.depth for each in wanted)

        def tolerance(kind: str, ops: int) -> float:
            error, size = of_eager[kind].error, of_eager[kind].size
            if error > MOST:
                raise NotComparable(
                    f"the {WHAT[kind]} of its eager code is off from float32 by "
                    f"{error_text(error)}: self_check without compiled= tells where that begins"
                )
            dtype, unavoidable = self.lowering.dtype, of_near[kind].error
            bound = tolerance_beside(dtype, ops, self._longest(), size, error, unavoidable)
            return self.lowering.error or bound

        found = _differences(seen, wanted)
        return CompiledModule(
            self.name,
            type(self.module).__name__,
            is_leaf(self.module),
            tolerance("output", depth),
            tolerance("input_gradient", 2 * depth),
            Difference(),  # inputs and output gradients are the same for both
            found["output"],
            Difference(),
            found["input_gradient"],
            found["parameters"],
            tolerance("parameters", 2 * depth),
            _problem(eager, seen),
        )

    def _longest(self) -> int:
        """Return the largest dimension of the module's inputs and parameters."""
        given = [tensor for call in self.calls for tensor in call.tensors()]
        sizes = [size for each in (*given, *self.module.parameters()) for size in each.shape]
        return max(sizes, default=1)


def _require_repeatable(
    eager: Sequence[Repetition], again: Sequence[Repetition], seen: Sequence[Repetition]
) -> None:
    """Check that only compilation can cause differences.

    Raises:
        NotComparable: They can have another cause.
    """
    for first, second, compiled in zip(eager, again, seen, strict=True):
        if not _is_same(first.outputs, second.outputs):
            raise NotComparable(
                "its eager code returns something else each time: it keeps state in an argument "
                "that cannot be copied, such as a cache (use_cache=False), or draws random numbers "
                "of its own"
            )
        if not _is_same(first.random, compiled.random):
            raise NotComparable(
                "compiled code draws other random numbers than eager code: compare in eval()"
            )


def _is_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        each.shape == other.shape and torch.equal(each.nan_to_num(), other.nan_to_num())
        for each, other in zip(some, others, strict=True)
    )


def _problem(eager: Sequence[Repetition], seen: Sequence[Repetition]) -> str:
    """Return a difference in dtypes or shapes, empty if there is none."""
    for by_eager, by_compiled in zip(eager, seen, strict=True):
        kinds = [[_described(each) for each in run.outputs] for run in (by_compiled, by_eager)]
        if kinds[0] != kinds[1]:
            returned = [listed(each) or "nothing" for each in kinds]
            return f"returns {returned[0]}, eager code {returned[1]}"
    return ""


def _described(tensor: Tensor) -> str:
    return f"{short(dtype_name(tensor.dtype))}{list(tensor.shape)}"


def _differences(seen: Sequence[Repetition], wanted: Sequence[Repetition]) -> dict[str, Difference]:
    """Return the differences from float32, by kind."""
    found = {kind: Difference() for kind in WHAT}
    for one, other in zip(seen, wanted, strict=True):
        for kind, some, right in (
            ("output", one.outputs, other.outputs),
            ("input_gradient", one.input_gradients, other.input_gradients),
            ("parameters", one.parameter_gradients, other.parameter_gradients),
        ):
            for tensor, value in zip_longest(some, right):
                if value is not None:
                    tensor = torch.zeros_like(value) if tensor is None else tensor
                    found[kind] += difference(tensor, value)
    return found


def _innermost(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons, without modules that contain another module with a reason."""
    return {
        name: why
        for name, why in reasons.items()
        if not any(is_within(other, name) for other in reasons)
    }
