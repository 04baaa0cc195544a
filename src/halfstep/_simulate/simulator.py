"""Simulator: the dispatch mode that runs the ops of a block by a simulated arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.kernels import PolicyOnDevice, observed_by
from halfstep._autocast.policy import Policy
from halfstep._autocast.rule import Rule
from halfstep._pytorch.modes import dispatch_modes
from halfstep._simulate.arithmetic import Arithmetic, OpContext
from halfstep._simulate.counts import RoundingCounts
from halfstep._trace.ops import OpMode, op_name
from halfstep._trace.places import OpPlaces, RunningModules
from halfstep.errors import CallOrderError


class Simulator(OpMode):  # type: ignore[no-untyped-call]
    """Runs every op of a thread by an arithmetic, and counts what it rounds.

    Args:
        model: The model; counts have the names of its modules.
        policy: The policy, which decides what is lowered.
        arithmetic: How ops compute.
        counts: The counts to add to.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, arithmetic: Arithmetic, counts: RoundingCounts
    ) -> None:
        self.policy = policy
        self.modules = RunningModules(model)
        self.places = OpPlaces(self.modules)
        self._arithmetic, self._counts = arithmetic, counts
        self._numbers = count()
        super().__init__(self.places)

    def under(self, op: str, rule: Rule, active: PolicyOnDevice) -> AbstractContextManager[object]:
        """Count the ops of the block as parts of ``op``.

        Args:
            op: The op.
            rule: The rule by which it runs; for float8 the replacement of another one.
            active: The active policy.
        """
        dtype = torch.get_autocast_dtype(active.device)
        meant = self.policy.rule(op, active.device, dtype, active.phase(), active.module)
        return self.places.under(op, meant or rule, active)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op and return its result."""
        place, phase = self.places.place(op_name(func), next(self._numbers), is_cast=False)
        lowered = place.rule is not None and place.rule.endswith(":lower")
        where = OpContext(place.module, phase, lowered, self._counts)
        return self._arithmetic.run(func, args, kwargs, where)


# --- rules ----------------------------------------------------------------------------------------

# There is one observer of rules at a time, for all threads. The simulations of all threads share
# it; it passes each op to the innermost simulation that sees it.
_lock = threading.Lock()
_num_running = 0
_observation = ExitStack()


@contextmanager
def rules_observed() -> Iterator[None]:
    """Pass the rule of each op to the simulators of the block.

    Raises:
        CallOrderError: Another observer of rules is active, such as a trace.
    """
    global _num_running
    with _lock:
        if not _num_running:
            try:
                _observation.enter_context(observed_by(_observe))
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
    modes = [mode for mode in dispatch_modes() if isinstance(mode, Simulator)]
    with modes[-1].under(op, rule, policy) if modes else nullcontext():
        yield
