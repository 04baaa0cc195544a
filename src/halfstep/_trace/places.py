"""Which module, phase and rule an op belongs to, seen from a dispatch mode.

An op of the forward pass belongs to the module that is running. One of the backward pass belongs to
the op whose gradient it computes: autograd numbers its nodes in the order in which they are made,
and what a node was made for is noted when it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.rule import Rule
from halfstep._pytorch import amp, autograd
from halfstep._trace.modules import Call, RunningModules
from halfstep._trace.rows import Phase, dtype_name
from halfstep._trace.state import Place, Ruled, ThreadState


class Places:
    """Follows modules, rules and nodes of autograd, thread by thread.

    Args:
        modules: Knows which module runs.
        name_of: Returns the name of a parameter, empty if it is not known.
    """

    def __init__(self, modules: RunningModules, name_of: Callable[[Tensor], str]) -> None:
        self.modules = modules
        self._name_of = name_of
        self._thread = ThreadState()
        self._nodes = self._thread.nodes  # of the thread that runs the forward pass

    @property
    def ruled(self) -> list[Ruled]:
        """The ops of this thread that run by a rule, each inside the one before it."""
        return self._thread.ruled

    @contextmanager
    def under(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[Ruled]:
        """Take what runs meanwhile for parts of ``op``, for which ``rule`` decided."""
        # Read here: the kernel may switch off PyTorch's cache for the casts that it makes.
        switches = amp.autocast_switches(policy.device)
        lower = dtype_name(switches.dtype)
        ruled = Ruled(op.rpartition(".")[0], rule, (lower, switches.cache))
        self.ruled.append(ruled)
        try:
            yield ruled
        finally:
            self.ruled.pop()

    def backward_begins(self) -> bool:
        """Say whether the op that comes is the first of its backward pass."""
        task = autograd.backward_number()
        return task >= 0 and task not in self._thread.records

    def place(self, op: str, number: int, *, is_cast: bool) -> tuple[Place, Phase]:
        """Return what an op belongs to, and note that for the nodes that were made for it.

        Args:
            op: Its name.
            number: Which op of all it is.
            is_cast: Whether it casts.
        """
        here, task = self._thread, autograd.backward_number()
        call, ruled = self.modules.innermost(), here.ruled[-1] if here.ruled else None
        phase: Phase = "forward"
        if task < 0:
            place = Place(call.module, call.number) if call else Place()
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

    def _place_in_backward(self, task: int, call: Call | None, op: str) -> tuple[Place, Phase]:
        here = self._thread
        if task not in here.records and here.phase == "recompute":
            here.recomputed.add(task)
        records = here.records.setdefault(task, torch.is_grad_enabled())
        # On CUDA the backward pass, and what it recomputes, runs in a thread of autograd.
        nodes = here.nodes if task in here.recomputed else self._nodes
        node = autograd.running_sequence_number()
        place = nodes.get(-1 if node is None else node, Place())
        if call is not None and call.in_backward:
            return Place(call.module, call.number), "recompute"
        if torch.is_grad_enabled() and not records:  # a function that is no module
            return Place(place.module, place.call), "recompute"
        into = autograd.accumulated_into()
        if into is not None:
            return Place(self._name_of(into).rpartition(".")[0]), "backward"
        if op in ("add", "add_"):  # autograd's sum of gradients, by no rule
            place = place._replace(rule=None, op=None)
        return place, "backward"
