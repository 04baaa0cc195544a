"""Places of ops: the module, phase and rule that an op belongs to, seen from a dispatch mode.

An op of the forward pass belongs to the module that is running. An op of the backward pass belongs
to the op whose gradient it computes: autograd numbers its nodes in the order in which they are
made, and the place of each node is noted when it is made.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from halfstep._autocast.kernels import PolicyOnDevice
from halfstep._autocast.modules import without_wrappers
from halfstep._autocast.rule import Rule
from halfstep._numerics.formats import dtype_name
from halfstep._pytorch import amp, autograd
from halfstep._trace.rows import Cast, Phase

NOT_RUN = "no module of the model ran: is this the model that was called?"
"""A note on a block in which :attr:`RunningModules.have_run` is false."""


class ModuleCall(NamedTuple):
    """Call of a module that has not returned yet; in a backward pass it recomputes something."""

    module: str
    number: int
    in_backward: bool


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, ModuleCall]] = []


class RunningModules:
    """Calls of a model's modules that have not returned yet, in this thread."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[nn.Module, str] = {}
        self._owners: dict[Tensor, str] = {}
        if model is not None:
            self.add(model)
        self._counts: Counter[nn.Module] = Counter()
        self._stack = _Stack()

    def add(self, model: nn.Module, name: str = "") -> None:
        """Follow the modules of another model too, whose names begin with ``name``."""
        # A module with several names gets the first.
        for path, module in model.named_modules():
            names = (each for each in (name, without_wrappers(path)) if each)
            self._names.setdefault(module, ".".join(names))
        self._owners.clear()

    def knows(self, module: nn.Module) -> bool:
        return module in self._names

    def owner_of(self, param: Tensor) -> str:
        """Return the path of the module that a parameter belongs to, empty if it is unknown."""
        if not self._owners:
            for module, name in self._names.items():
                for each in module.parameters(recurse=False):
                    self._owners.setdefault(each, name)
        return self._owners.get(param, "")

    @property
    def have_run(self) -> bool:
        return bool(self._counts)

    def innermost(self) -> ModuleCall | None:
        """Return the innermost running call, None outside the model."""
        return self._stack.calls[-1][1] if self._stack.calls else None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls that are made in the block."""
        # Global hooks, not hooks on each module: nn.TransformerEncoderLayer computes in another way
        # if it has hooks, and tracing would change results.
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            in_backward = autograd.backward_number() >= 0
            call = ModuleCall(name, self._counts[module], in_backward)
            self._counts[module] += 1
            self._stack.calls.append((module, call))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        # Calls that a KeyboardInterrupt ended are still above it, since no hook ran for them. The
        # module itself is missing if a hook before ours raised an error.
        calls = self._stack.calls
        if any(running is module for running, _ in calls):
            while calls.pop()[0] is not module:
                pass


@dataclass
class RuledOp:
    """Op that runs by a rule.

    Attributes:
        switches: The lower precision, and whether casts of weights are kept.
        casts: The casts for the next op in it that computes something.
    """

    op: str
    rule: Rule
    switches: tuple[str | None, bool]
    casts: list[Cast] = field(default_factory=list)


class OpPlace(NamedTuple):
    """Module, call and rule that an op belongs to.

    Attributes:
        op: The op that the rule was looked up for.
        cast: The number of the cast, if the op is one.
        number: For a node of autograd, the number of the op that it was made for.
    """

    module: str = ""
    call: int = 0
    rule: str | None = None
    op: str | None = None
    cast: int | None = None
    number: int = -1


class ThreadState(threading.local):
    """State of one thread.

    Attributes:
        ruled: The ops that run by a rule, each inside the one before it.
        next_node: The number of the next node of autograd, when an op was last seen.
        nodes: The places of the nodes of autograd made in this thread, by their numbers.
        records: For each backward pass, whether gradients are recorded in it.
        recomputed: The backward passes that began here after a recomputation.
        phase: The phase of the last op.
    """

    def __init__(self) -> None:
        self.ruled: list[RuledOp] = []
        self.next_node = autograd.next_sequence_number()
        self.nodes: dict[int, OpPlace] = {}
        self.records: dict[int, bool] = {}
        self.recomputed: set[int] = set()
        self.phase: Phase = "forward"


class OpPlaces:
    """Follows modules, rules and nodes of autograd, thread by thread."""

    def __init__(self, modules: RunningModules) -> None:
        self.modules = modules
        self._thread = ThreadState()
        self._nodes = self._thread.nodes  # of the thread that runs the forward pass

    @property
    def ruled(self) -> list[RuledOp]:
        """The ops of this thread that run by a rule, each inside the one before it."""
        return self._thread.ruled

    @contextmanager
    def under(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[RuledOp]:
        """Count the ops of the block as parts of ``op``, for which ``rule`` decided."""
        # Read now: the kernel may switch off PyTorch's cache for its casts.
        switches = amp.autocast_switches(policy.device)
        lower = dtype_name(switches.dtype)
        ruled = RuledOp(op.rpartition(".")[0], rule, (lower, switches.cache))
        self.ruled.append(ruled)
        try:
            yield ruled
        finally:
            self.ruled.pop()

    def backward_begins(self) -> bool:
        """Return whether the next op is the first of its backward pass."""
        task = autograd.backward_number()
        return task >= 0 and task not in self._thread.records

    def place(self, op: str, number: int, *, is_cast: bool) -> tuple[OpPlace, Phase]:
        """Return the place of an op, and note it for the nodes of autograd made for that op."""
        here, task = self._thread, autograd.backward_number()
        call, ruled = self.modules.innermost(), here.ruled[-1] if here.ruled else None
        phase: Phase = "forward"
        if task < 0:
            place = OpPlace(call.module, call.number) if call else OpPlace()
        else:
            place, phase = self._place_in_backward(task, call, op)
        if ruled is not None:
            place = place._replace(rule=str(ruled.rule), op=ruled.op)
        following = autograd.next_sequence_number()
        made_for = place if phase == "backward" else place._replace(op=place.op or op)
        made_for = made_for._replace(cast=number if is_cast else None, number=number)
        for node in range(here.next_node, following):
            here.nodes[node] = made_for
        here.next_node = following
        here.phase = phase
        return place, phase

    def _place_in_backward(
        self, task: int, call: ModuleCall | None, op: str
    ) -> tuple[OpPlace, Phase]:
        here = self._thread
        if task not in here.records and here.phase == "recompute":
            here.recomputed.add(task)
        records = here.records.setdefault(task, torch.is_grad_enabled())
        # On CUDA the backward pass, with what it recomputes, runs in a thread of autograd.
        nodes = here.nodes if task in here.recomputed else self._nodes
        node = autograd.running_sequence_number()
        place = nodes.get(-1 if node is None else node, OpPlace())
        if call is not None and call.in_backward:
            return OpPlace(call.module, call.number), "recompute"
        if torch.is_grad_enabled() and not records:  # a function, not a module
            return OpPlace(place.module, place.call), "recompute"
        into = autograd.accumulated_into()
        if into is not None:
            return OpPlace(self.modules.owner_of(into)), "backward"
        if op in ("add", "add_"):  # autograd's sum of gradients, by no rule
            place = place._replace(rule=None, op=None)
        return place, "backward"
