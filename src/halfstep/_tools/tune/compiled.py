"""Comparison of separately compiled modules with their eager code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._autocast import Region, Settings, current_settings
from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.nested import map_tensors, tensors_in
from halfstep._common.numbers import listed, things
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch import modes
from halfstep._pytorch.compiler import compiled_anew, lacks_cpp_compiler, raised_inside
from halfstep._tools.trace.rows import short
from halfstep._tools.tune.measurer import ShowProgress
from halfstep._tools.tune.module_check import (
    BoundedError,
    Difference,
    ModuleCheck,
    check_lines,
    differences_of,
    error_text,
    is_leaf,
    is_within,
    module_name,
    short_dtype,
)
from halfstep._tools.tune.passes import (
    StepRunner,
    TensorCopies,
    TensorPlace,
    compare_step,
    module_hooks,
    reference_of,
    tensor_hooks,
)
from halfstep._tools.tune.tolerances import MOST, SPREAD, Depths, tolerance_beside

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


def check_compiled(runner: StepRunner, backend: str, show_progress: ShowProgress) -> CompiledCheck:
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
        found = _Beside(runner, backend, name, modules[name], calls)
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
        runner.lowering.dtype,
        backend,
        scale,
    )


class NotComparable(Exception):  # noqa: N818
    """An error for a module that cannot be compared; the message gives the reason."""


@dataclass
class _Beside:
    """The comparison of one compiled module with its eager code."""

    runner: StepRunner
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
        wanted = self._repeated("does not run alone in float32", lowered=False, change=Tensor.float)
        if not any(each.output for each in wanted):
            return None
        near = self._repeated("does not run alone in float32", lowered=False, change=_perturbed)
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
            dtype, unavoidable = self.runner.lowering.dtype, of_near[kind].error
            bound = tolerance_beside(dtype, ops, self._longest(), size, error, unavoidable)
            return self.runner.lowering.error or bound

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
        given = [tensor for call in self.calls for tensor in tensors_in([call.args, call.kwargs])]
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
        if not _is_same(first.output, second.output):
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
        kinds = [[_described(each) for each in run.output] for run in (by_compiled, by_eager)]
        if kinds[0] != kinds[1]:
            returned = [listed(kind) or "nothing" for kind in kinds]
            return f"returns {returned[0]}, eager code {returned[1]}"
    return ""


def _described(tensor: Tensor) -> str:
    return f"{short(dtype_name(tensor.dtype))}{list(tensor.shape)}"


def _differences(seen: Sequence[Repetition], wanted: Sequence[Repetition]) -> dict[str, Difference]:
    """Return the differences from float32, by kind."""
    calls = list(zip(seen, wanted, strict=True))
    return {
        kind: differences_of(
            (torch.zeros_like(value) if tensor is None else tensor, value)
            for one, other in calls
            for tensor, value in zip_longest(getattr(one, kind), getattr(other, kind))
            if value is not None
        )
        for kind in WHAT
    }


def _innermost(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons, without modules that contain another module with a reason."""
    return {
        name: why
        for name, why in reasons.items()
        if not any(is_within(other, name) for other in reasons)
    }


# --- modules that run alone -----------------------------------------------------------------------


@dataclass
class ModuleCall:
    """A recorded call of a module in a step.

    Attributes:
        args: A copy of its positional arguments.
        kwargs: A copy of its keyword arguments.
        settings: The autocast settings around the call.
        gradients: The gradients of its floating-point outputs, by position; some may be missing.
    """

    args: Any
    kwargs: Any
    settings: Settings
    gradients: dict[int, Tensor] = field(default_factory=dict)


def calls_of(runner: StepRunner, scale: float) -> dict[str, list[ModuleCall]]:
    """Run a step in lower precision and return its module calls by name, outer modules first."""
    calls: dict[str, list[ModuleCall]] = {}
    device = runner.task.device(runner.batch)

    def before(name: str, _: int, given: Any) -> None:
        args, kwargs = _copied(given)
        call = ModuleCall(args, kwargs, current_settings(device))
        calls.setdefault(name, []).append(call)

    def after(name: str, call: int, output: Any) -> None:
        pass

    def see(place: TensorPlace, tensor: Tensor) -> None:
        if place.kind == "output_gradient":
            calls[place.module][place.call].gradients[place.position] = tensor.detach().clone()

    @contextmanager
    def kept() -> Iterator[None]:
        hooks = module_hooks(runner.task.named_modules(), before, after)
        with hooks, tensor_hooks(runner.task, see):
            yield

    runner.step(kept(), lowered=True, scale=scale)
    return calls


