"""Ops of the simulated device: the CPU's kernels, on the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.simulated.memory import (
    host_of,
    host_storage,
    is_mine,
    run_on_parts,
    set_memory,
    storage_at,
    wrap,
)
from tests.simulated.state import CPU, NAME, Now, below, indexed, lacking, ops, refuse
from tests.simulated.transfers import (
    Transfer,
    check_pinned_memory,
    is_pinned,
    pin_memory,
    under_way,
    wait,
)
from torch import Tensor, UntypedStorage

_aten = torch.ops.aten


random_states: dict[int, Tensor] = {}


class Random:
    """The CPU's random state, replaced for a while by that of a device."""

    def __init__(self, device: torch.device | None) -> None:
        self._index = indexed(NAME if device is None else device).index

    def __enter__(self) -> None:
        self._cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(random_states.setdefault(self._index, self._cpu))

    def __exit__(self, *_: object) -> None:
        random_states[self._index] = torch.default_generator.get_state()
        torch.default_generator.set_state(self._cpu)


class _Facts(NamedTuple):
    """What is known of an op from its schema."""

    name: str
    is_random: bool
    waits: bool
    writes: tuple[bool, ...]
    written: frozenset[str]
    mixes: bool
    takes_numbers: bool


@functools.cache
def _facts(op: torch._ops.OpOverload) -> _Facts:
    name = op._schema.name.removeprefix("aten::")
    arguments = op._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    return _Facts(
        name,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        waits=torch.Tag.dynamic_output_shape in op.tags or name == "equal",
        writes=tuple(written),
        written=frozenset(a.name for a, w in zip(arguments, written, strict=True) if w),
        mixes=name.startswith(("index", "_index_put", "_unsafe_index")),
        takes_numbers=not name.startswith(("cat", "stack", "_amp_")),
    )


class _Call:
    """The tensors of a call of an op, on the device and on the host."""

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts
        self.device: torch.device | None = None
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by id() of the host's
        self.storages: dict[int, UntypedStorage] = {}  # by _cdata of the host's

    def down(self, x: Any, written: bool) -> Any:
        """Return an argument as the host's kernel takes it."""
        if isinstance(x, (list, tuple)):
            return [self.down(y, written) for y in x]
        if isinstance(x, UntypedStorage) and x.device.type == NAME:
            self.storages[host_storage(x)._cdata] = x
            return host_storage(x)
        if not isinstance(x, Tensor):
            return x
        if is_mine(x):
            host = host_of(x)
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                self.storages[host_storage(storage)._cdata] = storage
            self.pairs[id(host)] = x, host
            refuse(Now.profile.dtypes, x.dtype)
            refuse(Now.profile.kernels.get(self.facts.name), x.dtype)
            self._check(x.device)
            return host
        is_number = x.dim() == 0 and self.facts.takes_numbers
        if written or not (is_number or self.facts.mixes):
            self._check(x.device)
        return x

    def _check(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self.device} and {device}! (when calling {self.facts.name})"
            )

    def up(self, x: Any) -> Any:
        """Return a result of the host's kernel as one of the device."""
        if isinstance(x, (list, tuple)):
            return tuple(map(self.up, x)) if isinstance(x, tuple) else [self.up(y) for y in x]
        if not isinstance(x, Tensor):
            return x
        if id(x) in self.pairs:
            return self.pairs[id(x)][0]
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        return wrap(x, self.device, self.storages)

    def follow(self) -> None:
        """Let the device's tensors follow what the host's kernel did to sizes and memory."""
        for mine, host in self.pairs.values():
            if mine.layout is torch.sparse_coo:
                whole = wrap(host, mine.device, self.storages)
                run_on_parts(_aten.copy_sparse_to_sparse_.default, mine, whole)
                continue
            memory, found = host.untyped_storage(), mine.untyped_storage()
            if memory._cdata != host_storage(found)._cdata:  # set_()
                found = self.storages.get(memory._cdata) or storage_at(memory, mine.device)
            elif memory.data_ptr() != found.data_ptr() or memory.nbytes() != found.nbytes():
                # resize_(): what is swapped has the same size, or one of both has none
                empty = UntypedStorage(0)
                found._swap_data_ptr_(storage_at(empty, mine.device))
                found._swap_data_ptr_(storage_at(memory, mine.device))
            elif (host.shape, host.stride()) == (mine.shape, mine.stride()):
                continue
            set_memory(mine, found, host)


