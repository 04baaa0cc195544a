"""timm: a replacement of its loss scaler that uses halfstep's GradScaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep import GradScaler
from halfstep.integrations import needs

with needs("timm"):
    from timm.utils import dispatch_clip_grad


class NativeScaler:
    """A loss scaler whose call runs all that follows a forward pass: backward, clip, step, update.

    It replaces ``timm.utils.NativeScaler`` and has the same call and the same key in checkpoints.
    Each of the two can load the other's checkpoints.

    Args:
        device: The device of a new scaler, if none is given; by default that of the first loss.
        scaler: The scaler; by default a new one.

    Raises:
        ValueError: PyTorch finds no such device.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_scaler = NativeScaler()
        >>> loss = model(torch.ones(2, 4)).square().mean()
        >>> loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        >>> loss_scaler.scaler.outcome(optimizer).taken
        True
    """

    state_dict_key = "amp_scaler"

    def __init__(
        self, device: str | torch.device | None = None, scaler: GradScaler | None = None
    ) -> None:
        self.scaler = GradScaler(device) if scaler is None else scaler

    def __call__(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Scale the loss, run the backward pass, and step if the gradients are finite.

        Args:
            loss: A scalar.
            optimizer: The optimizer whose gradients are unscaled and used.
            clip_grad: The value to clip gradients to; None to not clip.
            clip_mode: ``"norm"``, ``"value"`` or ``"agc"``. The norm of the optimizer's gradients
                is clipped in the same pass that unscales and checks.
            parameters: The parameters whose gradients are clipped; None for the optimizer's.
            create_graph: As for ``backward``.
            need_update: False to only accumulate gradients, for a later call to use.

        Sync: that of ``GradScaler.step``; none without an update.
        """
        self.scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        max_norm = None
        if clip_grad is not None:
            own = [param for group in optimizer.param_groups for param in group["params"]]
            clipped = own if parameters is None else list(parameters)
            if clip_mode == "norm" and _with_gradients(clipped) == _with_gradients(own):
                max_norm = clip_grad
            else:
                self.scaler.unscale_(optimizer)
                dispatch_clip_grad(clipped, clip_grad, mode=clip_mode)
        self.scaler.step(optimizer, max_norm=max_norm)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler. Sync: that of ``GradScaler.state_dict``."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or timm's has saved. Sync: none."""
        self.scaler.load_state_dict(state_dict)


def _with_gradients(params: Iterable[Tensor]) -> set[int]:
    return {id(param) for param in params if param.grad is not None}
