"""The dispatch mode of a replay: shows every op to a witness, and keeps what ops write to."""

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
from halfstep._autocast.module_names import replicated, without_wrappers
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.rule import Rule
from halfstep._diagnose import across_ranks
from halfstep._diagnose.undo import Undo
from halfstep._pytorch import compiler
from halfstep._trace.modules import RunningModules
from halfstep._trace.op_mode import OpMode
from halfstep._trace.ops import casts_to, op_name, written_to
from halfstep._trace.places import Places
from halfstep._trace.rows import Phase
from halfstep._trace.state import Place

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Where PyTorch has the ops by which ranks talk."""
_MADE_OF_OTHERS = ("DTensor", "AsyncCollectiveTensor")
"""The tensors in which ``torch.distributed`` hides what this rank has."""
_FOR_COLLECTIVES = ("fsdp::all_gather_copy_in",)
"""What returns the memory for one, in which there is nothing yet."""
OpKey = tuple[str, Phase, str, int, str | None, int]
"""Name, phase, module, call, the op that the rule was asked for, and which of those alike it is."""


@dataclass(eq=False, slots=True)
class OpCall:
    """One call of an ATen op.

    Attributes:
        number: Which one of the replay it is, from 0.
        key: What it is known by in other replays, in which there may be other ops besides.
        func: The op.
        name: Its name, ``"addmm"``.
        args: Its arguments.
        kwargs: Its keyword arguments.
        given: The tensors among both.
        written: Those of them that it writes to.
        place: What it belongs to.
        phase: When it runs.
    """

    number: int
    key: OpKey
    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]
    written: list[Tensor]
    place: Place
    phase: Phase


class Witness:
    """What looks at the ops of a replay. Nothing that it does is seen by itself."""

    def before(self, call: OpCall) -> None:
        """Look at an op that is about to run."""

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Look at what an op has returned or, if it returns no tensors, has written to."""

    def sends(self, call: OpCall) -> None:
        """Look at an op that is about to send what it reads to other ranks."""

    def receives(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Take note of where its result will be; it need not have come yet."""

    def see_loss(self, loss: Tensor) -> None:
        """Look at what ``scale`` is given, and what ``backward`` begins with."""

    def see_result(self, result: Tensor) -> None:
        """Look at what the step returns."""

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Look at the gradient of a leaf when ``backward`` returns."""


class FoundModules(RunningModules):
    """The modules that run in a replay: those of the model, and others as they are called.

    The first module with parameters that is called outside of any other is the model if none is
    named. Each further one has its class before its names.

    Args:
        model: The model, if it is known.
        undo: Keeps what is in them.

    Attributes:
        outermost: The model as it is called, None before that.
        model: The same without what replicates it: that which has the names.
    """

    def __init__(self, model: nn.Module | None, undo: Undo) -> None:
        super().__init__(None)
        self.model: nn.Module | None = None
        self.outermost: nn.Module | None = None
        self._undo, self._thread = undo, threading.get_ident()
        if model is not None:
            self._take(model)

    def _enter(self, module: nn.Module, given: Any) -> None:
        # The hooks are those of all threads, and another one may train another model.
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


class Watcher(OpMode):  # type: ignore[no-untyped-call]
    """Shows every op to a witness.

    Args:
        modules: Knows which module runs.
        undo: Keeps what is written to.
        witness: Looks.
        is_alone: Whether the other ranks do not run the same: what waits for them is refused.

    Attributes:
        num_ops: How many ops have run.
    """

    def __init__(
        self, modules: FoundModules, undo: Undo, witness: Witness, *, is_alone: bool = False
    ) -> None:
        super().__init__(Places(modules, self._name_of))
        self._modules, self._undo, self.witness = modules, undo, witness
        self._is_alone = is_alone
        self.num_ops = 0
        self._counts: Counter[tuple[str, Phase, str, int, str | None]] = Counter()
        self._names: dict[int, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the ops of this thread, and of its backward passes; rules, if told of them."""
        with self._modules.watched(), self:
            yield

    @contextmanager
    def observe(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[None]:
        """Take what runs meanwhile for parts of an op, for which a rule decided."""
        with self._places.under(op, rule, policy):
            yield

    @compiler.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op; of DTensors it is seen as what it does to the part that this rank has."""
        if any(cls.__name__ in _MADE_OF_OTHERS for cls in types):
            return NotImplemented  # they run it themselves then, by ops that come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op between two looks of the witness.

        Raises:
            RanksError: It would wait for other ranks, and they do not run it.
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
            before, after = self.witness.sends, self.witness.receives
        else:
            before, after = self.witness.before, self.witness.after
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