def _copied(given: Any) -> Any:
    """Return a copy of arguments; a tensor that occurs several times is copied once."""
    copies = TensorCopies()

    def copy(tensor: Tensor) -> Tensor:
        if modes.is_inside_functorch(tensor):
            return tensor
        return copies.of(tensor).requires_grad_(tensor.requires_grad)

    return copied(given, copy)


def copied(values: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of arguments in which ``copy(tensor)`` replaces each tensor.

    Objects that modules write to, such as a cache, are copied too; modules are not. If something
    cannot be pickled, only containers and tensors are copied.
    """
    file, kept = io.BytesIO(), list[Any]()
    try:
        _Pickler(file, kept).dump(values)
        copies = [copy(each) if isinstance(each, Tensor) else each for each in kept]
        return _Unpickler(io.BytesIO(file.getvalue()), copies).load()
    except (pickle.PickleError, TypeError, AttributeError):
        return map_tensors(copy, values)


class _Pickler(pickle.Pickler):
    """A pickler that puts tensors and modules into a list instead."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a tensor or module, None for values to pickle."""
        if not isinstance(value, (Tensor, nn.Module)):
            return None
        self._kept.append(value)
        return len(self._kept) - 1


class _Unpickler(pickle.Unpickler):
    """An unpickler that takes tensors and modules from a list."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


class Repetition(NamedTuple):
    """The results of a module that ran alone; a missing gradient is None."""

    output: list[Tensor]
    input_gradient: list[Tensor | None]
    parameters: list[Tensor | None]  # their gradients
    depth: int  # the largest depth of an output, in ops
    random: list[Tensor]  # the states of the random number generators after the run


def repeat(
    runner: StepRunner,
    module: nn.Module,
    call: ModuleCall,
    run: Callable[..., Any],
    *,
    lowered: bool = True,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Repetition:
    """Replay a call of a module, forward and backward, from the state before the step.

    Args:
        runner: The runner of the step.
        module: The module for whose parameters gradients are computed.
        call: The recorded call.
        run: The module, or its compiled code.
        lowered: Whether to run under the autocast of the call; otherwise in float32.
        change: A function that is applied to each floating-point input.
    """
    leaves: list[Tensor] = []
    given: dict[int, Tensor] = {}

    def fresh(tensor: Tensor) -> Tensor:
        if id(tensor) not in given:
            leaf = tensor.detach().clone()
            if change is not None and leaf.is_floating_point():
                leaf = change(leaf)
            if tensor.requires_grad:
                leaves.append(leaf.requires_grad_())
                leaf = leaf.clone()  # leaves cannot be modified in place
            given[id(tensor)] = leaf
        return given[id(tensor)]

    args, kwargs = copied((call.args, call.kwargs), fresh)
    runner.reset()
    with Region(call.settings) if lowered else nullcontext():
        found = run(*args, **kwargs)
    outputs = [each for each in tensors_in([found]) if each.is_floating_point()]
    depth = max((Depths().of(output) for output in outputs), default=0)
    values = [output.detach().clone() for output in outputs]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = _gradients(outputs, call.gradients, [*leaves, *parameters])
    states = RandomStates(accelerators()).tensors
    num = len(leaves)
    return Repetition(values, gradients[:num], gradients[num:], depth, states)


def _gradients(
    outputs: list[Tensor], arrived: dict[int, Tensor], leaves: list[Tensor]
) -> list[Tensor | None]:
    roots = [
        (output, arrived[position].to(output.dtype))
        for position, output in enumerate(outputs)
        if position in arrived and output.requires_grad
    ]
    if not roots or not leaves:
        return [None] * len(leaves)
    tensors, seeds = zip(*roots, strict=True)
    found = torch.autograd.grad(tensors, leaves, seeds, allow_unused=True)
    return [None if each is None else each.detach() for each in found]


def _perturbed(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 with each entry off by SPREAD roundings, randomly up or down."""
    off = SPREAD * torch.finfo(torch.float32).eps / 2
    signs = torch.rand_like(tensor, dtype=torch.float32).round() * 2 - 1
    return tensor.float() * (1 + off * signs)
