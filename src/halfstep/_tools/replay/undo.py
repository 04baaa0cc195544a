"""Undo log of a replay, which saves and restores all state that the replay changes.

Memory that existed before the replay is copied just before the first op writes to it. This covers
every write by PyTorch to any memory. Python state is restored too: the ``grad`` of
parameters, the attributes of modules with their contents, and the states of random generators.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep._common.machine import RandomStates, accelerators
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members
from halfstep._pytorch import autograd, distributed, modes, storages
from halfstep._pytorch.storages import ByMemory

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
_KEPT_ELSEWHERE = (nn.Module, Optimizer, Tensor)
_WITHOUT_STATE = (type, FunctionType, MethodType, ModuleType)
_PLAIN = {bool, int, float, complex, str, bytes, type(None), Tensor, nn.Parameter, FunctionType}
_OF_THREADS = {"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"}
"""Packages whose objects another thread may change at any time."""
MOST_HELD = 100_000
"""The largest number of values in modules and optimizers that are saved, outer ones first."""
LARGEST_ARRAY = 2**24  # the size in bytes of the largest NumPy array that is saved


class UndoLog:
    """Saved state of everything that was noted, until :meth:`restore`.

    Sync: none; the states of random generators are on the host.
    """

    def __init__(self) -> None:
        self._saved: ByMemory[_Saved | _SavedSparse] = ByMemory()
        self._born: ByMemory[bool] = ByMemory()
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._modules: dict[nn.Module, type[nn.Module]] = {}
        self._data: dict[int, tuple[Tensor, Tensor, bool, int]] = {}
        self._held: dict[int, tuple[object, Callable[[], object]]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._random = RandomStates(accelerators())

    # --- notes ------------------------------------------------------------------------------------

    def note_write(self, tensor: Tensor) -> None:
        """Save the memory of a tensor that an op is about to write to."""
        if tensor in self._born or tensor in self._saved or storages.memory_of(tensor) is None:
            return
        kept = _Saved(tensor) if tensor.layout is torch.strided else _SavedSparse(tensor)
        self._saved.put(tensor, kept)

    def note_made(self, outputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Note outputs of an op in new memory, which need not be saved."""
        new = [tensor for tensor in outputs if tensor not in self._born]
        before = {storages.number_of_memory(tensor) for tensor in given} if new else set()
        for tensor in new:
            if storages.number_of_memory(tensor) not in before:
                self._born.put(tensor, True)

    def was_made(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor was allocated in the replay."""
        return tensor in self._born

    def before(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor before the first write to it; None without a write."""
        kept = self._saved.get(tensor)
        if kept is None:
            return None
        if isinstance(kept, _SavedSparse):
            return kept.copy
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(kept.copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def grads(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves whose ``grad`` is saved, each with the saved ``grad``."""
        return list(self._grads.values())

    def note_grads(self, leaves: Iterable[Tensor]) -> None:
        with modes.no_function_modes():  # a mode that casts would return the grad of a copy
            for leaf in leaves:
                self._grads.setdefault(id(leaf), (leaf, leaf.grad))

    def note_model(self, model: nn.Module) -> None:
        """Save the attributes and classes of a model's modules, and the ``grad`` of parameters.

        Policies with module rules, and lazy modules, change the class of a module.
        """
        new = [module for module in model.modules() if module not in self._modules]
        self._modules |= {module: type(module) for module in new}
        self._hold(map(vars, new))
        for module in new:
            if isinstance(module, DistributedDataParallel):  # each rank replays alone
                module.require_backward_grad_sync = False
                module.require_forward_param_sync = False
                distributed.keep_buckets(module)
            self.note_grads(module.parameters(recurse=False))
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                with modes.no_function_modes():  # see note_grads
                    found = tensor, tensor.data, tensor.requires_grad, autograd.version_of(tensor)
                    self._data.setdefault(id(tensor), found)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Save the groups and the state of an optimizer, and the ``grad`` of its parameters."""
        self.note_grads(parameters(optimizer))
        for member in members(optimizer):  # a container may have neither groups nor state
            state = getattr(member, "state", {})
            self._hold([member.param_groups, state, getattr(member, "__dict__", {})])

    def _hold(self, values: Iterable[object]) -> None:
        """Save containers and objects with their contents; modules are noted separately."""
        waiting = deque(values)
        while waiting and len(self._held) < MOST_HELD:
            value: Any = waiting.popleft()
            kind = type(value)  # not __class__: that of a weak proxy raises if its object is gone
            if id(value) in self._held or issubclass(kind, _KEPT_ELSEWHERE):
                continue
            if kind is tuple or kind in _CONTAINERS:
                before = value if kind is tuple else value.copy()
                self._held[id(value)] = (value, partial(restore_container, value, before))
                inner = before.values() if isinstance(before, dict) else before
                waiting.extend(item for item in inner if type(item) not in _PLAIN)
            elif (restore := _restorer(value)) is not None:
                self._held[id(value)] = (value, restore)
            elif kind.__dictoffset__ and not issubclass(kind, _WITHOUT_STATE):
                is_of_threads = kind.__module__.partition(".")[0] in _OF_THREADS
                waiting.extend([] if is_of_threads else [vars(value)])

    def note_generators(self, values: Iterable[Any]) -> None:
        """Save the states of the random generators among the arguments of an op."""
        for value in values:
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = (value, value.get_state())

    # --- restoring --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore everything bit for bit, including tensor versions, even if a part fails."""
        with torch.no_grad(), ExitStack() as stack:
            for put_back in reversed([*self._restoring()]):
                stack.callback(put_back)
        self._saved, self._born = ByMemory(), ByMemory()

    def _restoring(self) -> Iterator[Callable[[], object]]:
        for module, cls in self._modules.items():
            if type(module) is not cls:
                yield partial(setattr, module, "__class__", cls)
        for data in self._data.values():
            yield partial(_restore_data, *data)
        for saved in self._saved.values():
            yield saved.restore
        for leaf, grad in self._grads.values():
            if leaf.grad is not grad:
                yield partial(setattr, leaf, "grad", grad)
        for _, put_back in reversed(self._held.values()):
            yield put_back
        for generator, state in self._generators.values():
            yield partial(generator.set_state, state)
        yield self._random.restore


class _Saved:
    """Memory and geometry of a tensor before a write."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._memory = tensor, tensor.untyped_storage()
        self._geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._version = autograd.version_of(tensor)
        self.copy: torch.UntypedStorage = self._memory.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        tensor, memory = self._tensor, self._memory
        if memory.nbytes() != self.copy.nbytes():
            memory.resize_(self.copy.nbytes())
        memory.copy_(self.copy)
        now = tensor.storage_offset(), tensor.size(), tensor.stride()
        is_moved = storages.number_of(tensor.untyped_storage()) != storages.number_of(memory)
        if now != self._geometry or is_moved:
            tensor.set_(memory, *self._geometry)
        if not tensor.is_inference():
            autograd.set_version(tensor, self._version)


class _SavedSparse:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.copy = tensor, tensor.detach().clone()
        self._version = autograd.version_of(tensor)

    def restore(self) -> None:
        self._tensor.copy_(self.copy)
        autograd.set_version(self._tensor, self._version)


def _restorer(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random generator or an array; None for other values."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if issubclass(kind, random.Random):
        return partial(value.setstate, value.getstate())
    if numpy is None:
        return None
    if kind is numpy.ndarray and value.flags.writeable and value.nbytes <= LARGEST_ARRAY:
        return partial(value.__setitem__, ..., value.copy())
    if issubclass(kind, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if issubclass(kind, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def restore_container(value: Any, before: Any) -> None:
    if _is_same(value, before):
        return
    if isinstance(value, dict):  # not cleared: another thread may read it as an object's __dict__
        for key in [key for key in value if key not in before]:
            del value[key]
        for key, item in before.items():
            if key not in value or value[key] is not item:
                value[key] = item
    if not _is_same(value, before):
        value.clear()
        value.extend(before) if isinstance(value, (list, deque)) else value.update(before)


def _restore_data(tensor: Tensor, data: Tensor, requires_grad: bool, version: int) -> None:
    """Restore the memory that ``tensor.data = ...`` replaced without an op, and was written to."""
    one, other = storages.memory_of(tensor), storages.memory_of(data)
    if one is not None and other is not None and one.cdata != other.cdata:
        tensor.data = data
        autograd.set_version(tensor, version)
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)


def _is_same(value: Any, before: Any) -> bool:
    """Return whether containers have the same items, compared by identity (for tensors)."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is before[b] for a, b in zip(value, before, strict=True))
    if isinstance(value, set):
        return {*map(id, value)} == {*map(id, before)}
    return all(a is b for a, b in zip(value, before, strict=True))
