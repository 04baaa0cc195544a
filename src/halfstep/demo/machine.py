"""What this machine is good at: measured matrix products, and the versions that ran."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import halfstep
from halfstep.machine import device_name

MATRIX_SIDE = {"cpu": 768, "cuda": 4096}
"""Large enough to be limited by arithmetic, small enough for a fp16 CPU kernel to end soon."""

FEWEST_PRODUCTS, MEASURE_SECONDS = 5, 0.2
"""Of each dtype, whichever takes longer."""

WORTH_IT = 1.2
"""From this ratio to fp32 on, the sentence calls a dtype fast."""


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
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return Machine(
        device=device_name(device),
        threads=torch.get_num_threads(),
        gflops={name: _matmul_gflops(device, dtype) for name, dtype in dtypes.items()},
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "halfstep": halfstep.__version__,
        },
        system=platform.platform(),
    )


def _matmul_gflops(device: str, dtype: torch.dtype) -> float:
    """The best of many products, as a linear layer does: other programs only slow them down."""
    side = MATRIX_SIDE[device]
    a = torch.ones(side, side, device=device, dtype=dtype)
    durations: list[float] = []
    while len(durations) < FEWEST_PRODUCTS or sum(durations) < MEASURE_SECONDS:
        started = time.perf_counter()
        F.linear(a, a)
        if device == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - started)
    return 2 * side**3 / min(durations) / 1e9
