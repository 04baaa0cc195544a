"""Observers of the ops of a replay, and the dispatch mode that shows ops to them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.module_names import replicated
from halfstep._common.nested import tensors_in
from halfstep._pytorch import compiler, distributed, modes
from halfstep._pytorch.storages import any_made_of_others
from halfstep._tools.patches import ThreadFlag
from halfstep._tools.replay.undo import UndoLog
from halfstep._tools.trace.ops import OpMode, OpPlace, RunningModules, op_name, written_to
from halfstep._tools.trace.rows import Phase
from halfstep.errors import RanksError

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""The namespaces of PyTorch's collectives."""
_FOR_COLLECTIVES = ("fsdp::all_gather_copy_in",)
"""Ops that return uninitialized memory for a collective."""
OpKey = tuple[str, Phase, str, int, str | None, int]
"""Name, phase, module, call, the op that the rule was looked up for, and a running number."""


@dataclass(eq=False, slots=True)
class OpCall:
    """Call of an ATen op."""

    number: int  # number of the op in the replay, from 0
    key: OpKey  # identity of the op across replays, which may have more or fewer ops
    of: OpKey | None  # in the backward pass, the key of the op whose gradient it computes
    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]  # tensors among its arguments
    written: list[Tensor]  # tensors among its arguments that it writes to
    place: OpPlace
    phase: Phase


class OpObserver:
    """Observer of the ops of a replay. Ops that the observer calls itself are not observed."""

    # The undo log of the replay, set when the replay begins. It holds the values of tensors from
    # before they were written to.
    undo: UndoLog
    is_settled = False  # whether the result is known without a backward pass from the losses so far
    sees_ops = True
    """Whether :meth:`before` and :meth:`after` are called; a replay without them is faster."""

    def before(self, call: OpCall) -> None:
        """Observe an op before it runs."""

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Observe the outputs of an op, or the tensors that it wrote to if it returns none."""

    def before_collective(self, call: OpCall) -> None:
        """Observe a collective before it sends its inputs to other ranks."""

    def after_collective(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note the outputs of a collective, which may not have arrived yet."""

    def see_loss(self, loss: Tensor) -> None:
        """Observe a loss that is passed to ``scale``."""

    def see_root(self, root: Tensor) -> None:
        """Observe a tensor that is passed to ``backward`` or ``autograd.grad``: a loss, too."""
        self.see_loss(root)

    def see_output(self, output: Tensor) -> None:
        """Observe a tensor that an outermost module returns."""

    def see_result(self, result: object) -> None:
        """Observe a tensor, an array or a number that the step returns."""

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Observe the gradient of a leaf when ``backward`` returns."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Observe an optimizer before its step, if steps are carried out."""

    def see_step(self, optimizer: Optimizer) -> None:
        """Observe an optimizer after its step, if steps are carried out."""

    def see_remaining(self, leaf: Tensor, gradient: Tensor, *, is_new: bool) -> None:
        """Observe the ``grad`` of a leaf when the step returns; ``is_new`` if the step set it."""


class FoundModules(RunningModules):
    """Modules that run in a replay: those of the model, and others when they are called.

    The default model is the first outermost module with parameters that is called, or the module in
    ``known`` that contains it. Names of other modules begin with their class.
    """

    def __init__(
        self, model: nn.Module | None, undo: UndoLog, known: Iterable[nn.Module] = ()
    ) -> None:
        super().__init__(None)
        self._known = list(known)
        self.others: list[nn.Module] = []  # other outermost modules
        self.model: nn.Module | None = None  # without its wrapper for replication
        self.outermost: nn.Module | None = None  # the model as it is called
        self._undo, self._thread = undo, threading.get_ident()
        self.on_output: Callable[[Any], None] | None = None  # of outermost modules
        if model is not None:
            self._take(model)

    def _enter(self, module: nn.Module, given: Any) -> None:
        # Hooks run in all threads, and another thread may train another model.
        is_here = threading.get_ident() == self._thread
        if is_here and not self.knows(module) and self.innermost() is None:
            if self.model is None and any(True for _ in module.parameters()):
                whole = (each for each in self._known if module in set(each.modules()))
                self._take(next(whole, module))
            else:
                self._undo.note_model(module)
                self.others.append(module)
                self.add(module, type(module).__name__)
        super()._enter(module, given)

    def _leave(self, module: nn.Module, given: Any, output: Any) -> None:
        super()._leave(module, given, output)
        is_here = threading.get_ident() == self._thread
        if is_here and self.on_output is not None and self.innermost() is None:
            self.on_output(output)

    def _take(self, model: nn.Module) -> None:
        self._undo.note_model(model)
        self.outermost, self.model = model, replicated(model)
        self.add(self.model)
        self.add(model)


