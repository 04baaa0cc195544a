"""Simulation context, with a dispatch mode that runs ops in simulated arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep._autocast import Policy, Region, Rule, Settings, default_device, name_modules
from halfstep._autocast.access import with_policy
from halfstep._common.text import did_you_mean
from halfstep._numerics.formats import FORMATS, Format
from halfstep._pytorch import amp, compiler
from halfstep._pytorch.compiler import eager
from halfstep._pytorch.modes import dispatch_modes
from halfstep._tools.simulate.arithmetic import (
    Args,
    Arithmetic,
    Float8Arithmetic,
    HalfArithmetic,
    Kwargs,
    OpContext,
    RoundingCount,
    RoundingCounts,
    counts_text,
    summary_text,
)
from halfstep._tools.trace.ops import NOT_RUN, OpMode, RunningModules, op_name
from halfstep.errors import CallOrderError
from halfstep.events import PolicyOnDevice, observe_ops

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@contextmanager
def autocast_forward(devices: list[str], dtype: torch.dtype, policy: Policy) -> Iterator[None]:
    """Enter autocast for the forward passes of a block, even with a dtype the device lacks.

    Casts of weights are not cached, so that each is counted and none outlives the block.
    """
    with ExitStack() as stack:
        for device in devices:
            switches = amp.Switches(device, dtype, True, False)
            settings = with_policy(Settings(switches, None, inherit=False), policy)
            stack.enter_context(Region(settings))
        stack.enter_context(_OffInBackward(devices))
        yield


@cache
def without_lowering(policy: Policy) -> Policy:
    """Return a policy with rules for the same ops, but float32 where ``policy`` lowers.

    Autocast cannot lower to float8. Lowering to float32 does not work either: checkpointed
    functions would be recomputed without autocast.
    """
    return Policy(
        replace(rule, action="fp32") if rule.action in ("lower", "fp32-out") else rule
        for rule in policy.rules
    )


class _OffInBackward(TorchFunctionMode):
    """A mode that turns autocast off in backward passes: it could lower ops that ran in float32."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with ExitStack() as stack:
            if func in _BACKWARD:
                for device in self._devices:
                    outside = amp.autocast_switches(device)
                    switches = outside._replace(enabled=False)
                    stack.enter_context(Region(Settings(switches, None, inherit=False)))
            return func(*args, **(kwargs or {}))


_EAGER = "compiled code ran in eager mode: ops of compiled code cannot be simulated"


class simulate:
    """Run a block as if in a lower precision, and count the values that do not survive it.

    Ops that the policy lowers, and their gradients, have the values that they would have on
    hardware with that format. Nothing else changes, and nothing stays changed after the block.
    float16 and bfloat16 use autocast, with results computed in float32 and rounded once. In the
    formats of eight bits, the operands of matrix products and convolutions are rounded, clipped to
    the largest value, and results stay wide. docs/simulate.md lists what is simulated.

    The forward pass, the loss and the backward pass belong in the block; it need not enter
    autocast.

    Args:
        model: The model; counts have the names of its modules.
        dtype: ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2``, or ``"fp16"``, ``"bf16"``, ``"e4m3"``, ``"e5m2"``.
        policy: A :class:`Policy` or its text: which ops are lowered.
        scale_by_amax: For the formats of eight bits: scale each operand by a power of two for the
            rounding, chosen so that its largest value just fits.

    Raises:
        TypeError: ``model`` is not a module, or ``policy`` is neither a policy nor text.
        ValueError: The format is unknown, the policy is invalid, or ``scale_by_amax`` is given for
            a format of sixteen bits.
        CallOrderError: A trace is running, this object has run before, or another thread leaves it
            than entered it.

    Sync: none in the block; the methods wait for the device.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.tensor([[1e5, 1.0]])
        >>> with simulate(model, dtype=torch.float16) as s:
        ...     y = model(x)
        >>> s.rows()[0]["module"], s.rows()[0]["saturated"] >= 1
        ('0', True)
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | str = torch.float16,
        *,
        policy: Policy | str = "standard",
        scale_by_amax: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"simulate({type(model).__name__}): pass the model, a torch.nn.Module: its names "
                "show where values are lost"
            )
        self.format = _format(dtype)
        self.policy = _policy(policy)
        self._clips = self.format.dtype.itemsize == 1
        if scale_by_amax and not self._clips:
            raise ValueError(
                f"simulate: scale_by_amax is for e4m3 and e5m2; {self.format.name} is used with a "
                "GradScaler, without a scale for each tensor"
            )
        # With eight bits autocast lowers nothing: the arithmetic rounds the operands.
        self._autocast = without_lowering(self.policy) if self._clips else self.policy
        if self._autocast.module_rules:
            name_modules(model, self._autocast)
        arithmetic: Arithmetic = (
            Float8Arithmetic(self.format, scale_by_amax=scale_by_amax)
            if self._clips
            else HalfArithmetic(self.format)
        )
        self._counts = RoundingCounts(self.format)
        self._devices = _devices(model)
        self._is_compiled = any(map(compiler.is_compiled, model.modules()))
        # None once it has been entered, which releases the model at the end.
        self._simulator: _Simulator | None = _Simulator(
            model, self.policy, arithmetic, self._counts
        )
        self.notes: tuple[str, ...] = ()
        self._stack, self._thread = ExitStack(), threading.get_ident()

    def __enter__(self) -> Self:
        if self._simulator is None:
            raise CallOrderError(
                "this simulation has run; make another: with halfstep.simulate(model) as s"
            )
        lower = torch.bfloat16 if self._clips else self.format.dtype
        with ExitStack() as stack:
            stack.enter_context(_rules_observed())
            stack.enter_context(self._simulator.modules.followed())
            if self._is_compiled:
                stack.enter_context(eager())
            stack.enter_context(autocast_forward(self._devices, lower, self._autocast))
            stack.enter_context(self._simulator)
            stack.callback(self._note, self._simulator.modules)
            self._stack = stack.pop_all()
        self._simulator, self._thread = None, threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != self._thread:
            raise CallOrderError(
                "a simulation was left in a thread that did not enter it, and is still running; "
                "leave it in the thread that entered it"
            )
        self._stack.close()

    def _note(self, modules: RunningModules) -> None:
        said = {_EAGER: self._is_compiled, NOT_RUN: not modules.have_run}
        self.notes = tuple(note for note, is_so in said.items() if is_so)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary of plain values for each module and phase, the worst first.

        Keys: ``module``, ``phase`` (``"forward"``, ``"recompute"``, ``"backward"``), the number of
        rounded ``values``, how many of them ``saturated`` (became inf, or the largest value in
        eight bits) and ``flushed`` (became zero), the largest finite magnitude ``amax``, and the
        ``share`` that was saturated or flushed. Sync: waits for the device.
        """
        return [row.plain() for row in self._rows()]

    def table(self) -> str:
        """Return the rows as text, after a summary and the worst row. Sync: as :meth:`rows`."""
        return counts_text(self._rows(), self.format, clips=self._clips, notes=self.notes)

    def _rows(self) -> list[RoundingCount]:
        # An inf costs the whole step; a clipped value costs no more than a flushed one.
        def badness(row: RoundingCount) -> tuple[float, float]:
            lost = (row.saturated / row.values, row.flushed / row.values)
            return (sum(lost), lost[0]) if self._clips else lost

        return sorted(self._counts.rows(), key=badness, reverse=True)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<simulate: {summary_text(self._rows(), self.format)}, policy {self.policy}>"


