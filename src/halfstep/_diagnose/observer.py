"""Observers of the ops of a replay, and the dispatch mode that shows ops to them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from halfstep._autocast.casts import tensors_in
from halfstep._autocast.kernels import PolicyOnDevice
from halfstep._autocast.modules import replicated, without_wrappers
from halfstep._autocast.rule import Rule
from halfstep._diagnose import across_ranks
from halfstep._diagnose.undo import UndoLog
from halfstep._pytorch import compiler
from halfstep._trace.ops import OpMode, casts_to, op_name, written_to
from halfstep._trace.places import OpPlace, OpPlaces, RunningModules
from halfstep._trace.rows import Phase

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""The namespaces of PyTorch's collectives."""
_MADE_OF_OTHERS = ("DTensor", "AsyncCollectiveTensor")
"""The classes of tensors in which ``torch.distributed`` wraps the local part."""
_FOR_COLLECTIVES = ("fsdp::all_gather_copy_in",)
"""Ops that return memory for a collective, in which there are no values yet."""
OpKey = tuple[str, Phase, str, int, str | None, int]
"""Name, phase, module, call, the op that the rule was looked up for, and a running number."""


@dataclass(eq=False, slots=True)
class OpCall:
    """Call of an ATen op.

    Attributes:
        number: The number of the op in the replay, from 0.
        key: Identifies the op in other replays, which may have more or fewer ops.
        func: The op.
        name: Its name, ``"addmm"``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        given: The tensors among both.
        written: The tensors among them that it writes to.
        place: The place that it belongs to.
        phase: The phase in which it runs.
    """

    number: int
    key: OpKey
    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]
    written: list[Tensor]
    place: OpPlace
    phase: Phase


class OpObserver:
    """Observer of the ops of a replay. Ops that it calls itself are not observed."""

    def before(self, call: OpCall) -> None:
        """Observe an op before it runs."""

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Observe the outputs of an op or, if it returns no tensors, those that it wrote to."""

    def before_collective(self, call: OpCall) -> None:
        """Observe a collective before it sends its inputs to other ranks."""

    def after_collective(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note the outputs of a collective, which may not have arrived yet."""

    def see_loss(self, loss: Tensor) -> None:
        """Observe a loss that is given to ``scale`` or ``backward``."""

    def see_result(self, result: Tensor) -> None:
        """Observe a tensor that the step returns."""

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Observe the gradient of a leaf when ``backward`` returns."""


class FoundModules(RunningModules):
    """Modules that run in a replay: those of the model, and others when they are called.

    If no model is given, it is the first module with parameters that is called outside of others.
    The names of other modules begin with their class.

    Args:
        model: The model, if it is known.
        undo: The undo log, in which modules are noted.

    Attributes:
        outermost: The model as it is called, None before its first call.
        model: The same without its wrapper for replication; its names are used.
    """

    def __init__(self, model: nn.Module | None, undo: UndoLog) -> None:
        super().__init__(None)
        self.model: nn.Module | None = None
        self.outermost: nn.Module | None = None
        self._undo, self._thread = undo, threading.get_ident()
        if model is not None:
            self._take(model)

    def _enter(self, module: nn.Module, given: Any) -> None:
        # The hooks run in all threads, and another thread may train another model.
        is_here = threading.get_ident() == self._thread
        if is_here and not self.knows(module) and self.innermost() is None:
            if self.model is None and any(True for _ in module.parameters()):
                self._take(module)
            else:
                self._undo.note_model(module)
                self.add(module, type(module).__name__)
        super()._enter(module, given)

    def _take(self, model: nn.Module) -> None:
        self._undo.note_model(model)
        self.outermost, self.model = model, replicated(model)
        self.add(self.model)
        self.add(model)


class ObserverMode(OpMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that shows every op to an observer.

    Args:
        modules: The running modules.
        undo: The undo log, in which writes are noted.
        observer: The observer.
        is_alone: Whether other ranks do not run the same ops, so that collectives are refused.

    Attributes:
        num_ops: The number of ops that have run.
    """

    def __init__(
        self, modules: FoundModules, undo: UndoLog, observer: OpObserver, *, is_alone: bool = False
    ) -> None:
        super().__init__(OpPlaces(modules, self._name_of))
        self._modules, self._undo, self.observer = modules, undo, observer
        self._is_alone = is_alone
        self.num_ops = 0
        self._counts: Counter[tuple[str, Phase, str, int, str | None]] = Counter()
        self._names: dict[int, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Show the ops of this thread and of its backward passes while the block runs."""
        with self._modules.followed(), self:
            yield

    @contextmanager
    def observe(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
        """Count the ops of the block as parts of an op, for which a rule decided."""
        with self._places.under(op, rule, policy):
            yield

    @compiler.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op; an op on DTensors is observed as ops on their local parts."""
        if any(cls.__name__ in _MADE_OF_OTHERS for cls in types):
            return NotImplemented  # the class runs it by ops that come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op, and show it to the observer before and after.

        Raises:
            RanksError: The op would wait for other ranks that do not run it.
        """
        number, name = self.num_ops, op_name(func)
        is_collective = func.namespace in _COLLECTIVES
        if is_collective and self._is_alone:
            raise across_ranks.waits_for_others(f"{name} is called in it")
        self.num_ops += 1
        is_cast = casts_to(func, args, kwargs) is not None
        place, phase = self._places.place(name, number, is_cast=is_cast)
        written = list(tensors_in(written_to(func, args, kwargs)))
        for tensor in written:
            self._undo.note_write(tensor)
        self._undo.note_generators(chain(args, kwargs.values()))
        alike = (name, phase, place.module, place.call, place.op)
        key = (*alike, self._counts[alike])
        self._counts[alike] += 1
        call = OpCall(number, key, func, name, args, kwargs, given, written, place, phase)
        if is_collective or name in _FOR_COLLECTIVES:
            before, after = self.observer.before_collective, self.observer.after_collective
        else:
            before, after = self.observer.before, self.observer.after
        before(call)
        result = func(*args, **kwargs)
        outputs = list(tensors_in((result,)))
        self._undo.note_made(outputs, given)
        after(call, outputs or written)
        return result

    def _name_of(self, leaf: Tensor) -> str:
        model = self._modules.model
        if not self._names and model is not None:
            named = model.named_parameters()
            self._names = {id(param): without_wrappers(name) for name, param in named}
        return self._names.get(id(leaf), "")
