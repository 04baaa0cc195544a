"""Ops that add many terms: which do, how they add in float32, and products that stay in float32.

PyTorch adds in the dtype of the tensors. In bfloat16 a sum of ones ends at 256, in float16 at
2,048: that of the gradient of ``h[index]`` if one row is read often, of overlapping windows, of a
padding that repeats an edge; that of an ``index_put`` that accumulates. Which kernels add in
float32 stands in :data:`halfstep._pytorch.devices.FACTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.rule import HALVES
from halfstep._common.nested import map_leaves, tensors_in
from halfstep._pytorch import dispatch, distributed, modes
from halfstep._pytorch.devices import facts
from halfstep._pytorch.dispatch import arguments_of, callable_of, overload

_aten = torch.ops.aten

# Of ops that add in their backward pass: the gradient of the first argument. ``like`` has its shape
# and memory format, but no values; then follow all other arguments, and all results but the first.
_BACKWARD: dict[str, Callable[..., Any]] = {
    "index": lambda grad, like, indices: _aten.index_put(
        torch.zeros_like(like), indices, grad, accumulate=True
    ),
    "index_select": lambda grad, like, dim, index: torch.zeros_like(like).index_add(
        dim, index, grad
    ),
    "gather": lambda grad, like, dim, index, _: torch.zeros_like(like).scatter_add(
        dim, index, grad
    ),
    "take": lambda grad, like, index: torch.zeros_like(like).put(index, grad, accumulate=True),
    "embedding": lambda grad, like, indices, padding_idx, by_freq, _: (
        _aten.embedding_dense_backward(grad, indices, like.shape[0], padding_idx, by_freq)
    ),
    "_adaptive_avg_pool2d": lambda grad, like, _: callable_of(
        overload("_adaptive_avg_pool2d_backward.default")
    )(grad, like),
    "adaptive_max_pool2d": lambda grad, like, _, indices: _aten.adaptive_max_pool2d_backward(
        grad, like.contiguous(), indices
    ),
    "adaptive_max_pool3d": lambda grad, like, _, indices: _aten.adaptive_max_pool3d_backward(
        grad, like.contiguous(), indices
    ),
    "im2col": lambda grad, like, *window: _aten.col2im(grad, like.shape[-2:], *window),
    "unfold": lambda grad, like, *window: _aten.unfold_backward(grad, like.shape, *window),
}
_WINDOWS = (
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "avg_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices",
)  # fmt: skip
_BACKWARD |= {name: getattr(_aten, f"{name}_backward") for name in _WINDOWS}

_ADD_INTO = (
    "addbmm", "index_add", "index_put", "index_reduce", "put", "scatter", "scatter_add",
    "scatter_reduce",
)  # fmt: skip


def is_rounded(name: str, device: str) -> bool:
    """Return whether PyTorch's kernel for an op, in place or not, rounds partial sums."""
    return name.partition(".")[0].rstrip("_") not in facts(device).adds_in_float32


def adds_nothing_rounded(name: str, device: str) -> bool:
    """Return whether only the backward pass of an op adds, and PyTorch's kernel in float32."""
    return name.partition(".")[0] in _BACKWARD and not is_rounded(name, device)


