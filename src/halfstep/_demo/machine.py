"""What this machine is good at: measured matrix products, and the versions that ran."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

import halfstep
from halfstep._common.machine import device_name
from halfstep._doctor.machine import WORTH_IT
from halfstep._doctor.speed import DTYPES, measure_speeds

MEASURE_SECONDS = 0.6
"""For all dtypes, in turn."""


@dataclass(frozen=True)
class Machine:
    """The machine and the software of one demo.

    Attributes:
        device: name of the processor or GPU.
        threads: CPU threads that PyTorch uses.
        gflops: 1e9 floating-point operations a second in a matrix product, by dtype name.
        versions: of Python, torch and halfstep.
        system: operating system and architecture.
    """

    device: str
    threads: int
    gflops: dict[str, float]
    versions: dict[str, str]
    system: str

    def sentence(self) -> str:
        """One sentence on what the machine is good at, from the measured numbers alone."""
        fp32 = self.gflops["fp32"]
        rates = ", ".join(
            f"{rate:,.0f} in {name}" + ("" if name == "fp32" else f" ({rate / fp32:.2g} x)")
            for name, rate in self.gflops.items()
        )
        measured = f"This machine ({self.device}) does matrix products at {rates} GFLOP/s"
        return f"{measured}: {self._advice()}"

    def _advice(self) -> str:
        ratios = {name: self.gflops[name] / self.gflops["fp32"] for name in ("bf16", "fp16")}
        fast = [name for name, ratio in ratios.items() if ratio >= WORTH_IT]
        slow = [name for name, ratio in ratios.items() if ratio <= 1 / WORTH_IT]
        if len(fast) == 2:
            return "it is good at both bf16 and fp16."
        if not fast:
            return "neither bf16 nor fp16 makes it faster than fp32."
        other = "fp16" if fast == ["bf16"] else "bf16"
        than = "slower than fp32" if other in slow else "no faster than fp32"
        return f"it is good at {fast[0]}; {other} is {than}."


def measure_machine(device: str) -> Machine:
    """Measure a few matrix products, in about a second, and look up names and versions."""
    speeds = measure_speeds(device, MEASURE_SECONDS, kinds=("matmul",))
    return Machine(
        device=device_name(device),
        threads=torch.get_num_threads(),
        gflops={name: speeds.gflops["matmul"][name] for name in DTYPES},
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "halfstep": halfstep.__version__,
        },
        system=platform.platform(),
    )
