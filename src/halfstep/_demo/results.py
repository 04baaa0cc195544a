"""The results of a demo: all numbers for the table, the plot and ``results.json``."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

import halfstep
from halfstep._common.json import to_plain
from halfstep._common.machine import device_name
from halfstep._demo.corpus import Corpus
from halfstep._demo.settings import DemoSettings
from halfstep._demo.train import PrecisionRun
from halfstep._doctor.hardware import DTYPES, WORTH_IT, measure_speeds

MEASURE_SECONDS = 0.6
"""For all dtypes, in turn."""


@dataclass(frozen=True)
class MeasuredMachine:
    """The machine and the software of a demo, with measured speeds."""

    device: str
    threads: int
    gflops: dict[str, float]  # in a matrix product, by name of the dtype
    ratios: dict[str, float]  # of the speed to that of fp32, medians
    noise: str  # why the measurement tells nothing; empty if it does
    versions: dict[str, str]
    system: str

    def sentence(self) -> str:
        """Return one sentence on the strengths of the machine, from the measured numbers alone."""
        rates = ", ".join(
            f"{rate:,.0f} in {name}" + ("" if name == "fp32" else f" ({self.ratios[name]:.2g} x)")
            for name, rate in self.gflops.items()
        )
        measured = f"This machine ({self.device}) does matrix products at {rates} GFLOP/s"
        return f"{measured}: {self._advice()}"

    def _advice(self) -> str:
        if self.noise:
            return f"{self.noise}."
        ratios = {name: self.ratios[name] for name in ("bf16", "fp16")}
        fast = [name for name, ratio in ratios.items() if ratio >= WORTH_IT]
        slow = [name for name, ratio in ratios.items() if ratio <= 1 / WORTH_IT]
        if len(fast) == 2:
            return "it is good at both bf16 and fp16."
        if not fast:
            return "neither bf16 nor fp16 makes it faster than fp32."
        other = "fp16" if fast == ["bf16"] else "bf16"
        than = "slower than fp32" if other in slow else "no faster than fp32"
        return f"it is good at {fast[0]}; {other} is {than}."


def measure_machine(device: str) -> MeasuredMachine:
    """Measure a few matrix products, in about a second, and look up names and versions."""
    speeds = measure_speeds(device, MEASURE_SECONDS, kinds=("matmul",))
    return MeasuredMachine(
        device=device_name(device),
        threads=torch.get_num_threads(),
        gflops={name: speeds.gflops["matmul"][name] for name in DTYPES},
        ratios={name: speeds.ratios["matmul"][name] for name in DTYPES},
        noise=speeds.noise,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "halfstep": halfstep.__version__,
        },
        system=platform.platform(),
    )


@dataclass(frozen=True)
class Results:
    """All runs of one call of ``halfstep demo``."""

    settings: DemoSettings
    corpus: Corpus
    machine: MeasuredMachine
    runs: list[PrecisionRun]  # the last one may have been cut short
    num_parameters: int

    @property
    def baseline(self) -> PrecisionRun | None:
        """The finished fp32 run, to which the others are compared."""
        return next((r for r in self.runs if r.precision.name == "fp32" and r.is_finished), None)

    def summary(self, run: PrecisionRun) -> dict[str, Any]:
        """Return the numbers of the table for one run; None where there is none (yet).

        Losses in nats per token, times in milliseconds, memory in bytes, shares from 0 to 1.
        """
        base = self.baseline
        seconds = run.step_seconds
        return {
            "training_loss": run.training_loss,
            "training_loss_minus_fp32": _difference(run, base, run.training_loss, "training_loss"),
            "held_out_loss": run.held_out_loss,
            "held_out_loss_minus_fp32": _difference(run, base, run.held_out_loss, "held_out_loss"),
            "step_ms": None if seconds is None else seconds * 1e3,
            "step_time_ratio_to_fp32": (
                None
                if seconds is None or base is None or base.step_seconds is None
                else seconds / base.step_seconds
            ),
            "peak_memory_bytes": run.peak_memory,
            "steps_skipped": len(run.skipped) if run.precision.scaling else None,
            "final_scale": run.final_scale,
            "zero_gradient_share": run.zero_share,
        }

    def to_json(self) -> str:
        """Return everything as strict JSON: a loss that is not finite becomes null."""
        settings = asdict(self.settings) | {"text": self.corpus.source}
        document = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": asdict(self.machine),
            "settings": settings,
            "model": {"parameters": self.num_parameters, "vocab": self.corpus.vocab},
            "characters": {
                "training": len(self.corpus.train),
                "held_out": len(self.corpus.held_out),
            },
            "runs": [self._run_as_dict(run) for run in self.runs],
        }
        return (
            json.dumps(to_plain(document, non_finite=lambda _: None), indent=1, allow_nan=False)
            + "\n"
        )

    def _run_as_dict(self, run: PrecisionRun) -> dict[str, Any]:
        return {
            "precision": run.precision.name,
            "finished": run.is_finished,
            "steps_done": len(run.losses),
            "summary": self.summary(run),
            "losses": run.losses,
            "scales": run.scales,
            "skipped": run.skipped,
            "step_ms": [seconds * 1e3 for seconds in run.seconds],
            "zero_gradient_shares": run.zero_shares,
        }


def _difference(
    run: PrecisionRun, base: PrecisionRun | None, value: float | None, name: str
) -> float | None:
    """Return the difference to the baseline; None for a run that was cut short."""
    if base is None or value is None or not run.is_finished:
        return None
    return float(value - getattr(base, name))
