"""Validation of numbers, float32 arithmetic, and the scalars of a step.

Scalars are Python numbers on the CPU, where reading is cheap, and tensors on their device
elsewhere. Sync: none, in all of these functions, except from another device to the CPU.
"""

from __future__ import annotations

import itertools
import math
import numbers
import struct
from collections.abc import Iterable, Sequence
from ctypes import c_float
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep._common.text import did_you_mean, shown
from halfstep._pytorch.amp import autocast_devices, reciprocal_of
from halfstep._pytorch.devices import to_device

CPU = torch.device("cpu")

# The reciprocal of a smaller scale, which gradients are multiplied by, may be inf. A larger scale
# is inf itself.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127

# PyTorch's kernels count in int32.
LARGEST_COUNT = 2**31 - 1


def round_to_float32(value: float) -> float:
    """Return the float32 number nearest to ``value``, inf if it overflows."""
    return c_float(value).value


def float32_bits(value: float) -> int:
    """Return the bits of the float32 number nearest to ``value``, read as an int32."""
    bits: int = struct.unpack("=i", bytes(c_float(value)))[0]
    return bits


def float32_from_bits(bits: int) -> float:
    """Return the float32 number with these bits."""
    return c_float.from_buffer_copy(struct.pack("=i", bits)).value


def checked_number(name: str, value: object, example: float = 1.0) -> float:
    """Return ``value`` as a finite float; reject bools."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {shown(value)}: pass a number such as {example}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: pass a finite number")
    return number


def checked_scale(name: str, value: object) -> float:
    """Return ``value`` rounded to float32; reject it if it is not a usable scale."""
    number = round_to_float32(checked_number(name, value, 65536.0))
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} is {value!r}: a scale must lie between {SMALLEST_SCALE:.3g} and "
            f"{LARGEST_SCALE:.3g} (the normal range of float32), for example 65536.0"
        )
    return number


def checked_count(name: str, value: object, *, at_least: int) -> int:
    """Return ``value`` as an int between ``at_least`` and the largest int32."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {shown(value)}: pass a whole number")
    count = int(value)
    if not at_least <= count <= LARGEST_COUNT:
        raise ValueError(f"{name} is {count}: it must lie between {at_least} and {LARGEST_COUNT}")
    return count


def check_ascending(**numbers: float) -> None:
    """Raise a ValueError that names two neighbours unless the numbers are non-decreasing."""
    for (name, number), (next_name, next_number) in itertools.pairwise(numbers.items()):
        if number > next_number:
            raise ValueError(f"{name} is {number}, above {next_name}, which is {next_number}")


def checked_device(device: str | torch.device) -> str:
    """Return the name of a device; reject what is none, or not available on this machine."""
    if not isinstance(device, str | torch.device):
        is_scale = isinstance(device, numbers.Real) and not isinstance(device, bool)
        scale = f"; for the scale write GradScaler(init_scale={device!r})" if is_scale else ""
        raise TypeError(
            f"GradScaler(device={shown(device)}): the device comes first, such as 'cuda'{scale}"
        )
    try:
        device = torch.device(device)
    except RuntimeError as error:
        near = did_you_mean(str(device), autocast_devices())
        raise ValueError(f"GradScaler(device={device!r}): no such device{near}") from error
    is_available = getattr(getattr(torch, device.type, None), "is_available", lambda: True)
    if not is_available():
        raise ValueError(
            f"GradScaler(device={str(device)!r}): PyTorch {torch.__version__} sees no "
            f"{device.type} device on this machine. Write GradScaler() to use the device of the "
            "first loss, or pass enabled=False to train without scaling"
        )
    return str(device)


# --- scalars --------------------------------------------------------------------------------------

# A number in a step: a float if the scale is on the CPU, else a tensor on its device.
Scalar: TypeAlias = float | Tensor

READABLE = {"cpu"}  # types of devices whose values can be read without a sync


def scalar(value: Tensor) -> Scalar:
    """Return a CPU tensor as a number, any other one unchanged."""
    return value.item() if value.device.type in READABLE else value


def as_tensor(value: Scalar, device: torch.device) -> Tensor:
    """Return a float32 scalar on ``device``."""
    if isinstance(value, Tensor):
        return to_device(value.float(), device)
    return torch.full((), value, dtype=torch.float32, device=device)


def any_of(found: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a float32 scalar on ``device``: 1 if any of ``found`` (each 1 or 0) is 1, else 0."""
    flags = [to_device(flag, device) for flag in found]
    return torch.stack(flags).amax() if len(flags) > 1 else flags[0]


def joined(values: Sequence[Tensor]) -> Tensor:
    """Return scalars of one dtype as a vector, in float32 if they have 16 bits.

    The user's autocast to bfloat16 lets no float16 be joined.
    """
    is_narrow = values[0].element_size() == 2
    return torch.stack([value.float() for value in values] if is_narrow else [*values])


def combine(found: Iterable[Tensor], device: torch.device) -> Scalar:
    """Return 1 if any of ``found`` is 1 or more, else 0.

    Never any other number: PyTorch 2.13's fused optimizers skip a step only if the flag is exactly
    1, and code that all-reduces the flags (``_found_inf_per_device``) may have summed them.
    """
    if device.type not in READABLE:
        return any_of(found, device).clamp(max=1.0)
    is_any = False
    for flag in found:
        is_any |= flag.item() != 0.0
    return float(is_any)


def is_nonfinite(value: Tensor) -> Tensor:
    """Return 1.0 if a scalar is inf or NaN, else 0.0, in float32."""
    # torch.isfinite takes four kernels.
    flag = torch.empty((), dtype=torch.float32, device=value.device)
    return torch.ne(value * 0.0, 0.0, out=flag)


def flag_nonfinite(value: Scalar, device: torch.device) -> Tensor:
    """Return 1.0 if a number is inf or NaN, else 0.0, as a float32 tensor on ``device``."""
    if isinstance(value, Tensor):
        return is_nonfinite(value)
    flag = 0.0 if math.isfinite(value) else 1.0
    return torch.full((), flag, dtype=torch.float32, device=device)


def reciprocal(scale: Scalar) -> Scalar:
    """Return 1 / scale, rounded once to float32."""
    if not isinstance(scale, Tensor):
        return c_float(1.0 / scale).value
    return reciprocal_of(scale)


def to_single(value: Scalar) -> Scalar:
    """Return a number rounded to float32."""
    return value.float() if isinstance(value, Tensor) else c_float(value).value


def describe(tensor: Tensor) -> str:
    """Return dtype, shape and device: ``float16[4, 8] on cpu``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"


def zero_if_finite(loss: Tensor) -> Tensor | None:
    """Return 0 if all local entries of a loss are finite, else NaN; None for integers."""
    if hasattr(loss, "to_local"):  # a DTensor, without importing torch.distributed
        loss = loss.to_local()
    if loss.is_complex():
        loss = torch.view_as_real(loss.resolve_conj())
    if not loss.is_floating_point():
        return None
    # The sum of the loss itself may overflow, and Inductor simplifies loss * 0 to 0.
    zero = loss - loss
    return zero.sum() if zero.dim() else zero