def _format(dtype: torch.dtype | str) -> Format:
    for name, format in FORMATS.items():
        if dtype == name or dtype is format.dtype:
            return format
    known = ", ".join(f"{name!r} ({format.dtype})" for name, format in FORMATS.items())
    near = did_you_mean(dtype, FORMATS) if isinstance(dtype, str) else ""
    raise ValueError(f"simulate: unknown format {dtype!r}{near}; known are {known}")


def _policy(policy: Policy | str) -> Policy:
    if isinstance(policy, str):
        return Policy.parse(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            "simulate: policy must be a Policy or its text, such as 'standard; softmax:lower', "
            f"got {policy!r}"
        )
    return policy


def _devices(model: nn.Module) -> list[str]:
    """Return the device types of the model for which autocast exists."""
    tensors = (*model.parameters(), *model.buffers())
    types = dict.fromkeys(tensor.device.type for tensor in tensors)
    return [t for t in types if t in amp.autocast_devices()] or [default_device()]


# --- the mode -------------------------------------------------------------------------------------


class _Simulator(OpMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that runs every op of a thread in simulated arithmetic and counts."""

    def __init__(
        self, model: nn.Module, policy: Policy, arithmetic: Arithmetic, counts: RoundingCounts
    ) -> None:
        self.policy = policy
        self._arithmetic, self._counts = arithmetic, counts
        self._numbers = count()
        super().__init__(RunningModules(model))

    def under(self, op: str, rule: Rule, active: PolicyOnDevice) -> AbstractContextManager[object]:
        """Attribute the ops in the block to ``op``, which runs by ``rule``."""
        dtype = torch.get_autocast_dtype(active.device)
        # For float8 the rule that runs replaces the one of the policy.
        meant = self.policy.rule(op, active.device, dtype, active.phase(), active.module)
        return self.places.under(op, meant or rule, active)

    def run(self, func: Any, args: Args, kwargs: Kwargs, given: list[Tensor]) -> Any:
        place, phase = self.places.place(op_name(func), next(self._numbers), cast=None)
        lowered = place.rule is not None and place.rule.endswith((":lower", ":fp32-out"))
        where = OpContext(place.module, phase, lowered, self._counts)
        return self._arithmetic.run(func, args, kwargs, where)


# --- rules ----------------------------------------------------------------------------------------

# Only one observer of rules can be active, for all threads. The simulations of all threads share
# it; it passes each op to the innermost simulation that sees it.
_lock = threading.Lock()
_num_running = 0
_observation = ExitStack()


@contextmanager
def _rules_observed() -> Iterator[None]:
    """Pass the rule of each op to the simulators of the block.

    Raises:
        CallOrderError: Another observer of rules is active, such as a trace.
    """
    global _num_running
    with _lock:
        if not _num_running:
            try:
                _observation.enter_context(observe_ops(_observe))
            except CallOrderError as error:
                raise CallOrderError(
                    "simulate cannot run while a trace or another observer of ops is active; leave "
                    "its block first"
                ) from error
        _num_running += 1
    try:
        yield
    finally:
        with _lock:
            _num_running -= 1
            if not _num_running:
                _observation.close()


@contextmanager
def _observe(op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
    # On CUDA the threads of autograd have the modes of the thread that started them.
    modes = [mode for mode in dispatch_modes() if isinstance(mode, _Simulator)]
    with modes[-1].under(op, rule, policy) if modes else nullcontext():
        yield
