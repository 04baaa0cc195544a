"""Buffers of watched modules, in which a skipped step must not leave NaN.

A forward pass writes to buffers (running statistics, codebooks, queues) before it is known whether
its step will be skipped. So they are saved before the first forward pass of each iteration.

Only NaN counts. An inf is no proof of damage: a module may fill a mask with -inf in its first call,
remember in an attribute that it has, and would never fill a restored mask again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from halfstep._gradients.scalars import READABLE, Scalar, any_of, as_tensor, joined
from halfstep._pytorch import modes
from halfstep._pytorch.amp import copy_to_each_, norms_of_each
from halfstep._pytorch.devices import to_device
from halfstep._pytorch.distributed import local_part
from halfstep._pytorch.modules import registers_of

_FLOATS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

NAN = 2  # the level of a tensor with NaN; that of one with inf is 1

# The dict of a module's buffers, the name of one, and the tensor that was there when saved.
_Slot: TypeAlias = tuple[dict[str, Tensor | None], str, Tensor]
# Saved and current values of the buffers of each device and dtype.
_Groups: TypeAlias = list[tuple[list[Tensor], list[Tensor]]]


class Buffers:
    """The buffers of the modules that a scaler watches. Sync: none."""

    def __init__(self) -> None:
        self.watched: list[_Watched] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Save the buffers of a module, if it has any, at its first call of each iteration."""
        is_known = any(each.module() is module for each in self.watched)
        if not is_known and next(module.buffers(), None) is not None:
            watched = _Watched(module)
            self.watched.append(watched)
            handle = module.register_forward_pre_hook(watched)
            watched.remove = weakref.finalize(self, handle.remove)
            watched.remove.atexit = False

    def unwatch(self) -> None:
        """Remove all hooks and copies."""
        for each in self.watched:
            each.remove()
        self.watched = []

    def restore(self, skip: Scalar) -> None:
        """Restore the modules whose buffers became NaN, if ``skip`` is not 0."""
        if isinstance(skip, Tensor) or skip:
            for each in self.watched:
                for copy in each.copies:
                    copy.restore(skip)

    def see_loss(self) -> None:
        """Keep what was saved in this iteration: a loss that depends on it has been scaled."""
        for each in self.watched:
            each.has_loss = each.is_new

    def end(self) -> None:
        """End an iteration."""
        for each in self.watched:
            if not each.is_new:  # its call was not seen: it is compiled, or only parts are called
                each.save()
            each.is_new = each.has_loss = each.is_first = False


class _Watched:
    """A module and a copy of its buffers; a forward pre-hook, which copies of the module ignore."""

    remove: weakref.finalize[..., Buffers]

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.copies: list[Copy] = []  # the newest copy, in parts
        self.is_new = False  # whether it was made since the last update(), before a call
        self.has_loss = False  # whether a loss has been scaled since it was made
        self.is_first = True  # whether there was no update() yet

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or modes.is_jit_tracing() or modes.has_transforms():
            return
        # An evaluation leaves buffers unchanged, and a checkpoint may be loaded after it.
        is_training = module.training or torch.is_grad_enabled()
        if not is_training or self.module() is not module:
            return
        if not self.is_new:
            self.save()
        elif not self.has_loss:
            # The call before may have been a dry run, after which a checkpoint was loaded.
            for copy in self.copies:
                copy.renew()

    def save(self) -> None:
        module = self.module()
        slots = [] if module is None else list(_slots_of(module))
        if len(self.copies) == 1 and self.copies[0].is_of(slots):
            self.copies[0].save()
        else:
            self.copies = self.new_copies(slots)
        self.is_new = True

    def new_copies(self, slots: list[_Slot]) -> list[Copy]:
        """Return a copy of all buffers; one for each submodule before the first ``update``."""
        if not self.is_first:
            return [Copy(slots)]
        # Tables that a submodule fills in its first call stay, unless there is NaN beside them.
        parts = {id(held): [slot for slot in slots if slot[0] is held] for held, *_ in slots}
        return [Copy(part) for part in parts.values()]

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile the hook of a module that a GradScaler or guard "
            "watches. Script the module before that, or after guard.remove() or the scaler's end"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # {}.get(module, args) returns args. A pickle of this class would need halfstep.
        return getattr, ({}, "get")


