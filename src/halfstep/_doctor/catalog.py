"""What there is to find, and how bad it is. docs/doctor.md has a section on each."""

from __future__ import annotations

from halfstep._common.text import Severity

CATALOG: dict[str, Severity] = {
    # precision and scaler
    "fp16-without-scaler": "bad",
    "scaler-with-bf16": "warning",
    "torch-scaler": "notice",
    # the calls of an iteration
    "clip-before-unscale": "bad",
    "scaler-bypassed": "bad",
    "update-missing": "bad",
    "closure-not-unscaled": "bad",
    "scheduler-ungated": "notice",
    "sum-loss": "warning",
    # where autocast is
    "backward-in-autocast": "warning",
    "autocast-around-backward": "warning",
    "weights-cast-in-loop": "notice",
    # parameters and optimizers
    "half-parameters": "bad",
    "bf16-parameters": "notice",
    "eps-underflow": "bad",
    "shared-parameter": "warning",
    "optimizer-before-move": "warning",
    "replaced-parameters": "bad",
    "untrained-parameters": "notice",
    "scheduler-of-another": "warning",
    # the process
    "reduced-precision-sums": "notice",
    "tf32-off": "notice",
    "onednn-off": "warning",
    "source-not-read": "notice",
}
"""The ids and their severities: ``bad`` loses training, ``warning`` may, ``notice`` is to know."""
