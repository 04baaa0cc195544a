"""Products of operands in lower precision, with results in float32.

A product of two numbers in float16 or bfloat16 is exact in float32. So operands that are cast up
give what a kernel with lower-precision operands and a float32 result gives, up to the order of the
sums. Such kernels exist for CUDA and XPU (``torch.mm(out_dtype=)``), without a derivative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep._autocast.rule import HALVES
from halfstep._common.nested import tensors_in
from halfstep._pytorch import dispatch, distributed, modes
from halfstep._pytorch.dispatch import callable_of, overload

_FACTORS = {
    "linear": (0, 1), "matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2),
}  # fmt: skip
"""Where each op has its factors; the other tensor is added to their product."""
OPS = tuple(_FACTORS)

_NUM_DIMS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}
"""The dimensions of the factors of ops that take no others."""


def factors_of(name: str) -> tuple[int, ...]:
    """Return the positions of the factors among the arguments of an overload."""
    return _FACTORS[name.partition(".")[0]]


def with_fp32_result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an overload, and return its result in float32.

    Args:
        name: The overload, of one of :data:`OPS`.
        args: Its arguments: the factors in lower precision, what is added to them in float32.
        kwargs: ``alpha`` and ``beta``.

    Differentiable, once and twice. The backward pass is that of a product in lower precision: it
    rounds the gradient of the result and multiplies it by the factors. Sync: none.
    """
    first, second = factors_of(name)
    a, b = args[first], args[second]
    if not {a.dtype, b.dtype} <= set(HALVES):  # integers, complex numbers: nothing was cast
        return callable_of(overload(name))(*args, **kwargs)
    dims = _NUM_DIMS.get(name.partition(".")[0])
    is_valid = dims is None or a.dim() == b.dim() == dims  # else PyTorch's op raises its error
    factor = b.t() if name == "linear.default" else b
    product = _product(a, factor) if is_valid and is_plain(args) else None
    if product is None:
        wide = (arg.float() if isinstance(arg, Tensor) else arg for arg in args)
        return callable_of(overload(name))(*wide, **kwargs)
    if first == 1:
        alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        product = product if alpha == 1 else alpha * product
        return product if beta == 0 else torch.add(product, args[0].expand_as(product), alpha=beta)
    return product if len(args) < 3 or args[2] is None else product + args[2]


def is_plain(args: Sequence[Any]) -> bool:
    """Return whether a function of Python may stand for an op.

    The backward pass of DTensors belongs to their placements; the JIT cannot save such a function.
    """
    is_followed = modes.has_transforms() or modes.is_jit_tracing()
    others = (tensor.is_nested or distributed.is_dtensor(tensor) for tensor in tensors_in(args))
    return not (is_followed or any(others))


def _product(a: Tensor, b: Tensor) -> Any:
    """Return the product of matrices or of equal batches of them, None for other shapes."""
    multiply: Any = _Product.apply
    if b.dim() == 2 and a.dim() > 1:
        return multiply(a.flatten(0, -2), b).view(*a.shape[:-1], b.shape[-1])
    if a.dim() > 2 and a.shape[:-2] == b.shape[:-2]:
        product = multiply(a.flatten(0, -3), b.flatten(0, -3))
        return product.view(*a.shape[:-1], b.shape[-1])
    return None


class _Product(torch.autograd.Function):
    """The product of two matrices, or of two batches of matrices, in lower precision."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        return _wide_product(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (a, b), (for_a, for_b) = ctx.saved_tensors, ctx.needs_input_grad
        low = grad.to(a.dtype)
        to_a = _low_product(low, b.mT) if for_a else None
        return to_a, _low_product(a.mT, low) if for_b else None

    @staticmethod
    def jvp(ctx: Any, to_a: Tensor, to_b: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return _wide_product(to_a, b) + _wide_product(a, to_b)


def _wide_product(a: Tensor, b: Tensor) -> Any:
    op = overload("mm.dtype" if a.dim() == 2 else "bmm.dtype")
    if dispatch.has_kernel_on(op, a.device.type):
        return callable_of(op)(a, b, torch.float32)
    return _raised(a) @ _raised(b)


def _low_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product in lower precision; a CPU without such instructions is faster in float32."""
    if a.device.type == "cpu" and not dispatch.has_onednn(a.dtype):
        return (_raised(a) @ _raised(b)).to(a.dtype)
    return (a @ b).to(a.dtype)


def _raised(factor: Tensor) -> Tensor:
    """Cast a factor to float32.

    Inductor replaces a chain of casts by its last one (``pointless_convert`` in its joint graph
    passes, 2.13): the factor would not be rounded. An op on its bits divides the chain.
    """
    if modes.is_making_graph():
        factor = factor.view(torch.int16).bitwise_or(0).view(factor.dtype)
    return factor.float()
