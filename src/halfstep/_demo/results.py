"""The result of a demo: every number once, for the table, the plot and ``results.json``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from halfstep._demo.machine import Machine
from halfstep._demo.settings import Settings
from halfstep._demo.text import Corpus
from halfstep._demo.train import Run


@dataclass(frozen=True)
class Results:
    """All runs of one call of ``halfstep demo``.

    Attributes:
        settings: what was asked for.
        corpus: the text.
        machine: where it ran.
        runs: finished ones, and possibly a last one that was cut short.
        num_parameters: of the model.
    """

    settings: Settings
    corpus: Corpus
    machine: Machine
    runs: list[Run]
    num_parameters: int

    @property
    def baseline(self) -> Run | None:
        """The finished fp32 run, to which the others are compared."""
        return next((r for r in self.runs if r.precision.name == "fp32" and r.is_finished), None)

    def summary(self, run: Run) -> dict[str, Any]:
        """The numbers of the table for one run; None where there is none (yet).

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
        """Everything, as strict JSON: a loss that is not finite becomes null."""
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
        return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"

    def _run_as_dict(self, run: Run) -> dict[str, Any]:
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


def _difference(run: Run, base: Run | None, value: float | None, name: str) -> float | None:
    """Compare runs of the same length only: an early loss says nothing next to a final one."""
    if base is None or value is None or not run.is_finished:
        return None
    return float(value - getattr(base, name))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
