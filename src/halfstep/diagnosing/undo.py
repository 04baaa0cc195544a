"""What a replay writes to, kept as it was and put back.

Memory is copied when an op is about to write to it, and only if it was there before the replay: so
everything that PyTorch writes is put back, whoever owns it. What Python holds is put back too: the
``grad`` of parameters, the attributes and buffers of modules, the states of random generators.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep import _torch
from halfstep.random_states import RandomStates, accelerators

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)


class Undo:
    """Keeps what is changed from now on until :meth:`restore`.

    Sync: none; the states of random generators lie on the host.
    """

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}
        self._born: dict[int, object] = {}
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._modules: dict[nn.Module, dict[str, Any]] = {}
        self._data: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._held: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._random = RandomStates(accelerators())

    # --- what is about to change ------------------------------------------------------------------

    def note_write(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that an op is about to write to."""
        reference = _torch.memory_of(tensor)
        if reference is None or reference.cdata in self._born or reference.cdata in self._saved:
            return
        self._saved[reference.cdata] = _Saved(tensor)

    def note_made(self, outputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Take note that an op has made tensors, unless they have the memory of what it was given.

        What has memory that the replay has made need not be kept.
        """
        references = [reference for tensor in outputs if (reference := _torch.memory_of(tensor))]
        if all(reference.cdata in self._born for reference in references):
            return
        before = {reference.cdata for tensor in given if (reference := _torch.memory_of(tensor))}
        for reference in references:
            if reference.cdata not in before:
                self._born.setdefault(reference.cdata, reference)

    def was_made(self, tensor: Tensor) -> bool:
        """Say whether the memory of a tensor is one that the replay has made."""
        reference = _torch.memory_of(tensor)
        return reference is not None and reference.cdata in self._born

    def before(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor held before it was first written to; None if it was not."""
        reference = _torch.memory_of(tensor)
        kept = None if reference is None else self._saved.get(reference.cdata)
        if kept is None:
            return None
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(kept.copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def note_grads(self, leaves: Iterable[Tensor]) -> None:
        """Keep the ``grad`` of leaves that somebody may set."""
        for leaf in leaves:
            self._grads.setdefault(id(leaf), (leaf, leaf.grad))

    def note_model(self, model: nn.Module) -> None:
        """Keep what Python holds in a model, and the ``grad`` of its parameters."""
        for module in model.modules():
            if module not in self._modules:
                self._modules[module] = {name: _copy(v) for name, v in vars(module).items()}
                if isinstance(module, DistributedDataParallel):  # each rank replays its own
                    module.require_backward_grad_sync = False
                    module.require_forward_param_sync = False
                    _torch.keep_buckets(module)
                self.note_grads(module.parameters(recurse=False))
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    self._data.setdefault(id(tensor), (tensor, tensor.data, tensor.requires_grad))

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Keep what Python holds in an optimizer, and the ``grad`` of its parameters."""
        for group in optimizer.param_groups:
            self.note_grads(group["params"])
            self._held.append((group, dict(group)))
        self._held.append((optimizer.state, dict(optimizer.state)))
        self._held += [(state, dict(state)) for state in optimizer.state.values()]

    def note_generators(self, values: Iterable[Any]) -> None:
        """Keep the states of the random generators among the arguments of an op."""
        for value in values:
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = (value, value.get_state())

    # --- putting it back --------------------------------------------------------------------------

    def restore(self) -> None:
        """Put everything back, bit for bit; versions of tensors too. All of it, whatever fails."""
        with ExitStack() as stack, torch.no_grad():
            stack.callback(self._random.restore)
            for generator, state in self._generators.values():
                stack.callback(generator.set_state, state)
            for held, before in self._held:
                stack.callback(_restore_dict, held, before)
            for leaf, grad in self._grads.values():
                stack.callback(_restore_grad, leaf, grad)
            for module, attributes in self._modules.items():
                stack.callback(_restore_attributes, module, attributes)
            for saved in self._saved.values():
                stack.callback(saved.restore)
            for tensor, data, requires_grad in self._data.values():
                stack.callback(_restore_data, tensor, data, requires_grad)
        self._saved, self._born = {}, {}


class _Saved:
    """A tensor that is about to be written to: its memory, and how it lies in that."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._memory = tensor, tensor.untyped_storage()
        self._geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._version = 0 if tensor.is_inference() else tensor._version
        self.copy: torch.UntypedStorage = self._memory.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        tensor, memory = self._tensor, self._memory
        if memory.nbytes() != self.copy.nbytes():
            memory.resize_(self.copy.nbytes())
        memory.copy_(self.copy)
        now = tensor.storage_offset(), tensor.size(), tensor.stride()
        if now != self._geometry or tensor.untyped_storage()._cdata != memory._cdata:
            tensor.set_(memory, *self._geometry)
        if not tensor.is_inference():
            _torch.set_version(tensor, self._version)


def _restore_dict(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    if not _is_same(held, before):
        held.clear()
        held.update(before)


def _restore_grad(leaf: Tensor, grad: Tensor | None) -> None:
    if leaf.grad is not grad:
        leaf.grad = grad


def _restore_data(tensor: Tensor, data: Tensor, requires_grad: bool) -> None:
    """Give back the memory that ``tensor.data = ...`` has replaced, which no op shows."""
    one, other = _torch.memory_of(tensor), _torch.memory_of(data)
    if one is not None and other is not None and one.cdata != other.cdata:
        tensor.data = data
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)


def _copy(value: Any) -> Any:
    """Return a container with the same things in it; what it is of is no one else's type."""
    return value.copy() if type(value) in _CONTAINERS else value


def _restore_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    now: dict[str, Any] = vars(module)
    for name in [name for name in now if name not in attributes]:
        del now[name]
    for name, before in attributes.items():
        value: Any = now.get(name)
        if type(value) in _CONTAINERS and type(before) is type(value):
            if not _is_same(value, before):
                value.clear()
                value.extend(before) if isinstance(value, (list, deque)) else value.update(before)
        elif value is not before:
            now[name] = before


def _is_same(value: Any, before: Any) -> bool:
    """Compare containers without comparing what is in them, which may be tensors."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is before[b] for a, b in zip(value, before, strict=True))
    if isinstance(value, set):
        return {*map(id, value)} == {*map(id, before)}
    return all(a is b for a, b in zip(value, before, strict=True))
