"""The scaler that does not scale."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.scaling.scaler import GradScaler


class DisabledGradScaler(GradScaler):
    """What ``GradScaler(enabled=False)`` returns: every method works, nothing is scaled."""

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = False,
    ) -> None:
        # No look at the device: GradScaler("cuda", enabled=torch.cuda.is_available()) is usual.
        super().__init__(None, init_scale, growth_factor, backoff_factor, growth_interval)

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` as they are."""
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step``, with a closure if there is one."""
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Do nothing."""

    def get_scale(self) -> float:
        """Return 1.0."""
        return 1.0

    def is_enabled(self) -> bool:
        """Return False."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return ``{}``."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str | None) -> None:
        """Do nothing: there is no scale to create."""
