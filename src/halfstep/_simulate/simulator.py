"""The dispatch mode that lets the ops of a block compute as if in a format."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.kernels import observed_by
from halfstep._autocast.module_names import without_wrappers
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.policy import Policy
from halfstep._autocast.rule import Rule
from halfstep._pytorch.modes import dispatch_modes
from halfstep._simulate.arithmetic import Arithmetic, Where
from halfstep._simulate.counts import Counts
from halfstep._trace.modules import RunningModules
from halfstep._trace.op_mode import OpMode
from halfstep._trace.ops import op_name
from halfstep._trace.places import Places
from halfstep.errors import CallOrderError


class Simulator(OpMode):  # type: ignore[no-untyped-call]
    """Runs every op of a thread by an arithmetic, and counts what it rounds.

    Args:
        model: The model, whose names the counts have.
        policy: The policy, which says what is lowered.
        arithmetic: How ops compute.
        counts: Where to count.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, arithmetic: Arithmetic, counts: Counts
    ) -> None:
        self.policy = policy
        self.modules = RunningModules(model)
        names: dict[Tensor, str] = {
            leaf: without_wrappers(name) for name, leaf in model.named_parameters()
        }
        self.places = Places(self.modules, lambda leaf: names.get(leaf, ""))
        self._arithmetic, self._counts = arithmetic, counts
        self._numbers = count()
        super().__init__(self.places)

    def under(self, op: str, rule: Rule, active: PolicyOnDevice) -> AbstractContextManager[object]:
        """Take what runs meanwhile for parts of ``op``.

        Args:
            op: The op.
            rule: The rule by which it runs: for float8 one that stands for another.
            active: The policy in force.
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
        where = Where(place.module, phase, lowered, self._counts)
        return self._arithmetic.run(func, args, kwargs, where)


# --- rules ----------------------------------------------------------------------------------------

# One observer of the rules at a time is all there is, for all threads. It is shared by the
# simulations of all threads, and tells each op to the innermost one that sees it.
_lock = threading.Lock()
_num_running = 0
_observation = ExitStack()


@contextmanager
def rules_told() -> Iterator[None]:
    """Let the simulators of the block know the rule by which an op runs.

    Raises:
        CallOrderError: Somebody else is told of the rules, a trace.
    """
    global _num_running
    with _lock:
        if not _num_running:
            try:
                _observation.enter_context(observed_by(_tell))
            except CallOrderError as error:
                raise CallOrderError(
                    "simulate cannot run while ops are watched, by a trace for example; leave its "
                    "block first"
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
def _tell(op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
    # The modes of a thread are those of autograd's threads too, on CUDA.
    modes = [mode for mode in dispatch_modes() if isinstance(mode, Simulator)]
    with modes[-1].under(op, rule, policy) if modes else nullcontext():
        yield
