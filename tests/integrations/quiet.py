"""A Trainer of Lightning that trains and does nothing else."""

from pathlib import Path
from typing import Any

import pytest


def quiet_trainer(folder: Path, **options: Any) -> Any:
    """Return a Trainer on the CPU without logs, checkpoints and bars, but for what is asked for."""
    lightning = pytest.importorskip("lightning")
    return lightning.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **options,
        }
    )
