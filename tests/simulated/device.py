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

import ctypes
import functools
from typing import Any

import torch
from tests.simulated.kernels import OWN_KERNELS, PYTORCHS_KERNELS, Random, random_states, run_op
from tests.simulated.memory import OF_SPARSE, is_resizable, new_storage, run_on_parts
from tests.simulated.profiles import Profile
from tests.simulated.state import NAME, NUM_DEVICES, Now, indexed, ops, waits
from tests.simulated.transfers import Event, wait
from torch import Tensor, UntypedStorage
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,
    generate_methods_for_privateuse1_backend,
)

__all__ = ["NAME", "NUM_DEVICES", "install", "ops", "use", "waits"]

_aten = torch.ops.aten
_libraries: list[torch.library.Library] = []


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
    every.fallback(run_op, "PrivateUse1")
    every.fallback(run_op, "SparsePrivateUse1")
    for name, op in OF_SPARSE.items():
        aten.impl(name, functools.partial(run_on_parts, op), "SparsePrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in OWN_KERNELS.items():
        aten.impl(name, kernel, "PrivateUse1")
    for name in ("is_pinned", "_pin_memory"):  # of a CPU tensor
        aten.impl(name, OWN_KERNELS[name], "CPU")
    # What decomposes for every backend would hide the fallback: views, foreach, out= and others.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten" or name in OWN_KERNELS or name in PYTORCHS_KERNELS:
            continue
        if has(full, "CompositeImplicitAutograd"):
            continue
        if has(full, "CompositeExplicitAutograd") or has(
            full, "CompositeExplicitAutogradNonFunctional"
        ):
            op = _overload(name)
            if op is not None:
                aten.impl(name, functools.partial(run_op, op), "PrivateUse1")
            if op is not None and name not in OF_SPARSE:
                aten.impl(name, functools.partial(run_op, op), "SparsePrivateUse1")
    UntypedStorage.__new__ = new_storage  # type: ignore[method-assign,assignment]
    UntypedStorage.resizable = is_resizable  # type: ignore[method-assign]
    torch.Event, torch.Generator = Event, _Generator  # type: ignore[misc]
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]


def _overload(name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base, None), overload or "default", None)


def use(profile: Profile) -> None:
    """Let the devices lack what ``profile`` says, from now on."""
    Now.profile = profile


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
        made.device = indexed(device)
        return made

    device = None


class _Module:
    """The module ``torch.sim``."""

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
        return Now.index

    def set_device(self, device: Any) -> None:
        Now.index = device if isinstance(device, int) else indexed(device).index

    class device:
        """Make a device the current one for a while."""

        def __init__(self, device: Any) -> None:
            self._next = device if isinstance(device, int) else indexed(device).index

        def __enter__(self) -> None:
            self._before, Now.index = Now.index, max(self._next, 0)

        def __exit__(self, *_: object) -> None:
            Now.index = self._before

    def synchronize(self, device: Any = None) -> None:
        index = Now.index if device is None else device
        wait(torch.device(NAME, index) if isinstance(index, int) else index, "synchronize")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        random_states[Now.index] = torch.Generator().manual_seed(seed).get_state()

    def manual_seed_all(self, seed: int) -> None:
        state = torch.Generator().manual_seed(seed).get_state()
        random_states.update((index, state) for index in range(NUM_DEVICES))

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        with Random(torch.device(NAME, device) if isinstance(device, int) else device):
            return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        index = device if isinstance(device, int) else indexed(device).index
        random_states[index] = state.clone()