def run_op(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an op of the device: the CPU's kernel, on the same memory."""
    facts = _facts(op)
    ops[facts.name] += 1
    if facts.name.startswith("_fused_") and facts.name.endswith("_") and not Now.profile.fused:
        raise lacking(
            NotImplementedError(
                f"Could not run 'aten::{facts.name}' with arguments from the '{NAME}' backend."
            )
        )
    with below():
        call = _Call(facts)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            check_pinned_memory()
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        args = tuple(map(call.down, args, facts.writes))
        kwargs = {name: call.down(x, name in facts.written) for name, x in kwargs.items()}
        if device is not None and torch.device(device).type != NAME:  # zeros_like(x, device="cpu")
            return op(*args, **kwargs)
        if device is not None:
            call.device = indexed(device)
        if facts.waits:
            wait(call.device, facts.name)
        if facts.is_random:
            with Random(call.device):
                result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
        if facts.written:
            call.follow()
        return call.up(result)


# ---- Copies


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    ops["copy_"] += 1
    with below():
        for tensor in (target, source):
            if is_mine(tensor):
                refuse(Now.profile.dtypes, tensor.dtype)
        values = host_of(source) if is_mine(source) else source
        if is_mine(target):
            host_of(target).copy_(values)
            if is_mine(source):
                return target
            if not non_blocking:
                wait(target.device, "copy to device")
            elif is_pinned(source) and source.is_contiguous() and source.dim():
                under_way[target.device.index].append(Transfer(source, source.clone(), False))
        elif non_blocking:
            under_way[source.device.index].append(Transfer(target, values.clone(), True))
        else:
            wait(source.device, "copy to host")
            target.copy_(values)
    return target


def _to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    options = {"dtype": dtype or tensor.dtype, "memory_format": memory_format}
    to = tensor.device if device is None else torch.device(device)
    if to == tensor.device:
        return run_op(_aten._to_copy.default, tensor, **options)
    if to.type != NAME:  # pinned, as what .to("cpu", non_blocking=True) returns
        target = _host_like(tensor, pin=non_blocking, **options)
    else:
        with below():
            host = host_of(tensor) if is_mine(tensor) else tensor
            target = wrap(torch.empty_like(host, **options), to)
    return _copy(target, tensor, non_blocking)


def _host_like(tensor: Tensor, pin: bool, **options: Any) -> Tensor:
    """Return host memory for a tensor, in which a value stands that nobody should read."""
    with below():
        result = torch.empty_like(host_of(tensor), **options)
        storage = result.untyped_storage()
        storage.fill_(1 if result.dtype is torch.bool else 0xFF)
        if pin:
            check_pinned_memory()
            storage._is_pinned = True
        return result


def _empty_like(tensor: Tensor, **options: Any) -> Tensor:
    device, pin = options.pop("device", None), bool(options.pop("pin_memory", None))
    if device is None or torch.device(device).type == NAME:
        return run_op(_aten.empty_like.default, tensor, device=device or tensor.device, **options)
    return _host_like(tensor, pin, **options)


def _read(tensor: Tensor) -> bool | int | float | complex:
    ops["_local_scalar_dense"] += 1
    wait(tensor.device, "item")
    with below():
        return host_of(tensor).item()


# Their result must be new to Python, for nn.Parameter makes its own object of it.
PYTORCHS_KERNELS = {"detach", "alias"}

OWN_KERNELS: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "_copy_from": lambda source, target, non_blocking=False: _copy(target, source, non_blocking),
    "_to_copy": _to_copy,
    "empty_like": _empty_like,
    "is_pinned": is_pinned,
    "_pin_memory": pin_memory,
    "_local_scalar_dense": _read,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # the math of composite ops
}
