"""A device written in Python, "sim", whose memory is host memory that only its ops may touch.

For PyTorch it is an accelerator: dispatch and autocast keys, a thread for its backward passes,
tensors that must not be mixed with the CPU's, scalars that must be waited for. Each op runs the
CPU's kernel on the same memory; speed and the values of other kernels cannot be seen this way. ::

    device.install()
    device.use(PROFILES["cuda"])
    x = torch.ones(3, device="sim")
    device.ops, device.waits  # what was dispatched; what the host waited for

Known gaps, each because a device in Python cannot do otherwise in PyTorch 2.11 to 2.15:

=====================================  ============================================================
``sim:1``                              has no backward pass: the engine has one thread for ``sim``
generators                             those of the CPU are accepted. What is drawn without one
                                       comes from the device's own state
``torch.empty(..., pin_memory=True)``  refused in all profiles. ``empty_like`` of a tensor of the
                                       device, ``Tensor.pin_memory`` and ``.to("cpu",
                                       non_blocking=True)`` do it: pinned is a mark on the memory
``UntypedStorage.resize_``             refused; ``Tensor.resize_`` works, and views see it
sparse CSR, quantized, nested tensors  refused: they have dispatch keys of their own
forward-mode derivatives, transforms   of some ops fail: a storage of their tensors has no address
fused cells of LSTM and GRU            fail in lower precision: PyTorch takes them, the CPU has none
conjugated views                       are copies
inference mode                         makes ordinary tensors
errors of hooks in a backward pass     are raised by ``torch.autograd`` in Python; without that, the
                                       engine would end the process
attention                              computes as on an unknown device: no fused kernels
``torch.compile``, process groups      do not know the device
streams                                one for each device; ``torch.Stream`` does nothing
0-dim CPU tensors                      refused by ``cat``, ``stack`` and the scaler's kernels alone;
                                       CUDA accepts them in the ops of TensorIterator alone
asserts of a GPU                       are errors of the CPU, at once: indices that are too large
``xpu_arc``                            refuses to create what it only refuses to compute with
=====================================  ============================================================
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tests.simulated.profiles import PROFILES, Profile, Refusal
from torch import Tensor, UntypedStorage
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,
    generate_methods_for_privateuse1_backend,
)

NAME = "sim"
NUM_DEVICES = 2

ops: collections.Counter[str] = collections.Counter()
"""Dispatched ops, views among them, by name without overload."""

waits: collections.Counter[str] = collections.Counter()
"""Waits of the host for the device, by what it waited for."""

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries: list[torch.library.Library] = []
_profile = PROFILES["all"]


def install() -> None:
    """Make the device known to PyTorch, once in a process and for as long as it runs."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), device_guard=_Guard())
    generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((every, aten))
    every.fallback(_run, "PrivateUse1")
    every.fallback(_run, "SparsePrivateUse1")
    for name, op in _OF_SPARSE.items():
        aten.impl(name, functools.partial(_run_on_parts, op), "SparsePrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in _OWN_KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in ("is_pinned", "_pin_memory"):  # of a CPU tensor
        aten.impl(name, _OWN_KERNELS[name], "CPU")
    # What decomposes for every backend would hide the fallback: views, foreach, out= and others.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten" or name in _OWN_KERNELS or name in _PYTORCHS_KERNELS:
            continue
        if has(full, "CompositeImplicitAutograd"):
            continue
        if has(full, "CompositeExplicitAutograd") or has(
            full, "CompositeExplicitAutogradNonFunctional"
        ):
            op = _overload(name)
            if op is not None:
                aten.impl(name, functools.partial(_run, op), "PrivateUse1")
            if op is not None and name not in _OF_SPARSE:
                aten.impl(name, functools.partial(_run, op), "SparsePrivateUse1")
    UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign,assignment]
    UntypedStorage.resizable = _is_resizable  # type: ignore[method-assign]
    torch.Event, torch.Generator = _Event, _Generator  # type: ignore[misc]
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]


