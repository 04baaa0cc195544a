"""Functions that run a function on tensors of their own, and are called as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.apis
import torch._functorch.eager_transforms
import torch.nn.utils.stateless

# (module, name): what torch.func.grad, grad_and_value, vmap and functional_call call. Looked up in
# the module at each call.
CALLED_AS_A_WHOLE: tuple[tuple[Any, str], ...] = (
    (torch._functorch.eager_transforms, "grad_impl"),
    (torch._functorch.eager_transforms, "grad_and_value_impl"),
    (torch._functorch.apis, "vmap_impl"),
    (torch.nn.utils.stateless, "_functional_call"),
)

GRADIENTS = {"grad_impl", "grad_and_value_impl"}
"""The names of those that return gradients."""


def are_active() -> bool:
    """Return whether a transform of ``torch.func`` runs in this thread."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active
