"""Matrix products and convolutions in float8: their operands are rounded, their results are not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep._numerics.formats import Format
from halfstep._numerics.rounding import rounded
from halfstep._pytorch import storages
from halfstep._simulate.arithmetic import Where
from halfstep._trace.ops import op_name

# Where the operands are that matrix units multiply. The others, such as the bias, are added to
# the sums of the products, in float32.
_OPERANDS: dict[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "vdot": (0, 1),
    "addmm": (1, 2),
    "_addmm_activation": (1, 2),
    "addbmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
    "addr": (1, 2),
    "conv_tbc": (0, 1),
    "conv_tbc_backward": (0, 1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "_scaled_dot_product_efficient_attention_backward": (0, 1, 2, 3),
}


class Products:
    """Rounds the operands of products that the policy lowers, clipped to the largest value.

    Operands of the forward pass are counted there; in the backward pass, where they are rounded
    again, the gradients that come in are, each once.

    Args:
        format: An eight bit format.
        scale_by_amax: Whether each operand is multiplied, for the rounding, by the power of two
            that brings its largest magnitude to just below the largest value of the format.
    """

    def __init__(self, format: Format, *, scale_by_amax: bool) -> None:
        self._format = format
        self._scale_by_amax = scale_by_amax
        self._counted: dict[tuple[str, int], Any] = {}  # with what keeps the number from others
        self._is_behind = False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where) -> Any:
        """Run an op; see :class:`halfstep._simulate.arithmetic.Arithmetic`."""
        places = _OPERANDS.get(op_name(func), ()) if where.is_lowered else ()
        if not places or any(args[place].dtype is not torch.float32 for place in places):
            return func(*args, **kwargs)
        operands = list(args)
        for place in places:
            operands[place] = self._rounded(args[place], where)
        return func(*operands, **kwargs)

    def _rounded(self, operand: Tensor, where: Where) -> Tensor:
        scale = _scale(operand, self._format) if self._scale_by_amax else None
        values = operand if scale is None else operand * scale
        if self._is_to_count(operand, where):
            where.note(_without_repeats(values))
        held = rounded(values, self._format, saturate=True)
        return held if scale is None else held / scale

    def _is_to_count(self, operand: Tensor, where: Where) -> bool:
        is_backward = where.phase == "backward"
        if self._is_behind and where.phase == "forward":  # another step
            self._counted.clear()
        self._is_behind = is_backward
        reference = storages.memory_of(operand)
        key = (where.module, reference.cdata)
        is_new = key not in self._counted
        self._counted[key] = reference
        return is_new or not is_backward


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return each value once of a tensor that was expanded."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    return tensor


def _scale(values: Tensor, format: Format) -> Tensor:
    """Return the largest power of two by which all finite values can be multiplied."""
    sizes = values.abs()
    amax = torch.where(sizes < math.inf, sizes, 0.0).amax() if values.numel() else sizes.sum()
    _, exponent = torch.frexp(amax)  # amax < 2 ** exponent
    _, of_largest = math.frexp(format.largest)
    # A float32 of which only the exponent is not zero, and itself no subnormal number nor inf.
    bits = ((of_largest - 1 - exponent).clamp(-126, 126) + 127) << 23
    scale: Tensor = bits.to(torch.int32).view(torch.float32)
    return scale