class Copy:
    """The values of buffers at one time. Sync: none."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots
        self._shapes = [tensor.shape for *_, tensor in slots]
        tensors = [local_part(tensor) for *_, tensor in slots]
        self._values = [torch.empty_like(t) if _is_saved(t) else None for t in tensors]
        self._groups = _grouped(self._values, tensors)
        self.save()

    def is_of(self, slots: list[_Slot]) -> bool:
        """Return whether the copy has the same places with the same tensors."""
        return len(slots) == len(self._slots) and all(
            new[2] is old[2] and new[0] is old[0] and new[2].shape == shape
            for new, old, shape in zip(slots, self._slots, self._shapes, strict=True)
        )

    @torch.no_grad()
    def save(self) -> None:
        with modes.unseen_by_modes():
            for values, tensors in self._groups:
                copy_to_each_(values, tensors)

    @torch.no_grad()
    def restore(self, skip: Scalar = 1.0) -> None:
        """Restore all buffers, which belong together, if one became NaN and ``skip`` is 1."""
        # All of them: counters, running statistics and codebooks agree as if no batch had come.
        with modes.unseen_by_modes():
            groups = self._present()
            is_worse = _is_worse(groups)
            if is_worse is None:
                return
            if isinstance(skip, Tensor):
                is_worse = is_worse * as_tensor(skip, is_worse.device)
            if is_worse.device.type in READABLE and not is_worse.item():
                return
            for values, now in groups:
                copy_to_each_(now, _selected(to_device(is_worse, now[0].device) > 0, values, now))

    @torch.no_grad()
    def renew(self) -> None:
        """Save the present values of the same places, unless one became NaN."""
        with modes.unseen_by_modes():
            groups = self._present()
            is_worse = _is_worse(groups)
            for values, now in groups:
                if is_worse is not None:
                    now = _selected(to_device(is_worse, now[0].device) > 0, values, now)
                copy_to_each_(values, now)

    def _present(self) -> _Groups:
        # A module may have put another tensor in place of the saved one. Writing to `.data` is no
        # change for autograd, like the writes of batch norm: the graph of another loss may have
        # kept a running mean.
        tensors = (held.get(name) for held, name, _ in self._slots)
        return _grouped(self._values, [t if t is None else local_part(t).data for t in tensors])


def _slots_of(module: torch.nn.Module) -> Iterator[_Slot]:
    """Yield the places of all buffers, five times as fast as ``module.modules()``."""
    waiting, seen = [module], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        _, held, parts = registers_of(part)
        for name, tensor in held.items():
            if tensor is not None and not is_lazy(tensor):
                yield held, name, tensor
        waiting.extend(each for each in parts.values() if each is not None)


def _is_saved(tensor: Tensor) -> bool:
    """Return whether the buffer is an ordinary tensor that can be written to."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _FLOATS | _INTEGERS
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_inference())
        and tensor.numel() > 0
        and (0 not in tensor.stride() or tensor.numel() == 1)
    )


def _grouped(saved: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> _Groups:
    """Group saved values with tensors of the same device, dtype and shape; leave out others."""
    groups: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for values, now in zip(saved, tensors, strict=True):
        if values is None or now is None or not _is_saved(now):
            continue
        key = now.device, now.dtype
        if (values.device, values.dtype, values.shape) == (*key, now.shape):
            group = groups.setdefault(key, ([], []))
            group[0].append(values)
            group[1].append(now)
    return list(groups.values())


def _is_worse(groups: _Groups) -> Tensor | None:
    """Return 1 if a tensor has NaN that had none when saved, else 0; None without floats."""
    found = [
        ((_levels(now) == NAN) & (_levels(values) < NAN)).any().float()
        for values, now in groups
        if now[0].dtype in _FLOATS
    ]
    return any_of(found, found[0].device) if found else None


def _levels(tensors: list[Tensor]) -> Tensor:
    """Return 0 for each finite tensor, 1 for one with inf, 2 (``NAN``) for one with NaN."""
    norms = joined(norms_of_each(tensors, math.inf))
    return norms.isfinite().logical_not().int() + norms.isnan().int()


def _selected(is_bad: Tensor, saved: list[Tensor], now: list[Tensor]) -> list[Tensor]:
    """Return the saved values if ``is_bad``, else the current ones, in few kernels."""
    before, after = (
        torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in those])
        for those in (saved, now)
    )
    parts = torch.split(torch.where(is_bad, before, after), [each.numel() for each in now])
    return [
        part if each.dim() == 1 else part.view(each.shape)
        for part, each in zip(parts, now, strict=True)
    ]


def levels_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the levels of the tensors with inf or NaN, by name. Sync: one for each dtype."""
    if modes.has_transforms():
        return {}
    alike: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for name, tensor in named:
        tensor = local_part(tensor).detach()
        if _is_saved(tensor) and tensor.dtype in _FLOATS:
            alike.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    levels: dict[str, int] = {}
    for tensors in alike.values():
        levels |= zip(tensors, _levels(list(tensors.values())).tolist(), strict=True)
    return {name: level for name, level in levels.items() if level}
