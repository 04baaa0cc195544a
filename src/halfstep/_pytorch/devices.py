"""What PyTorch has for each type of device, copies to the host, and what a GPU's card computes.

A path that avoids a missing kernel is chosen by this table, not by trying. Only a device that
PyTorch does not know is asked, once, for pinned memory and events. Files are PyTorch's,
read in the sources of the version given; on CUDA, tests/test_devices_gpu.py compares (an H200).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

_VERSION = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))

_PLAIN = frozenset({torch.float32, torch.float64, torch.float16})
_ALL = _PLAIN | {torch.bfloat16}


@dataclass(frozen=True)
class Facts:
    """What PyTorch has for a type of device; the defaults hold for one that it does not know."""

    # The dtypes that _amp_foreach_non_finite_check_and_unscale_ computes right.
    unscales: frozenset[torch.dtype] = _PLAIN
    moves_scale: bool = True  # _amp_update_scale_ is right, for views into a larger tensor too
    fused_skips: bool = True  # fused optimizers use grad_scale and found_inf
    has_float64: bool | None = True  # None if that depends on the card
    has_arrivals: bool = False  # events tell when a copy to pinned memory has arrived
    # A non-blocking copy from unpinned memory of the host has read it when the call returns.
    reads_at_once: bool = False
    adds_in_float32: frozenset[str] = frozenset()  # the ops whose kernels add up 16-bit terms so
    adds_rows_in_float32: frozenset[str] = frozenset()  # only along dimension 0 of several


UNKNOWN = Facts()


class _FactsOf(dict[str, Facts]):
    def __missing__(self, device_type: str) -> Facts:
        return _facts_of_unknown(device_type)


FACTS = _FactsOf(
    cpu=Facts(
        unscales=_ALL,  # cpu/AmpGradScalerKernels.cpp, 2.13, and compared by tests
        has_arrivals=True,
        reads_at_once=True,
        # Measured, benchmarks/op_audit.py.
        adds_in_float32=frozenset({"gather", "scatter_add", "scatter_reduce"}),
        adds_rows_in_float32=frozenset({"index_add", "index_select"}),
    ),
    # ROCm too: its kernels are made from these.
    cuda=Facts(
        # AT_DISPATCH_FLOATING_TYPES_AND_HALF in cuda/AmpKernels.cu, pytorch#127176. bfloat16 is
        # added by pytorch#194947, opened after 2.13 and not known to be in a release.
        unscales=_PLAIN,
        has_arrivals=True,
        reads_at_once=True,  # CUDA's driver API: cudaMemcpyAsync copies pageable memory first
        # Measured on an H200 with 2.11, tests/test_devices_gpu.py. index_put adds the terms of
        # the test in float32; cuda/Indexing.cu does not say so for all shapes.
        adds_in_float32=frozenset({"embedding"}),
    ),
    mps=Facts(
        # Up to 2.12 mps/kernels/Amp.metal reads inv_scale in the dtype of the gradients, from a
        # float32: 16-bit gradients become 0 (pytorch#184286).
        unscales=frozenset({torch.float32} if _VERSION < (2, 13) else _ALL - {torch.float64}),
        # mps/operations/Amp.mm: since pytorch#150255 the buffers were bound without the offsets of
        # views. Amp.metal also lets the scale grow to inf. The release that ends this is not known.
        moves_scale=False,
        # Up to 2.12 both are ignored (pytorch#186360; its change to OperationUtils.h is in 2.13).
        fused_skips=_VERSION >= (2, 13),
        has_float64=False,  # mps/MPSGuardImpl.h, getDeviceCapability, 2.13
        # Pinned memory was a tensor of the device (pytorch#181374); what came in its place after
        # 2.12 (pytorch#181720) was reused while it was written to (pytorch#193819).
        has_arrivals=False,
        reads_at_once=False,  # pytorch#139550, pytorch#189690: both open
    ),
    xpu=Facts(
        unscales=_ALL,  # intel/torch-xpu-ops, src/ATen/native/xpu/sycl/AmpKernels.cpp, 2026
        has_float64=None,  # Arc of the A series has none: pytorch#147731, torch-xpu-ops#1742
        has_arrivals=True,  # xpu/PinnedMemoryAllocator.h, 2.13
        reads_at_once=True,  # torch-xpu-ops, src/ATen/native/xpu/Copy.cpp, 2026: it is staged
    ),
)


# (device type): what PyTorch has for it; in each step, so without a call in Python.
facts: Callable[[str], Facts] = FACTS.__getitem__


@cache
def _facts_of_unknown(device_type: str) -> Facts:
    try:
        torch.empty_like(torch.empty(1, device="cpu"), pin_memory=True)
        torch.Event(device_type).record()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return UNKNOWN
    return replace(UNKNOWN, has_arrivals=True)


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    known = facts(device.type).has_float64
    return _card_has_float64(device) if known is None else known


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has none."""
    return torch.float64 if has_float64(device) else torch.float32


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float64 copy; on the CPU for a device without float64. Sync: one there."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).to(torch.float64, copy=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on another device.

    Sync: none; one to the CPU, or from it to a device that may read the host's memory later.
    """
    if tensor.device == device:
        return tensor
    # A non-blocking copy to the CPU could be read before it has arrived.
    is_to_cpu = device.type == "cpu"
    is_safe = not tensor.is_cpu or facts(device.type).reads_at_once
    return tensor.to(device, non_blocking=is_safe and not is_to_cpu)


def can_move_scale(device: torch.device) -> bool:
    """Return whether ``_amp_update_scale_`` runs on a device and is right there."""
    # On XPU the kernel multiplies by a double (AmpKernels.cpp, as above).
    return facts(device.type).moves_scale and (device.type != "xpu" or has_float64(device))


@cache
def _card_has_float64(device: torch.device) -> bool:
    return bool(torch.xpu.get_device_properties(device).has_fp64)


# --- copies on their way to the host --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Transfer:
    """A copy on the host, to be read once it has arrived."""

    values: torch.Tensor
    arrival: torch.Event | None = None  # the event after it; None if it is there already

    def has_arrived(self) -> bool:
        """Return whether ``values`` can be read. Sync: none."""
        return self.arrival is None or self.arrival.query()

    def wait(self) -> torch.Tensor:
        """Return the copy once it has arrived. Sync: one."""
        if self.arrival is not None and not self.arrival.query():
            self.arrival.synchronize()
        return self.values


def to_host(tensor: torch.Tensor) -> Transfer:
    """Start copying a tensor of an accelerator into pinned memory; return one on the CPU itself.

    Sync: none; one on a device that cannot tell when a copy has arrived.
    """
    device = tensor.device.type
    if device == "cpu":
        return Transfer(tensor)
    if not facts(device).has_arrivals:
        return Transfer(tensor.cpu())
    values = torch.empty_like(tensor, device="cpu", pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    arrival = torch.Event(device)
    arrival.record()
    return Transfer(values, arrival)


def is_capturing(device: torch.device) -> bool:
    """Return whether ops on a device are recorded for a CUDA graph."""
    # In a graph, the copy would be repeated at every replay, and the event could not be queried.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# --- cards ----------------------------------------------------------------------------------------

# The chips TU116 and TU117 have compute capability 7.5 but no tensor cores, and float16
# convolutions are NaN there: pytorch#58123, pytorch#77955. Names as in ultralytics#17977, with two
# other cards of the chip TU117.
_NO_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bT\d{3,4}\b|\bMX[45]50\b")


def has_safe_float16() -> bool:
    """Return whether convolutions in float16 are right on the current CUDA or ROCm device."""
    card = torch.cuda.get_device_properties()
    return (card.major, card.minor) != (7, 5) or not _NO_TENSOR_CORES.search(card.name)