def _overload(name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base, None), overload or "default", None)


def use(profile: Profile) -> None:
    """Let the devices lack what ``profile`` says, from now on."""
    global _profile
    _profile = profile


# ---- Memory. A storage of the device lies at the address of a CPU storage, its attribute _host.


@functools.cache
def _seed(index: int, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of a device, of which others are made."""
    # DLPack is the only way to a tensor of a device other than the first: write the device, after
    # the address of the data, into what is passed on.
    capsule = torch.utils.dlpack.to_dlpack(torch.empty(0, device="cpu"))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(address)[:] = [12, index]  # kDLExtDev
    tensor = torch._C._from_dlpack(capsule)
    return _aten.view.dtype.redispatch(_CPU_KEYS, tensor, dtype)


def _host_storage(storage: UntypedStorage) -> UntypedStorage:
    if not hasattr(storage, "_host"):  # made by PyTorch of an address, as when pickling
        address, size = storage.data_ptr(), storage.nbytes()
        storage._host = torch._C._construct_storage_from_data_pointer(address, _CPU, size)
    return storage._host


def _storage_at(host: UntypedStorage, device: torch.device) -> UntypedStorage:
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes())
    storage._host = host  # lives as long as the storage: PyTorch keeps its Python object
    return storage


def _new_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> UntypedStorage:
    """Stand in for the constructor of ``UntypedStorage``, which for a device in Python crashes."""
    if device is None or torch.device(device).type != NAME:
        return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)
    host = torch._C.StorageBase.__new__(cls, *args, **kwargs)
    return _storage_at(host, _indexed(device))


def _is_resizable(storage: UntypedStorage) -> bool:
    return storage.device.type == NAME or torch._C.StorageBase.resizable(storage)


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    index = _Module.current if device.index is None else device.index
    if not 0 <= index < NUM_DEVICES:
        raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
    return torch.device(NAME, index)


def _set(tensor: Tensor, storage: UntypedStorage, like: Tensor) -> Tensor:
    """Give a tensor a memory, and the place in it that ``like`` has."""
    place = like.storage_offset(), like.size(), like.stride()
    op = _aten.set_.source_Storage_storage_offset
    return op.redispatch(_CPU_KEYS, tensor, storage, *place)


def _host_of(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same memory as one of the device."""
    if tensor.layout is torch.sparse_coo:
        return _sparse(tensor, _host_of(tensor._indices()), _host_of(tensor._values()))
    host = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    return _set(host, _host_storage(tensor.untyped_storage()), tensor)


def _sparse(like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return a sparse tensor of given parts, on their device."""
    return _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=like.is_coalesced(),
    )


def _run_on_parts(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own kernel, which for any device does all with a sparse tensor's parts."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
    return op.redispatch(keys, *args, **kwargs)


_OF_SPARSE = {
    name: getattr(_aten, name).default
    for name in (
        *("_indices", "_values", "_nnz", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim"),
        *("_sparse_coo_tensor_with_dims_and_tensors", "_sparse_coo_tensor_with_dims"),
    )
} | {"copy_": _aten.copy_sparse_to_sparse_.default}


def _is_mine(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


# ---- Ops


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


@contextlib.contextmanager
def _below() -> Iterator[None]:
    """Run what is below dispatch: modes and autocast see the op, not how the device does it."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableAutocast(),
    ):
        yield


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
            self.storages[_host_storage(x)._cdata] = x
            return _host_storage(x)
        if not isinstance(x, Tensor):
            return x
        if _is_mine(x):
            host = _host_of(x)
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                self.storages[_host_storage(storage)._cdata] = storage
            self.pairs[id(host)] = x, host
            _refuse(_profile.dtypes, x.dtype)
            _refuse(_profile.kernels.get(self.facts.name), x.dtype)
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
        return _wrap(x, self.device, self.storages)

    def follow(self) -> None:
        """Let the device's tensors follow what the host's kernel did to sizes and memory."""
        for mine, host in self.pairs.values():
            if mine.layout is torch.sparse_coo:
                whole = _wrap(host, mine.device, self.storages)
                _run_on_parts(_aten.copy_sparse_to_sparse_.default, mine, whole)
                continue
            memory, found = host.untyped_storage(), mine.untyped_storage()
            if memory._cdata != _host_storage(found)._cdata:  # set_()
                found = self.storages.get(memory._cdata) or _storage_at(memory, mine.device)
            elif memory.data_ptr() != found.data_ptr() or memory.nbytes() != found.nbytes():
                # resize_(): what is swapped has the same size, or one of both has none
                empty = UntypedStorage(0)
                found._swap_data_ptr_(_storage_at(empty, mine.device))
                found._swap_data_ptr_(_storage_at(memory, mine.device))
            elif (host.shape, host.stride()) == (mine.shape, mine.stride()):
                continue
            _set(mine, found, host)


def _refuse(refusal: Refusal | None, dtype: torch.dtype | None) -> None:
    if refusal is not None and dtype in refusal.dtypes:
        raise _lacking(refusal.error(refusal.text))


def _lacking(error: Exception) -> Exception:
    """Mark an error as one of a profile's, not one of wrong use."""
    error.is_lack = True  # type: ignore[attr-defined]
    return error


def _wrap(
    host: Tensor, device: torch.device | None, known: dict[int, UntypedStorage] | None = None
) -> Tensor:
    """Return the tensor of a device for one of the host."""
    _refuse(_profile.dtypes, host.dtype)
    if host.layout is torch.sparse_coo:
        parts = (_wrap(part, device, known) for part in (host._indices(), host._values()))
        return _sparse(host, *parts)
    memory = host.untyped_storage()
    device = _indexed(NAME if device is None else device)
    storage = (known or {}).get(memory._cdata)
    if storage is None:
        storage = _storage_at(memory, device)
    seed = _seed(storage.device.index, host.dtype)
    return _set(_aten.as_strided.default.redispatch(_CPU_KEYS, seed, [0], [1], 0), storage, host)


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an op of the device: the CPU's kernel, on the same memory."""
    facts = _facts(op)
    ops[facts.name] += 1
    if facts.name.startswith("_fused_") and facts.name.endswith("_") and not _profile.fused:
        raise _lacking(
            NotImplementedError(
                f"Could not run 'aten::{facts.name}' with arguments from the '{NAME}' backend."
            )
        )
    with _below():
        call = _Call(facts)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            _check_pinned_memory()
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        args = tuple(map(call.down, args, facts.writes))
        kwargs = {name: call.down(x, name in facts.written) for name, x in kwargs.items()}
        if device is not None and torch.device(device).type != NAME:  # zeros_like(x, device="cpu")
            return op(*args, **kwargs)
        if device is not None:
            call.device = _indexed(device)
        if facts.waits:
            _wait(call.device, facts.name)
        if facts.is_random:
            with _Random(call.device):
                result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
        if facts.written:
            call.follow()
        return call.up(result)


# ---- Transfers, which are there when somebody has waited for them


class _Transfer(NamedTuple):
    """A copy that is under way."""

    host: Tensor
    values: Tensor
    to_host: bool

    def arrive(self) -> None:
        if self.to_host:
            self.host.copy_(self.values)
        elif not torch.equal(self.host.view(torch.uint8), self.values.view(torch.uint8)):
            raise RuntimeError("race: pinned memory was written to while it was being transferred")


_under_way: dict[int, collections.deque[_Transfer]] = collections.defaultdict(collections.deque)
_arrived: collections.Counter[int] = collections.Counter()


def _arrive(index: int, until: int | None = None) -> None:
    """Finish the transfers of a device, in order, the first ``until`` ones or all."""
    queue = _under_way[index]
    with torch.no_grad(), _below():
        while queue and (until is None or _arrived[index] < until):
            _arrived[index] += 1
            queue.popleft().arrive()


def _wait(device: torch.device | None, what: str) -> None:
    waits[what] += 1
    _arrive(_indexed(NAME if device is None else device).index)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    ops["copy_"] += 1
    with _below():
        for tensor in (target, source):
            if _is_mine(tensor):
                _refuse(_profile.dtypes, tensor.dtype)
        values = _host_of(source) if _is_mine(source) else source
        if _is_mine(target):
            _host_of(target).copy_(values)
            if _is_mine(source):
                return target
            if not non_blocking:
                _wait(target.device, "copy to device")
            elif _is_pinned(source) and source.is_contiguous() and source.dim():
                _under_way[target.device.index].append(_Transfer(source, source.clone(), False))
        elif non_blocking:
            _under_way[source.device.index].append(_Transfer(target, values.clone(), True))
        else:
            _wait(source.device, "copy to host")
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
        return _run(_aten._to_copy.default, tensor, **options)
    if to.type != NAME:  # pinned, as what .to("cpu", non_blocking=True) returns
        target = _host_like(tensor, pin=non_blocking, **options)
    else:
        with _below():
            host = _host_of(tensor) if _is_mine(tensor) else tensor
            target = _wrap(torch.empty_like(host, **options), to)
    return _copy(target, tensor, non_blocking)


def _host_like(tensor: Tensor, pin: bool, **options: Any) -> Tensor:
    """Return host memory for a tensor, in which a value stands that nobody should read."""
    with _below():
        result = torch.empty_like(_host_of(tensor), **options)
        storage = result.untyped_storage()
        storage.fill_(1 if result.dtype is torch.bool else 0xFF)
        if pin:
            _check_pinned_memory()
            storage._is_pinned = True
        return result


def _empty_like(tensor: Tensor, **options: Any) -> Tensor:
    device, pin = options.pop("device", None), bool(options.pop("pin_memory", None))
    if device is None or torch.device(device).type == NAME:
        return _run(_aten.empty_like.default, tensor, device=device or tensor.device, **options)
    return _host_like(tensor, pin, **options)


def _check_pinned_memory() -> None:
    if not _profile.pinned_memory:
        raise _lacking(
            NotImplementedError(
                "You should register `PrivateUse1HooksInterface`by "
                "`RegisterPrivateUse1HooksInterface` and implement `getPinnedMemoryAllocator` at "
                "the same time for PrivateUse1."
            )
        )


def _is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    with _below():
        return getattr(tensor.untyped_storage(), "_is_pinned", False)


def _pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    if _is_mine(tensor):
        raise RuntimeError(f"cannot pin '{tensor.device}' only dense CPU tensors can be pinned")
    _check_pinned_memory()
    with _below():
        result = tensor.clone()
        result.untyped_storage()._is_pinned = True
        return result


def _read(tensor: Tensor) -> bool | int | float | complex:
    ops["_local_scalar_dense"] += 1
    _wait(tensor.device, "item")
    with _below():
        return _host_of(tensor).item()


class _Event(torch.Event):
    """An event; one of the device has happened after as many looks as the profile says."""

    # PyTorch's class, which a device in Python makes do nothing, is replaced by this one.

    def __init__(self, device: Any = None, **_: Any) -> None:
        self._index = None
        if device is not None and torch.device(device).type == NAME:
            self._index = _indexed(device).index
        self._after: int | None = None
        self._looks = 0

    def record(self, stream: Any = None) -> None:
        if self._index is None:
            return super().record(stream)
        self._check()
        self._after, self._looks = _arrived[self._index] + len(_under_way[self._index]), 0
        return None

    def synchronize(self) -> None:
        if self._index is None:
            return super().synchronize()
        self._check()
        waits["event"] += 1
        return None if self._after is None else _arrive(self._index, self._after)

    def query(self) -> bool:
        if self._index is None:
            return super().query()
        self._check()
        self._looks += 1
        if self._after is not None and self._looks >= _profile.looks:
            _arrive(self._index, self._after)
        return self._after is None or _arrived[self._index] >= self._after

    def _check(self) -> None:
        if not _profile.events:
            raise _lacking(RuntimeError("Backend doesn't support events."))


# ---- Errors of hooks in a backward pass


_fetch_error = ctypes.pythonapi.PyErr_Fetch
_type = torch._C._autograd.DeviceType.PrivateUse1
_error = (ctypes.c_void_p * 3)()  # type, value, traceback
_places_of_error = [ctypes.byref(_error, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(3)]
_errors: list[BaseException] = []


class _Guard(torch._C._acc.DeviceGuard):
    """What PyTorch asks for the device's type, also while an error ends a backward pass."""

    def type_(self) -> Any:
        # An error that a hook raised is still set here, and would end the process at the next call
        # in Python. Take it away, with names that need no call; _run_backward raises it.
        _fetch_error(*_places_of_error)
        if _error[0] is not None:
            kind, value, _ = (x and ctypes.cast(x, ctypes.py_object).value for x in _error)
            _errors.append(value if isinstance(value, BaseException) else kind(value))
            for address in filter(None, _error):
                ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(address))
        return _type


_original_run_backward = torch.autograd.graph._engine_run_backward


@functools.wraps(_original_run_backward)
def _run_backward(*args: Any, **kwargs: Any) -> Any:
    try:
        return _original_run_backward(*args, **kwargs)
    except SystemError:
        if not _errors:
            raise
    raise _errors.pop()


# ---- torch.sim


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """A generator; one of the device is one of the CPU, which PyTorch lets it be nothing else."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return torch._C.Generator(device)
        made = super().__new__(cls)
        made.device = _indexed(device)
        return made

    device = None


_random_states: dict[int, Tensor] = {}


class _Random:
    """The CPU's random state, replaced for a while by that of a device."""

    def __init__(self, device: torch.device | None) -> None:
        self._index = _indexed(NAME if device is None else device).index

    def __enter__(self) -> None:
        self._cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(_random_states.setdefault(self._index, self._cpu))

    def __exit__(self, *_: object) -> None:
        _random_states[self._index] = torch.default_generator.get_state()
        torch.default_generator.set_state(self._cpu)


class _Module:
    """The module ``torch.sim``."""

    current = 0
    _initialized = True  # torch.utils.checkpoint saves random states only then

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return _Module.current

    def set_device(self, device: Any) -> None:
        _Module.current = device if isinstance(device, int) else _indexed(device).index

    class device:
        """Make a device the current one for a while."""

        def __init__(self, device: Any) -> None:
            self._next = device if isinstance(device, int) else _indexed(device).index

        def __enter__(self) -> None:
            self._before, _Module.current = _Module.current, max(self._next, 0)

        def __exit__(self, *_: object) -> None:
            _Module.current = self._before

    def synchronize(self, device: Any = None) -> None:
        index = _Module.current if device is None else device
        _wait(torch.device(NAME, index) if isinstance(index, int) else index, "synchronize")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        _random_states[_Module.current] = torch.Generator().manual_seed(seed).get_state()

    def manual_seed_all(self, seed: int) -> None:
        state = torch.Generator().manual_seed(seed).get_state()
        _random_states.update((index, state) for index in range(NUM_DEVICES))

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        with _Random(torch.device(NAME, device) if isinstance(device, int) else device):
            return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        index = device if isinstance(device, int) else _indexed(device).index
        _random_states[index] = state.clone()


# Their result must be new to Python, for nn.Parameter makes its own object of it.
_PYTORCHS_KERNELS = {"detach", "alias"}

_OWN_KERNELS: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "_copy_from": lambda source, target, non_blocking=False: _copy(target, source, non_blocking),
    "_to_copy": _to_copy,
    "empty_like": _empty_like,
    "is_pinned": _is_pinned,
    "_pin_memory": _pin_memory,
    "_local_scalar_dense": _read,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # the math of composite ops
}
