"""What devices lack, as data: the profiles of the simulated device.

The texts are those of PyTorch's sources, main branch of 2026 unless a source is named. A device
that has everything is ``Profile()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Refusal:
    """Dtypes that are refused, and the exception that the real device raises."""

    dtypes: frozenset[torch.dtype]
    error: type[Exception]
    text: str


@dataclass(frozen=True)
class Profile:
    """What a device lacks.

    Attributes:
        dtypes: Refused everywhere: no tensor of such a dtype can be made. None if all exist.
        kernels: Refused by single ops, by name without overload.
        pinned_memory: Whether host memory can be pinned for it.
        events: Whether ``torch.Event`` works.
        fused: Whether it has fused optimizers.
        looks: How often an event is asked before it has happened: 1 for a device that is never
            behind.
    """

    dtypes: Refusal | None = None
    kernels: Mapping[str, Refusal] = field(default_factory=dict)
    pinned_memory: bool = True
    events: bool = True
    fused: bool = True
    looks: int = 1


FLOAT64 = frozenset({torch.float64, torch.complex128})

PROFILES = {
    # aten/src/ATen/native/cuda/AmpKernels.cu: AT_DISPATCH_FLOATING_TYPES_AND_HALF; pytorch#127176.
    "cuda": Profile(
        kernels={
            "_amp_foreach_non_finite_check_and_unscale_": Refusal(
                frozenset({torch.bfloat16}),
                NotImplementedError,
                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
            )
        }
    ),
    # aten/src/ATen/mps/EmptyTensor.cpp: MPS_ERROR_DOUBLE_NOT_SUPPORTED, with TORCH_CHECK_TYPE.
    "mps": Profile(
        dtypes=Refusal(
            FLOAT64,
            TypeError,
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead.",
        )
    ),
    # SYCL's error for a kernel that needs the aspect fp64; pytorch#147731.
    "xpu_arc": Profile(
        dtypes=Refusal(FLOAT64, RuntimeError, "Required aspect fp64 is not supported on the device")
    ),
    # A backend that registers no allocator of pinned memory, and whose device guard keeps the
    # defaults of c10/core/impl/DeviceGuardImplInterface.h.
    "plain": Profile(pinned_memory=False, events=False, fused=False),
    "all": Profile(),
    "slow": Profile(looks=3),
}
