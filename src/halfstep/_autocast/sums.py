"""Ops that add many terms: which do, and how they add in float32.

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

from halfstep._common.nested import map_leaves, tensors_in
from halfstep._pytorch import dispatch, modes
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
    are saved. Differentiable twice and in forward mode; not for ``torch.func``.
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
        ctx.save_for_forward(*tensors_in(known))
        ctx.known = map_leaves(lambda leaf: _SAVED if isinstance(leaf, Tensor) else leaf, known)
        ctx.num_args = len(args)
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
        return _BACKWARD[op](grad.float(), like, *_saved(ctx)).to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        args = _saved(ctx)
        if len(args) == ctx.num_args:
            return _call_op(ctx.op, tangent, args)  # linear
        indices, start = args[-1], -2 if "2d" in ctx.op else -3
        largest = tangent.flatten(start).gather(-1, indices.flatten(start))
        return largest.view_as(indices), None


_SAVED = object()


def _call_op(name: str, x: Tensor, args: list[Any]) -> Any:
    arguments = arguments_of(name)[1:]
    positional = [v for a, v in zip(arguments, args, strict=False) if not a.kwarg_only]
    keywords = {a.name: v for a, v in zip(arguments, args, strict=False) if a.kwarg_only}
    return callable_of(overload(name))(x, *positional, **keywords)


def _saved(ctx: Any) -> list[Any]:
    """Return the arguments of the op after the first, then its results after the first."""
    saved = iter(ctx.saved_tensors)
    args: list[Any] = map_leaves(lambda leaf: next(saved) if leaf is _SAVED else leaf, ctx.known)
    return args
