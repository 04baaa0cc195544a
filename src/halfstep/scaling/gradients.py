"""Passes over the gradients of an optimizer: find, check, unscale.

Every function works on :class:`Gradients`, one walk over ``optimizer.param_groups`` that sorts the
gradients by device and dtype, as the fused kernels want them. Sync: none, in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch

from halfstep._torch import check_and_unscale_
from halfstep.scaling.device import moved

Gradients: TypeAlias = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Dense real tensors that share memory with the gradients, by device and dtype."""

FoundInf: TypeAlias = dict[torch.device, torch.Tensor]
"""One float32 scalar a device: 1 if some gradient there is inf or NaN, else 0.

Never another number: the fused optimizers of PyTorch 2.13 skip a step only if it is exactly 1.
"""

NUM_NAMED = 3
"""An error message names this many parameters and counts the rest."""


@torch.no_grad()
def collect(optimizer: torch.optim.Optimizer) -> Gradients:
    """Find all gradients of an optimizer; parameters without one are left out.

    Sparse COO gradients are coalesced first and ``param.grad`` is replaced by the result: entries
    that are finite one by one may overflow when they are added, above all in float16.
    Complex gradients are seen as real ones with a last dimension of 2.

    Args:
        optimizer: Its gradients may be of any shape, strides, device and dtype.

    Returns:
        Views, so that writing to them writes to the gradients. Empty if there is no gradient.
    """
    gradients: Gradients = defaultdict(list)
    for _, param in _parameters(optimizer):
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()
        elif param.grad.is_conj():
            # Autograd stores the conjugate lazily, and such a tensor has no real view.
            param.grad = param.grad.resolve_conj()
        values = param.grad._values() if param.grad.is_sparse else param.grad
        if values.is_complex():
            values = torch.view_as_real(values)
        gradients[values.device, values.dtype].append(values)
    return dict(gradients)


def refuse_float16(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient is float16: unscaling it in place would flush its small entries to zero.

    Raises:
        ValueError: Names the optimizer, the parameters, the cause and the cure.
    """
    found = [
        f"{where} ({describe(param.grad)})"
        for where, param in _parameters(optimizer)
        if param.grad is not None and param.grad.dtype in (torch.float16, torch.complex32)
    ]
    if not found:
        return
    rest = f" and {len(found) - NUM_NAMED} more" if len(found) > NUM_NAMED else ""
    raise ValueError(
        f"{type(optimizer).__name__} has float16 gradients, which cannot be unscaled without "
        f"losing what the scale is there to keep: {', '.join(found[:NUM_NAMED])}{rest}.\n"
        "Cause: these parameters are stored in float16 (model.half(), .to(torch.float16), or a "
        "checkpoint loaded in float16).\n"
        "Cure: keep the parameters in float32 (model.float()) and let autocast choose float16 for "
        "each op; or train in bfloat16, which needs no GradScaler."
    )


def check(gradients: Gradients) -> FoundInf:
    """Look for inf and NaN and change nothing. One pass over the gradients."""
    # Multiplying by exactly 1 is the kernel's own way to only look.
    return _check_and_multiply_(gradients, 1.0)


def unscale_(gradients: Gradients, scale: torch.Tensor, *, can_amplify: bool) -> FoundInf:
    """Divide all gradients by the scale in place, and look for inf and NaN.

    Args:
        gradients: From :func:`collect`.
        scale: float32 scalar on any device.
        can_amplify: The scale may be below 1. Then a gradient that was finite may be inf after the
            division, so they are checked once more.

    Returns:
        What was found before or after the division. One pass, two with ``can_amplify``.
    """
    found_inf = _check_and_multiply_(gradients, _reciprocal(scale))
    if can_amplify:
        for device, found_after in check(gradients).items():
            found_inf[device] = torch.maximum(found_inf[device], found_after)
    return found_inf


def combine(found: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one float32 scalar on ``device``: 1 if any of ``found`` is 1, else 0."""
    # The largest and not the sum as in torch.amp: see FoundInf.
    # And no more than 1: who shares it between ranks (_found_inf_per_device) may have added it up.
    first, *others = (moved(found_inf, device) for found_inf in found)
    return (torch.stack([first, *others]).amax() if others else first).clamp(max=1.0)


def describe(tensor: torch.Tensor) -> str:
    """Return dtype, shape and device in a few words: ``float16[4, 8] on cpu``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"


def num_parameters(optimizer: torch.optim.Optimizer) -> int:
    """Return how many parameters (tensors) the optimizer holds."""
    return sum(1 for _ in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            yield f"param_groups[{group_index}]['params'][{index}]", param


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    # Through float64 as in torch.amp: a float32 division may be inexact under some compiler
    # options. MPS has no float64.
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


@torch.no_grad()
def _check_and_multiply_(gradients: Gradients, factor: torch.Tensor | float) -> FoundInf:
    found_inf: FoundInf = {}
    factors: dict[torch.device, torch.Tensor] = {}
    for (device, _), tensors in gradients.items():
        if device not in found_inf:
            found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
            factors[device] = (
                moved(factor, device)
                if isinstance(factor, torch.Tensor)
                else torch.full((), factor, dtype=torch.float32, device=device)
            )
        check_and_unscale_(tensors, found_inf[device], factors[device])
    return found_inf