restoring = ThreadFlag()
"""On while observers are shown no op: the loop has not called them. They are undone."""


class ObserverMode(OpMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that shows every op to an observer, and logs writes for the undo log.

    Ops that run while ``is_paused`` are not shown. With ``is_alone``, only this rank runs the ops,
    so a collective raises an error.
    """

    is_paused = False

    def __init__(
        self, modules: FoundModules, undo: UndoLog, observer: OpObserver, *, is_alone: bool = False
    ) -> None:
        super().__init__(modules)
        self._undo, self.observer = undo, observer
        observer.undo = undo
        self._is_alone = is_alone
        if is_alone:
            modules.on_output = self._see_output
        self.num_ops = 0
        self._keys: list[OpKey] = []
        self._counts: Counter[tuple[str, Phase, str, int, str | None]] = Counter()

    def _see_output(self, output: Any) -> None:
        with modes.unseen_by_modes(), modes.outside_of_transforms():
            for tensor in tensors_in([output]):
                self.observer.see_output(tensor)

    @compiler.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op; an op on DTensors or other wrappers is observed as ops on their parts."""
        if any_made_of_others(types):
            return NotImplemented  # class then calls ops on its parts, which come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op, and show it to the observer; raise ``RanksError`` if it waits for others."""
        if self.is_paused:
            return func(*args, **kwargs)
        if restoring.is_on:
            for tensor in tensors_in(written_to(func, args, kwargs)):
                self._undo.note_write(tensor)
            return func(*args, **kwargs)
        is_collective = func.namespace in _COLLECTIVES
        if is_collective and self._is_alone:
            raise waits_for_others(f"{op_name(func)} is called in it")
        observer, call = self.observer, None
        before, after = observer.before, observer.after
        if is_collective or op_name(func) in _FOR_COLLECTIVES:
            before, after = observer.before_collective, observer.after_collective
        # In a backward pass, a function mode would take our own tensor calls for the user's.
        with modes.no_function_modes():
            written = list(tensors_in(written_to(func, args, kwargs)))
            for tensor in written:
                self._undo.note_write(tensor)
            self._undo.note_generators(chain(args, kwargs.values()))
            self.num_ops += 1
            if observer.sees_ops:
                call = self._call(func, args, kwargs, given, written)
                before(call)
        result = func(*args, **kwargs)
        with modes.no_function_modes():
            outputs = list(tensors_in((result,)))
            self._undo.note_made(outputs, given)
            if call is not None:
                after(call, outputs or written)
        return result

    def _call(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        written: list[Tensor],
    ) -> OpCall:
        number, name = len(self._keys), op_name(func)
        place, phase = self.places.place(name, number)
        alike = (name, phase, place.module, place.call, place.op)
        key = (*alike, self._counts[alike])
        self._counts[alike] += 1
        self._keys.append(key)
        of = self._keys[place.number] if phase == "backward" and place.number >= 0 else None
        return OpCall(number, key, of, func, name, args, kwargs, given, written, place, phase)


# --- steps that need all ranks --------------------------------------------------------------------


def why_together(model: nn.Module) -> str | None:
    """Return why a model needs all ranks to run, or None if one rank can run it alone."""
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return "the model is sharded by FSDP"
    sharded: Any = filter(distributed.is_dtensor, model.parameters())
    if any(param.device_mesh.size() > 1 for param in sharded):
        return "the parameters of the model are DTensors"
    return None


def is_compiled_together(model: nn.Module) -> bool:
    """Return whether compiled code of a model may call collectives in a different order.

    If one rank then runs in eager mode, ranks may wait for different collectives.
    """
    return any(map(compiler.is_compiled, model.modules())) and why_together(model) is not None


def waits_for_others(why: str) -> RanksError:
    """Return the error for a step that one rank cannot replay."""
    return RanksError(
        f"this step cannot be replayed: {why}, and a replay by one rank would wait for the others. "
        "Put `with halfstep.diagnose(scaler):` around the loop: it traces such steps as they run"
    )