def are_products_rounded(name: str, device: str, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's kernel for an op of products rounds their partial sums.

    addbmm adds to its result, one matrix after the other. A CPU without instructions for ``dtype``
    has no kernel of oneDNN for convolutions, and PyTorch's own adds windows and the gradients of a
    batch in lower precision: 600 images give a weight a gradient that is 24 % wrong. In float32
    most convolutions also take less time (benchmarks/sums_cost.py). With such instructions the
    calls of :func:`is_left_to_pytorch` go to that kernel.
    """
    op = name.partition(".")[0]
    is_convolution = op in ("convolution", "_convolution") or op.startswith("conv")
    is_rounded = is_convolution and device == "cpu" and not dispatch.has_onednn(dtype)
    return is_rounded or op == "addbmm" or (device == "cpu" and op.startswith("conv_transpose"))


def is_left_to_pytorch(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether oneDNN leaves a call to PyTorch's own kernels, though it knows the dtype.

    Of convolutions, a transposed one whose output padding reaches the stride (``use_mkldnn`` in
    aten/src/ATen/native/Convolution.cpp, 2.13).
    """
    if not name.startswith("conv_transpose"):
        return True
    stride, padding = (
        args[place] if len(args) > place else kwargs.get(key, default)
        for place, key, default in ((3, "stride", 1), (5, "output_padding", 0))
    )
    strides, paddings = ([x] if isinstance(x, int) else list(x) for x in (stride, padding))
    pairs = zip(strides * len(paddings), paddings * len(strides), strict=False)
    return any(at_end >= step for step, at_end in pairs)


def adds(name: str, device: str) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    """Return whether a call of an overload, in place or not, may add several terms to an entry.

    Not if PyTorch's kernel adds those of this call in float32.
    """
    op, _, of_op = name.partition(".")
    if op.rstrip("_") == "scatter":
        return lambda args, kwargs: "reduce" in of_op
    if op == "index":  # masks repeat no entry
        return lambda args, kwargs: any(
            i is not None and i.dtype not in (torch.bool, torch.uint8) for i in args[1]
        )
    if op == "unfold":  # a view: what overlaps can be written to by no one
        return lambda args, kwargs: args[2] > args[3]
    if op.rstrip("_") in facts(device).adds_rows_in_float32:
        return lambda args, kwargs: not (len(args) > 1 and args[1] == 0 and args[0].dim() > 1)
    names = [argument.name for argument in arguments_of(name)]
    flag = next((flag for flag in ("accumulate", "sparse") if flag in names), None)
    if flag is None:
        return lambda args, kwargs: True
    position, wanted = names.index(flag), flag == "accumulate"

    def may_add(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = args[position] if position < len(args) else kwargs.get(flag, False)
        return bool(given) is wanted

    return may_add


def out_of_place(name: str) -> Callable[..., Any] | None:
    """Return the op that does the same as one in place that may add, None for any other."""
    op, _, of_op = name.partition(".")
    into = op.rstrip("_")
    return callable_of(overload(f"{into}.{of_op}")) if into in _ADD_INTO else None


def selected(name: str, device: str) -> Callable[..., Tensor | None]:
    """Return what selects like an overload, with a backward pass of PyTorch that adds in float32.

    It returns None for what it leaves to :func:`with_backward_in_float32`: calls of other kinds,
    negative indices, and devices without such a backward pass of ``index_select`` and ``gather``.
    """
    exact = facts(device).adds_in_float32 | facts(device).adds_rows_in_float32
    select, gather, op = torch.index_select, torch.gather, name.partition(".")[0]
    find = _SELECTED.get(op) if exact >= {"index_select", "gather"} else None

    def call(x: Tensor, *args: Any) -> Tensor | None:
        x, index = find(x, *args) if find else (x, None)
        if type(x) not in (Tensor, nn.Parameter) or type(index) is not Tensor or modes.is_tracing():
            return None
        places = index if index.dim() == 1 else index.flatten()
        try:
            found = gather(x, 0, places) if x.dim() == 1 else select(x, 0, places)
        except (IndexError, RuntimeError):
            return None
        return found if index is places else found.view(index.shape + x.shape[1:])

    return call


# The tensor from whose rows or entries an op selects, and the indices; None for other calls.
_SELECTED: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "index": lambda x, indices: (x, indices[0] if len(indices) == 1 else None),
    "take": lambda x, index: (x.flatten(), index),
    "embedding": lambda x, index, pad=-1, *flags: (x, None if pad >= 0 or any(flags) else index),
}


def with_backward_in_float32(name: str) -> Callable[..., Any] | None:
    """Return an overload with a backward pass in float32; None if it adds in its forward pass.

    The gradient of its first argument, in lower precision, is rounded once. Only sizes and indices
    are saved. Differentiable twice; not in forward mode and not for ``torch.func``.
    """
    if name.partition(".")[0] not in _BACKWARD:
        return None
    op, rest = callable_of(overload(name)), arguments_of(name)[1:]

    def call(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        given = {argument.name: argument.default_value for argument in rest}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if given.get("sparse") or given.get("sparse_grad"):
            return op(x, *args, **kwargs)
        return _Float32Backward.apply(x, name, list(given.values()))  # type: ignore[no-untyped-call]

    return call


class _Float32Backward(torch.autograd.Function):
    """An op with one of the backward passes above."""

    has_products = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, args: list[Any]) -> Any:
        is_last = x.dim() == 4 and not x.is_contiguous()
        is_last = is_last and x.is_contiguous(memory_format=torch.channels_last)
        ctx.op, ctx.dtype, ctx.shape = name, x.dtype, x.shape
        ctx.format = torch.channels_last if is_last else torch.contiguous_format
        output = _call_op(name, x, args)
        others = () if isinstance(output, Tensor) else output[1:]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        known = [*args, *others]
        ctx.save_for_backward(*tensors_in(known))
        ctx.known = map_leaves(lambda leaf: _SAVED if isinstance(leaf, Tensor) else leaf, known)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return None, None, None
        op = ctx.op.partition(".")[0]
        if op in _WINDOWS:
            like = torch.empty(
                ctx.shape, dtype=torch.float32, device=grad.device, memory_format=ctx.format
            )
        else:  # a number in all entries: no memory
            like = grad.new_empty((), dtype=torch.float32).expand(ctx.shape)
        saved = iter(ctx.saved_tensors)
        # The arguments of the op after the first, then its results after the first.
        known = map_leaves(lambda leaf: next(saved) if leaf is _SAVED else leaf, ctx.known)
        return _BACKWARD[op](grad.float(), like, *known).to(ctx.dtype), None, None


_SAVED = object()


def _call_op(name: str, x: Tensor, args: list[Any]) -> Any:
    arguments = arguments_of(name)[1:]
    positional = [v for a, v in zip(arguments, args, strict=False) if not a.kwarg_only]
    keywords = {a.name: v for a, v in zip(arguments, args, strict=False) if a.kwarg_only}
    return callable_of(overload(name))(x, *positional, **keywords)


# --- products with results in float32 -------------------------------------------------------------

# A product of two numbers in float16 or bfloat16 is exact in float32. So operands that are cast up
# give what a kernel with lower-precision operands and a float32 result gives, up to the order of
# the sums. Such kernels exist for CUDA and XPU (torch.mm(out_dtype=)), without a derivative.

_FACTORS = {
    "linear": (0, 1), "matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2),
}  # fmt: skip
"""Where each op has its factors; the other tensor is added to their product."""
PRODUCTS = tuple(_FACTORS)

_NUM_DIMS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}
"""The dimensions of the factors of ops that take no others."""


def factors_of(name: str) -> tuple[int, ...]:
    """Return the positions of the factors among the arguments of an overload."""
    return _FACTORS[name.partition(".")[0]]


def with_fp32_result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an overload of one of :data:`PRODUCTS`, and return its result in float32.

    The factors are given in lower precision, what is added to their product in float32.

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

    The backward pass of DTensors belongs to their placements; the JIT cannot save such a function,
    and forward mode cannot differentiate it.
    """
    is_followed = modes.has_transforms() or modes.is_jit_tracing() or modes.is_in_forward_mode()
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
        return _wide_product(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (a, b), (for_a, for_b) = ctx.saved_tensors, ctx.needs_input_grad
        low = grad.to(a.dtype)
        to_a = _low_product(low, b.mT) if for_a else None
        return to_a, _low_product(a.mT, low) if for_b else None


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
