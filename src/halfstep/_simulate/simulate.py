"""The context manager that runs a model as if in a lower precision."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from halfstep._autocast.context import default_device
from halfstep._autocast.named_modules import name_modules
from halfstep._autocast.names import did_you_mean
from halfstep._autocast.policy import Policy
from halfstep._common.force_eager import eager
from halfstep._numerics.formats import FORMATS, Format
from halfstep._pytorch import amp, compiler
from halfstep._simulate import text
from halfstep._simulate.arithmetic import Arithmetic
from halfstep._simulate.autocasting import autocast_forward, without_lowering
from halfstep._simulate.counts import Count, Counts
from halfstep._simulate.halves import Halves
from halfstep._simulate.products import Products
from halfstep._simulate.simulator import Simulator, rules_told
from halfstep.errors import CallOrderError

_EAGER = "compiled code ran eager: no op of it can be simulated when it runs compiled"
_NOT_RUN = "no module of the model ran: is it the one that was called?"


class simulate:
    """Run a block as if in a lower precision, and count the values that do not survive it.

    What the policy lowers, and its gradients, have the values that they would have on hardware
    with that format; nothing else changes, and nothing stays changed after the block. float16 and
    bfloat16 are autocast, with results computed in float32 and rounded once. With the formats of
    eight bits, the operands of matrix products and convolutions are rounded, clipped to the
    largest value, and results stay wide. docs/simulate.md says what is simulated and what is not.

    The forward pass, the loss and the backward pass belong in the block; autocast need not be
    entered in it.

    Args:
        model: The model, whose names the counts have.
        dtype: ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2``, or ``"fp16"``, ``"bf16"``, ``"e4m3"``, ``"e5m2"``.
        policy: A :class:`Policy` or its text: which ops are lowered.
        scale_by_amax: For the formats of eight bits: round each operand as a multiple of a power
            of two of its own, chosen so that its largest value just fits.

    Raises:
        TypeError: ``model`` is no module, or ``policy`` neither of the two.
        ValueError: There is no such format; the policy is wrong; ``scale_by_amax`` with a format
            of sixteen bits.
        CallOrderError: A trace is running, this object has run before, or it is left in another
            thread than it was entered in.

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
                "tell where values are lost"
            )
        self.format = _format(dtype)
        self.policy = _policy(policy)
        self._clips = self.format.dtype.itemsize == 1
        if scale_by_amax and not self._clips:
            raise ValueError(
                f"simulate: scale_by_amax is for e4m3 and e5m2; {self.format.name} is used without "
                "a scale for each tensor, with a GradScaler for the gradients"
            )
        # What autocast is told to do: for eight bits to leave what it lowers to the arithmetic.
        self._autocast = without_lowering(self.policy) if self._clips else self.policy
        if self._autocast.module_rules:
            name_modules(model, self._autocast)
        arithmetic: Arithmetic = (
            Products(self.format, scale_by_amax=scale_by_amax)
            if self._clips
            else Halves(self.format)
        )
        self._counts = Counts(self.format)
        self._devices = _devices(model)
        self._is_compiled = any(map(compiler.is_compiled, model.modules()))
        self._simulator: Simulator | None = Simulator(model, self.policy, arithmetic, self._counts)
        self._has_run = False
        self.notes: tuple[str, ...] = ()
        self._stack, self._thread = ExitStack(), threading.get_ident()

    def __enter__(self) -> Self:
        if self._simulator is None or self._has_run:
            raise CallOrderError(
                "this simulation has run; make another: with halfstep.simulate(model) as s"
            )
        lower = torch.bfloat16 if self._clips else self.format.dtype
        with ExitStack() as stack:
            stack.enter_context(rules_told())
            stack.enter_context(self._simulator.modules.watched())
            if self._is_compiled:
                stack.enter_context(eager(has_global_hooks=True))
            stack.enter_context(autocast_forward(self._devices, lower, self._autocast))
            stack.enter_context(self._simulator)
            self._stack = stack.pop_all()
        self._has_run, self._thread = True, threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.get_ident() != self._thread:
            raise CallOrderError(
                "a simulation is left in a thread that did not enter it, and runs on; leave it in "
                "the thread that it was entered in"
            )
        self._stack.close()
        assert self._simulator is not None
        notes = [_EAGER] if self._is_compiled else []
        self.notes = (*notes, *([] if self._simulator.modules.have_run else [_NOT_RUN]))
        self._simulator = None  # and with it the model

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary of plain values for each module and phase, the worst first.

        Keys: ``module``, ``phase`` (``"forward"``, ``"recompute"``, ``"backward"``), ``values``
        that were rounded, how many of them ``saturated`` (became inf, or the largest value in
        eight bits) and ``flushed`` (became zero), the largest finite magnitude ``amax``, and the
        ``share`` that was saturated or flushed. Sync: waits for the device.
        """
        return [row.plain() for row in self._rows()]

    def table(self) -> str:
        """Return the rows as text, under a line that names the worst. Sync: as :meth:`rows`."""
        return text.table(self._rows(), self.format, clips=self._clips, notes=self.notes)

    def _rows(self) -> list[Count]:
        # An inf costs the whole step; what is clipped costs no more than what is flushed.
        def badness(row: Count) -> tuple[float, float]:
            lost = (row.saturated / row.values, row.flushed / row.values)
            return (sum(lost), lost[0]) if self._clips else lost

        return sorted(self._counts.rows(), key=badness, reverse=True)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<simulate: {text.summary(self._rows(), self.format)}, policy {self.policy}>"


def _format(dtype: torch.dtype | str) -> Format:
    for name, format in FORMATS.items():
        if dtype == name or dtype is format.dtype:
            return format
    known = ", ".join(f"{name!r} ({format.dtype})" for name, format in FORMATS.items())
    near = did_you_mean(dtype, FORMATS) if isinstance(dtype, str) else ""
    raise ValueError(f"simulate knows no format {dtype!r}{near}; it knows {known}")


def _policy(policy: Policy | str) -> Policy:
    if isinstance(policy, str):
        return Policy.parse(policy)
    if not isinstance(policy, Policy):
        raise TypeError(
            "simulate: policy is a Policy or its text, such as 'standard; softmax:lower', got "
            f"{policy!r}"
        )
    return policy


def _devices(model: nn.Module) -> list[str]:
    """Return the device types that the model is on and autocast knows."""
    tensors = (*model.parameters(), *model.buffers())
    types = dict.fromkeys(tensor.device.type for tensor in tensors)
    return [t for t in types if t in amp.autocast_devices()] or [default_device()]
