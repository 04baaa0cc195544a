"""Which precision suits this machine: what its units are, what was measured, what it adds up to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from halfstep._common.machine import device_name
from halfstep._doctor.flags import Flag, read_flags
from halfstep._doctor.speed import Speeds, measure_speeds

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16"]

WORTH_IT = 1.2
"""From this multiple of the speed of fp32 on, a dtype counts as fast."""
AS_GOOD = 0.8
"""bf16 is taken before fp16 from this share of its speed on: it needs no scaler."""

_UNITS = {
    "amx_bf16": "AMX (bf16)",
    "amx_fp16": "AMX (fp16)",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "bf16": "Arm BF16",
    "asimdhp": "Arm FP16",
    "sve": "Arm SVE",
}
_TENSOR_CORES = (((7, 0), "fp16"), ((8, 0), "bf16"), ((8, 0), "tf32"), ((8, 9), "fp8"))


@dataclass(frozen=True)
class Advice:
    """A precision and why.

    Attributes:
        precision: ``"bf16"``, ``"fp16"``, ``"tf32"`` or ``"fp32"``.
        reason: In a sentence.
    """

    precision: Precision
    reason: str


@dataclass(frozen=True)
class MachineReport:
    """A device, measured.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        name: Of the processor or GPU.
        units: What it has for lower precision.
        speeds: What was measured.
        advice: What it adds up to.
        flags: Switches of PyTorch as they are.
    """

    device: str
    name: str
    units: tuple[str, ...]
    speeds: Speeds
    advice: Advice
    flags: tuple[Flag, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def look(on_round: Callable[[float], None] = lambda share: None) -> MachineReport:
    """Measure the accelerator of this machine if it is a CUDA device, else the CPU.

    Takes a second or two. ``on_round`` is told which share of it has gone. Sync: many.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    speeds = measure_speeds(device, on_round=on_round)
    return MachineReport(
        device,
        device_name(device),
        _units(device),
        speeds,
        advise(speeds.ratios),
        tuple(read_flags()),
    )


def advise(ratios: Mapping[str, Mapping[str, float]]) -> Advice:
    """Return the precision to train in.

    Args:
        ratios: Speeds as multiples of fp32's, of ``"matmul"`` and perhaps ``"conv"``.
    """
    matmul = ratios["matmul"]
    bf16, fp16, tf32 = matmul["bf16"], matmul["fp16"], matmul.get("tf32", 0.0)
    if bf16 >= WORTH_IT and bf16 >= AS_GOOD * fp16:
        reason = f"matrix products run at {bf16:.2g} x the speed of fp32"
        return Advice("bf16", f"{reason}{_conv(ratios, 'bf16')}, and no scaler is needed")
    if fp16 >= WORTH_IT:
        reason = f"matrix products run at {fp16:.2g} x the speed of fp32, in bf16 at {bf16:.2g} x"
        return Advice("fp16", f"{reason}{_conv(ratios, 'fp16')}; with a GradScaler")
    slow = f"bf16 runs at {bf16:.2g} x and fp16 at {fp16:.2g} x the speed of fp32"
    if tf32 >= WORTH_IT:
        return Advice("tf32", f"{slow}, TF32 at {tf32:.2g} x")
    return Advice("fp32", f"{slow} in matrix products: lower precision saves memory, not time")


def _conv(ratios: Mapping[str, Mapping[str, float]], name: str) -> str:
    ratio = ratios.get("conv", {}).get(name)
    return "" if ratio is None else f" (convolutions at {ratio:.2g} x)"


def _units(device: str) -> tuple[str, ...]:
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        return units_of_capability(capability)
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    flags = {name for name, has in known.items() if has is True}
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    vector = torch.backends.cpu.get_cpu_capability()
    return (f"{vector} in use", *units_of_flags(flags | set(text.split())))


def units_of_flags(flags: set[str]) -> tuple[str, ...]:
    """Return what a CPU has for lower precision, from the names of its features."""
    return tuple(title for flag, title in _UNITS.items() if flag in flags)


def units_of_capability(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the compute capability and the formats that its matrix units take."""
    formats = [name for since, name in _TENSOR_CORES if capability >= since]
    major, minor = capability
    number = f"compute capability {major}.{minor}"
    return (number, f"matrix units for {', '.join(formats)}") if formats else (number,)
