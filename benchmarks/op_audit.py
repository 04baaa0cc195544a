"""Every op that PyTorch's OpInfo database and torch.nn.functional know, beside itself in float32.

An op runs forward and backward under a policy, on inputs in lower precision and on the same values
in float32, and without autocast in float32 on the same values. The inputs are those of the
database, and the same with a dimension, or an argument, repeated 300 times, so that the op adds
many like terms and indices repeat; and calls of our own for windows, padding and other sums that
are small in the database.

The unit of an error is what one rounding of the inputs and one of the result explain. What a
rounding of the inputs does is measured: they are moved by up to half a unit in the last place, at
random and, if that is not enough, all entries of an input together. An op is right within one unit.

Else the same is measured of a formula: float32 again, but the result of each kernel is moved and
rounded to lower precision. What that explains is rounded between its steps. A sum inside a kernel
is one step, so that this never explains one in lower precision; and it leaves alone what autograd
adds.

    python benchmarks/op_audit.py                      # all ops, both dtypes: six minutes
    python benchmarks/op_audit.py --markdown benchmarks/op_audit.md  # and the page
    python benchmarks/op_audit.py --ops index nn.functional.pad --dtypes bf16
    python benchmarks/op_audit.py --policy torch --own # PyTorch's own lists, calls of our own
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from halfstep._autocast import autocast
from halfstep._common.machine import device_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
REPEATS = 300
MOST_SAMPLES = 5
MOST_ENTRIES, MOST_RESULTS = 1 << 18, 1 << 22
SECONDS_AN_OP = 2.0
MOST_SECONDS = 120
FORK = multiprocessing.get_context("fork")
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
RIGHT, FEW_ROUNDINGS = 1.05, 2.0

_VIEWS = "views that overlap: autograd adds their gradients in the dtype of the tensor"
KNOWN = {
    "tensor_split": _VIEWS,
    "nn.functional.linear_cross_entropy.chunked_none": "a chunk of 3 of 2,400 rows: a function of "
    "PyTorch that adds the gradient of the weight in its dtype, one chunk after the other",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "weights of like keys are "
    "rounded between two products, by design of the kernel",
    "nn.functional.normalize": "along a dimension of one entry the gradient is zero, a difference "
    "of like terms",
    "nn.functional.binary_cross_entropy": "by design: its gradient leaves the range of float16",
}
"""Why an op is further off than roundings explain, where that is known and left."""


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of an op, with its arguments in float32."""

    op: str
    about: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def database() -> dict[str, Any]:
    """Return PyTorch's descriptions of ops that take float32, by name and variant."""
    # It imports all of PyTorch's tests: seconds.
    from torch.testing._internal.common_methods_invocations import op_db

    names = ((f"{op.name}.{op.variant_test_name}".rstrip("."), op) for op in op_db)
    return {name: op for name, op in names if torch.float32 in op.dtypes}


def cases_of_database(label: str, op: Any) -> Iterator[Case]:
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    step = max(1, len(samples) // MOST_SAMPLES)
    for number, sample in list(enumerate(samples))[::step]:
        args = (sample.input, *sample.args)
        yield Case(label, f"sample {number}", op.op, args, dict(sample.kwargs))


def enlarged(case: Case) -> Iterator[Case]:
    """Yield the case with all dimensions of one size repeated, and with those of one argument."""
    leaves, spec = tree_flatten((case.args, case.kwargs))
    tensors = [(n, leaf) for n, leaf in enumerate(leaves) if is_dense(leaf)]
    for size in sorted({size for _, tensor in tensors for size in tensor.shape if size}):
        yield from _repeated(
            case, leaves, spec, f"{size} -> {size * REPEATS}", lambda _, __, s, size=size: s == size
        )
    for number, tensor in tensors:
        for dim in range(tensor.dim()):
            yield from _repeated(
                case,
                leaves,
                spec,
                f"argument {number}, dimension {dim}",
                lambda n, d, _, where=(number, dim): (n, d) == where,
            )


def _repeated(
    case: Case,
    leaves: list[Any],
    spec: Any,
    about: str,
    is_repeated: Callable[[int, int, int], bool],
) -> Iterator[Case]:
    changed = list(leaves)
    for number, leaf in enumerate(leaves):
        if is_dense(leaf):
            repeats = [
                REPEATS if is_repeated(number, dim, size) else 1
                for dim, size in enumerate(leaf.shape)
            ]
            if max(1, leaf.numel()) * math.prod(repeats) > MOST_ENTRIES:
                return
            changed[number] = leaf.repeat(repeats) if math.prod(repeats) > 1 else leaf
    args, kwargs = tree_unflatten(changed, spec)
    yield replace(case, about=f"{case.about}, {about}", args=args, kwargs=kwargs)


def is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def like(*shape: int) -> Tensor:
    """Return terms of one sign and of like size."""
    return torch.rand(shape) * 0.25 + 0.75


def own_cases() -> Iterator[Case]:
    torch.manual_seed(0)
    yield from indexing()
    yield from windows()
    yield from resizing()
    yield from losses()
    yield from products()
    yield from reductions()


def indexing() -> Iterator[Case]:
    many = torch.zeros(4096, dtype=torch.long)
    columns = many[:, None].expand(-1, 8)
    reads: dict[str, Callable[[Tensor], Any]] = {
        "h[index]": lambda h: h[many],
        "h[:, index]": lambda h: h.T[:, many],
        "h[mask]": lambda h: h[h > 0],
        "nn.functional.embedding": lambda h: F.embedding(many, h),
        "nn.functional.embedding, by frequency": lambda h: F.embedding(
            many, h, scale_grad_by_freq=True
        ),
        "nn.functional.embedding_bag, sum": lambda h: F.embedding_bag(
            many.view(64, 64), h, mode="sum"
        ),
        "nn.functional.embedding_bag, mean": lambda h: F.embedding_bag(
            many, h, torch.tensor([0]), mode="mean"
        ),
        "take": lambda h: h.take(many),
        "index_select": lambda h: h.index_select(0, many),
        "index_select, between": lambda h: h[None].index_select(1, many),
        "gather": lambda h: h.gather(0, columns),
        "take_along_dim": lambda h: h.take_along_dim(columns, 0),
        "expand": lambda h: h[:1].expand(4096, 8) * 1,
        "repeat_interleave": lambda h: h.repeat_interleave(4096, 0),
        "Tensor.unfold": lambda h: h.repeat(20, 5).flatten().unfold(0, 1000, 1),
    }
    for op, read in reads.items():
        yield Case(op, "one row, 4,096 times", read, (like(3, 8),))
    writes: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "index_add": lambda x, s: x.index_add(0, many, s),
        "index_add, between": lambda x, s: x[None].index_add(1, many, s[None]),
        "index_add, 1d": lambda x, s: x[:, 0].index_add(0, many, s[:, 0]),
        "histc": lambda x, s: x.sum() + s.histc(4, 0, 4),
        "index_put, accumulate": lambda x, s: x.index_put((many,), s, accumulate=True),
        "put, accumulate": lambda x, s: x.put(columns, s, accumulate=True),
        "scatter_add": lambda x, s: x.scatter_add(0, columns, s),
        "segment_reduce": lambda x, s: torch.segment_reduce(s, "sum", lengths=torch.tensor([4096])),
    }
    for reduce in ("sum", "mean", "amax"):
        writes[f"scatter_reduce, {reduce}"] = lambda x, s, r=reduce: x.scatter_reduce(
            0, columns, s, r
        )
    for reduce in ("mean", "amax"):
        writes[f"index_reduce, {reduce}"] = lambda x, s, r=reduce: x.index_reduce(0, many, s, r)
    for op, write in writes.items():
        yield Case(op, "4,096 terms", write, (like(3, 8), like(4096, 8)))


def windows() -> Iterator[Case]:
    for dims, shape, window in (
        (1, (2, 4, 4096), 1023),
        (2, (2, 4, 64, 64), 31),
        (3, (1, 2, 16, 16, 16), 15),
    ):
        x = like(*shape)
        for kind in ("avg", "max"):
            op = f"nn.functional.{kind}_pool{dims}d"
            pool = getattr(F, f"{kind}_pool{dims}d")
            yield Case(
                op, f"window {window}, stride 1", lambda x, p=pool, w=window: p(x, w, 1), (x,)
            )
            adaptive = getattr(F, f"adaptive_{kind}_pool{dims}d")
            for out in (1, 3, shape[-1] * (2 if dims == 3 else 8)):
                yield Case(
                    f"nn.functional.adaptive_{kind}_pool{dims}d",
                    f"to {out}",
                    lambda x, p=adaptive, o=out: p(x, o),
                    (x,),
                )
        lp_pool = getattr(F, f"lp_pool{dims}d")
        yield Case(
            f"nn.functional.lp_pool{dims}d",
            "",
            lambda x, p=lp_pool, w=window: p(x, 2.0, w, 1),
            (x,),
        )
    peak = torch.zeros(1, 1, 64, 64)
    peak[..., 32, 32] = 1
    yield Case("nn.functional.max_pool2d", "a peak", lambda x: F.max_pool2d(x, 31, 1), (peak,))
    yield Case("nn.functional.unfold", "31 x 31", lambda x: F.unfold(x, 31), (like(1, 2, 64, 64),))
    yield Case("nn.functional.fold", "31 x 31", lambda x: F.fold(x, 64, 31), (like(1, 961, 1156),))
    yield Case(
        "nn.functional.local_response_norm",
        "",
        lambda x: F.local_response_norm(x, 31),
        (like(2, 64, 8, 8),),
    )


def resizing() -> Iterator[Case]:
    shapes = ((2, 3, 32), (1, 2, 32, 32), (1, 1, 16, 16, 16))
    for mode in ("replicate", "reflect", "circular", "constant"):
        for shape in shapes:
            wide = [600, 40, 12][len(shape) - 3] if mode == "replicate" else shape[-1] - 1
            yield Case(
                "nn.functional.pad",
                f"{mode}, {len(shape) - 2}d",
                lambda x, m=mode, w=wide: F.pad(x, [w] * 2 * (x.dim() - 2), mode=m),
                (like(*shape),),
            )
    small = ((2, 4, 4), (2, 4, 4, 4), (1, 2, 4, 4, 4))
    modes = {"linear": small[:1], "bilinear": small[1:2], "bicubic": small[1:2]}
    modes |= {"trilinear": small[2:], "nearest": small, "nearest-exact": small, "area": small}
    for mode, of in modes.items():
        for shape in of:
            factor = [512, 32, 10][len(shape) - 3]
            up = lambda x, f=factor, m=mode: F.interpolate(x, scale_factor=f, mode=m)  # noqa: E731
            down = lambda x, m=mode: F.interpolate(x, size=(2,) * (x.dim() - 2), mode=m)  # noqa: E731
            large = (*shape[:2], *(4 * factor for _ in shape[2:]))
            for about, call, size in (("up", up, shape), ("down", down, large)):
                name = f"{mode}, {len(shape) - 2}d, {about}"
                yield Case("nn.functional.interpolate", name, call, (like(*size),))
    for size, shape in ((3, (1, 2, 128, 128)), (128, (1, 2, 4, 4))):
        yield Case(
            "nn.functional.interpolate",
            f"antialias, to {size}",
            lambda x, s=size: F.interpolate(x, size=(s, s), mode="bilinear", antialias=True),
            (like(*shape),),
        )
    for about, where in (("one point", 0.0), ("the border", 2.0)):
        yield Case(
            "nn.functional.grid_sample",
            about,
            lambda x, w=where: F.grid_sample(
                x,
                torch.full((1, 64, 64, 2), w).to(x),
                padding_mode="border",
                align_corners=False,
            ),
            (like(1, 2, 5, 5),),
        )


def losses() -> Iterator[Case]:
    logits, weight = torch.randn(64, 1000) * 4, like(1000)
    indices, soft = torch.arange(64) % 10, torch.softmax(torch.randn(64, 1000), -1)
    for reduction in ("none", "mean", "sum"):
        for target, about in ((indices, "class indices"), (soft, "probabilities")):
            yield Case(
                "nn.functional.cross_entropy",
                f"{about}, {reduction}",
                lambda x, r=reduction, t=target: (
                    F.cross_entropy(x, t.to(soft), reduction=r)
                    if t is soft
                    else F.cross_entropy(x, t, reduction=r)
                ),
                (logits,),
            )
    yield Case(
        "nn.functional.cross_entropy",
        "smoothing, weights, ignore_index",
        lambda x, w: F.cross_entropy(x, indices, w, ignore_index=3, label_smoothing=0.1),
        (logits, weight),
    )
    yield Case(
        "nn.functional.ctc_loss",
        "",
        lambda x: F.ctc_loss(
            x.log_softmax(-1),
            torch.arange(120).view(4, 30) % 19 + 1,
            torch.full((4,), 200),
            torch.full((4,), 30),
        ),
        (torch.randn(200, 4, 20),),
    )
    for norm in ("batch_norm", "instance_norm"):
        options = {"training": True} if norm == "batch_norm" else {}
        yield Case(
            f"nn.functional.{norm}",
            "affine",
            lambda x, w, b, n=norm, o=options: getattr(F, n)(x, None, None, w, b, **o),
            (torch.randn(64, 8, 16, 16), like(8), like(8)),
        )
    x, w, b = torch.randn(4096, 64), like(64), like(64)
    yield Case(
        "nn.functional.layer_norm", "", lambda *a: F.layer_norm(a[0], (64,), *a[1:]), (x, w, b)
    )
    yield Case("nn.functional.rms_norm", "", lambda x, w: F.rms_norm(x, (64,), w), (x, w))
    yield Case("nn.functional.group_norm", "", lambda *a: F.group_norm(a[0], 8, *a[1:]), (x, w, b))
    yield Case("nn.functional.prelu", "one weight", F.prelu, (-like(64, 8, 16, 16), like(1)))


def products() -> Iterator[Case]:
    yield Case("nn.functional.linear", "", F.linear, (like(4096, 64), like(8, 64), like(8)))
    yield Case("nn.functional.linear", "long", F.linear, (like(8, 4096), like(8, 4096), like(8)))
    yield Case("addbmm", "many", torch.addbmm, (like(4, 4), like(600, 4, 8), like(600, 8, 4)))
    yield Case(
        "nn.functional.bilinear", "", F.bilinear, (like(512, 16),) * 2 + (like(4, 16, 16), like(4))
    )
    yield Case("cdist", "", torch.cdist, (torch.randn(512, 16), torch.randn(512, 16)))
    pair = (like(4096, 4), like(4096, 4))
    yield Case("einsum", "", lambda x, y: torch.einsum("bi,bj->ij", x, y), pair)
    yield Case("tensordot", "", lambda x, y: torch.tensordot(x.T, y, 1), pair)
    yield Case("outer", "", torch.outer, (like(4096), like(8)))
    yield Case("kron", "", torch.kron, (like(64, 64), like(4, 4)))
    for dims in (1, 2, 3):
        size, window = {1: (2048, 255), 2: (40, 17), 3: (12, 7)}[dims]
        for kind in ("conv", "conv_transpose"):
            conv = getattr(F, f"{kind}{dims}d")
            op = f"nn.functional.{kind}{dims}d"
            batch = (like(512, 2, *[6] * dims), like(2, 2, *[3] * dims), like(2))
            yield Case(op, "a batch of 512", conv, batch)
            large = (like(1, 2, *[size] * dims), like(2, 2, *[window] * dims), like(2))
            yield Case(op, f"window {window}", conv, large)
    attention = F.scaled_dot_product_attention
    op = "nn.functional.scaled_dot_product_attention"
    yield Case(op, "like keys", attention, tuple(like(1, 2, 256, 16) for _ in range(3)))
    yield Case(op, "", attention, tuple(torch.randn(1, 2, 256, 16) for _ in range(3)))


def reductions() -> Iterator[Case]:
    for about, call in (
        ("add", lambda x, b: x + b),
        ("mul", lambda x, b: x * b),
        ("div", lambda x, b: x / b),
        ("where", lambda x, b: torch.where(x > 0, b, x)),
    ):
        yield Case(f"broadcast {about}", "4,096 rows", call, (like(4096, 8), like(8)))
    for op, call in {
        "mean": lambda x: x.mean(0),
        "sum": lambda x: x.sum(0),
        "var": lambda x: x.var(0),
        "std": lambda x: x.std(0),
        "nansum": lambda x: x.view(4096, 4, 2).nansum((0, 2)),
        "cumsum": lambda x: x.cumsum(0),
        "logsumexp": lambda x: x.logsumexp(0),
        "logcumsumexp": lambda x: x.logcumsumexp(0),
        "trapezoid": lambda x: torch.trapezoid(x, dim=0),
        "nn.functional.normalize": lambda x: F.normalize(x, dim=0),
        "stft": lambda x: torch.stft(x[:, 0], 64, window=torch.ones(64), return_complex=True).abs(),
    }.items():
        yield Case(op, "4,096 rows", call, (like(4096, 8),))


# --- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Finding:
    """The largest error of a call.

    ``of_steps`` is the error where roundings between the steps of a formula count as explained; 0
    if the op is right.
    """

    of_steps: float = 0.0
    units: float = 0.0
    where: str = ""


@dataclass
class Verdict:
    """What came of one op in one lower precision; errors in units of the module's docstring."""

    op: str
    dtype: str
    num_compared: int = 0
    worst: Finding = Finding()
    raised: str = ""
    is_enlarged: bool = True

    @property
    def is_right(self) -> bool:
        """Whether one rounding explains all errors."""
        return self.worst.units <= RIGHT and not self.raised

    @property
    def is_rounded_between(self) -> bool:
        """Whether roundings between the steps of a formula explain all errors, and are needed."""
        return not self.is_right and self.worst.of_steps <= FEW_ROUNDINGS and not self.raised

    @property
    def is_explained(self) -> bool:
        """Whether roundings, or a known cause, explain all errors."""
        return self.is_right or self.is_rounded_between or self.op in KNOWN


class Rounded(TorchDispatchMode):
    """Moves the result of each kernel by up to half a unit in the last place, and rounds it.

    Not the result of an addition in a backward pass: there autograd adds up the gradients of a
    tensor, one for each use.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)
        self.is_backward = False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        is_alias = any(each.alias_info for each in op._schema.returns)
        if is_alias or (self.is_backward and op.overloadpacket is torch.ops.aten.add):
            return result
        return tree_map(self._rounded, result)

    def _rounded(self, value: Any) -> Any:
        return rounded(moved(value, self._dtype, self._generator), self._dtype)


@dataclass
class Run:
    """Results of a call and gradients of its floating-point arguments, without autograd."""

    results: list[Tensor]
    gradients: list[Tensor | None]


def run(
    case: Case,
    leaves: list[Any],
    spec: Any,
    cotangents: list[Tensor],
    policy: str | None,
    dtype: torch.dtype,
    mode: Any = None,
) -> Run:
    """Call an op and its backward pass, without autocast if there is no policy.

    ``cotangents`` is filled by the first call, with terms of one sign.
    """
    ours = [leaf.detach().clone().requires_grad_() if is_float(leaf) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(ours, spec)
    torch.manual_seed(0)
    autocasts = autocast("cpu", dtype, policy=policy or "standard", enabled=policy is not None)
    with mode or nullcontext(), autocasts:
        result = case.call(*args, **kwargs)
    results = [each for each in tree_flatten(result)[0] if is_float(each)]
    if not cotangents:
        made = ((torch.rand_like(each) * 0.5 + 0.5) for each in results)
        cotangents += [rounded(each.detach(), dtype) for each in made]
    wanted = [leaf for leaf in ours if is_float(leaf)]
    pairs = zip(results, cotangents, strict=True)
    differentiable = [(each, given.to(each.dtype)) for each, given in pairs if each.requires_grad]
    gradients: list[Tensor | None] = [None] * len(wanted)
    if differentiable:
        outputs, given = zip(*differentiable, strict=True)
        if mode is not None:
            mode.is_backward = True
        with mode or nullcontext():
            gradients = list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    return Run(
        [dense(each.detach()) for each in results],
        [g if g is None else dense(g) for g in gradients],
    )


def dense(tensor: Tensor) -> Tensor:
    """Return a dense tensor; terms of a sparse one with equal indices are added in float32."""
    return tensor if tensor.layout is torch.strided else tensor.float().to_dense()


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in FLOATS


def rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype).float() if is_float(value) else value


def moved(value: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Return a tensor whose entries are moved by up to half a unit in the last place."""
    if not is_float(value) or not is_dense(value):
        return value
    by = (torch.rand(value.shape, generator=generator) - 0.5) * torch.finfo(dtype).eps
    return value * (1 + by)


def error(
    found: Tensor | None, exact: Tensor | None, others: list[Any], dtype: torch.dtype
) -> float:
    """Return the largest error of a tensor; ``others`` are results that roundings explain."""
    if found is None or exact is None or found.shape != exact.shape:
        return 0.0 if found is exact else math.inf
    if exact.numel() == 0:
        return 0.0
    limits = torch.finfo(dtype)
    deviation = torch.zeros_like(exact)
    for other in others:
        if other is not None and other.shape == exact.shape:
            deviation = deviation.maximum((other - exact).abs().nan_to_num(math.inf, math.inf))
    usual = deviation[deviation.isfinite()].mean().nan_to_num(0.0)
    allowed = limits.eps / 2 * exact.abs() + deviation + usual + limits.smallest_normal * limits.eps
    found = found.float()
    same = (found == exact) | (found.isnan() & exact.isnan()) | (exact.abs() > limits.max)
    units = ((found - exact).abs() / allowed).nan_to_num(math.inf, math.inf)
    return torch.where(same | deviation.isinf(), 0.0, units).max().item()


def are_equal(one: Run, two: Run) -> bool:
    """Return whether two runs gave the same, NaN for NaN."""

    def is_same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None or a.shape != b.shape:
            return a is b
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)

    both = zip(one.results + one.gradients, two.results + two.gradients, strict=True)
    return all(is_same(a, b) for a, b in both)


@dataclass(frozen=True)
class Prepared:
    """A case whose inputs are rounded to a lower precision, and what it gives in float32."""

    case: Case
    dtype: torch.dtype
    leaves: list[Any]
    spec: Any
    cotangents: list[Tensor]
    exact: Run

    def again(self, mode: Any = None) -> Run:
        """Run the case again, without autocast."""
        return run(self.case, self.leaves, self.spec, self.cotangents, None, self.dtype, mode)

    def with_other_random_numbers(self) -> Run:
        """Run the case again, from another seed."""
        torch.manual_seed(1)
        with patch("torch.manual_seed"):  # functions of the database seed by themselves
            return self.again()

    def moved_at_random(self, seed: int) -> Run:
        """Move each entry of the inputs by up to half a unit."""
        generator = torch.Generator().manual_seed(seed)
        return self._of(lambda number, x: moved(x, self.dtype, generator))

    def moved_together(self, signs: int) -> Run:
        """Move all entries of an input by half a unit, to the side that a bit of ``signs`` says."""
        half = torch.finfo(self.dtype).eps / 2

        def move(number: int, x: Any) -> Any:
            by = half if signs >> number & 1 else -half
            return x * (1 + by) if is_float(x) and is_dense(x) else x

        return self._of(move)

    def _of(self, move: Callable[[int, Any], Any]) -> Run:
        numbers = iter(range(len(self.leaves)))
        leaves = [move(next(numbers), x) if is_float(x) else x for x in self.leaves]
        given = [move(0, x) for x in self.cotangents]
        return run(self.case, leaves, self.spec, given, None, self.dtype)

    def under(self, policy: str, *, is_lower: bool) -> Run:
        """Run the case under a policy, with inputs in lower precision or in float32."""
        leaves = [x.to(self.dtype) if is_lower and is_float(x) else x for x in self.leaves]
        return run(self.case, leaves, self.spec, self.cotangents, policy, self.dtype)

    def errors(self, found: Run, others: list[Run]) -> Iterator[tuple[float, str]]:
        """Yield the errors of results and gradients."""
        for what in ("results", "gradients"):
            lists = (getattr(each, what) for each in (found, self.exact, *others))
            for ours, reference, *shifted in zip(*lists, strict=True):
                yield error(ours, reference, shifted, self.dtype), what


def prepared(case: Case, dtype: torch.dtype) -> Prepared | None:
    """Run a case in float32; None if it cannot run, or has nothing or too much to compare."""
    leaves, spec = tree_flatten((case.args, case.kwargs))
    leaves = [rounded(leaf, dtype) for leaf in leaves]
    cotangents: list[Tensor] = []
    try:
        exact = run(case, leaves, spec, cotangents, None, dtype)
        if sum(each.numel() for each in exact.results) > MOST_RESULTS:
            return None
        this = Prepared(case, dtype, leaves, spec, cotangents, exact)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills empty tensors with NaN
        again = this.again()
    except REFUSALS:
        return None  # a repeated dimension does not fit
    finally:
        torch.use_deterministic_algorithms(False)
    is_comparable = any(map(is_float, leaves)) and exact.results and are_equal(exact, again)
    return this if is_comparable else None


def audit(case: Case, dtype: torch.dtype, policy: str) -> Finding | None:
    """Return the largest error of a call; None if it cannot be compared.

    Raises:
        RuntimeError: The op runs in float32 without autocast, and not here.
    """
    this = prepared(case, dtype)
    if this is None:
        return None
    found = {
        "lower precision": this.under(policy, is_lower=True),
        "float32": this.under(policy, is_lower=False),
    }
    try:
        return judged(this, found)
    except REFUSALS:
        return None  # of inputs that are moved, results have other shapes


def judged(this: Prepared, found: dict[str, Run]) -> Finding | None:
    """Return the largest error of runs in lower precision; None if they are random."""

    def worst(others: list[Run]) -> tuple[float, str]:
        return max(
            (units, f"{what} of inputs in {kind}; {this.case.about}")
            for kind, run in found.items()
            for units, what in this.errors(run, others)
        )

    others = [this.moved_at_random(seed) for seed in range(2)]
    units, where = worst(others)
    if units <= RIGHT:
        return Finding(0.0, units, where)
    if not are_equal(this.exact, this.with_other_random_numbers()):
        return None  # it draws other random numbers in lower precision
    others += [this.moved_together(signs) for signs in range(4)]
    units, where = worst(others)
    if units <= RIGHT:
        return Finding(0.0, units, where)
    others += [this.again(Rounded(this.dtype, seed)) for seed in range(4)]
    return Finding(worst(others)[0], units, where)


def audit_cases(cases: Iterable[Case], dtypes: Iterable[str], policy: str) -> list[Verdict]:
    """Audit cases of one op, for some seconds at most."""
    verdicts: dict[str, Verdict] = {}
    started = time.monotonic()
    for case in cases:
        for name in dtypes:
            verdict = verdicts.setdefault(name, Verdict(case.op, name))
            if verdict.num_compared and time.monotonic() - started > SECONDS_AN_OP:
                continue
            try:
                found = audit(case, DTYPES[name], policy)
            except REFUSALS as refusal:
                text = str(refusal).strip().splitlines() or [type(refusal).__name__]
                verdict.raised = verdict.raised or f"{text[0][:100]} ({case.about})"
                continue
            if found is not None:
                verdict.num_compared += 1
                verdict.worst = max(found, verdict.worst)
    return list(verdicts.values())


# --- a process for each op ------------------------------------------------------------------------


@dataclass
class Work:
    """An op: its own calls, and its description in the database."""

    op: str
    own: list[Case] = field(default_factory=list)
    described: Any = None

    def cases(self, *, enlarge: bool) -> Iterator[Case]:
        """Yield the calls; ``enlarge``: also those of the database with repeated arguments."""
        yield from self.own
        if self.described is not None:
            for case in cases_of_database(self.op, self.described):
                yield case
                if enlarge:
                    yield from enlarged(case)


def works(ops: dict[str, Any], names: set[str] | None) -> list[Work]:
    """Return what is to be done, by op."""
    found = {op: Work(op, described=described) for op, described in ops.items()}
    for case in own_cases():
        found.setdefault(case.op, Work(case.op)).own.append(case)
    return [work for op, work in found.items() if names is None or op in names]


def audit_in_a_process(work: Work, dtypes: list[str], policy: str) -> list[Verdict]:
    """Audit an op in a forked process: some kernels read outside of their tensors.

    Repeated pivots and lengths are not what such a kernel expects: an op that crashes is audited
    again on the inputs of the database as they are.
    """
    for enlarge in (True, False):
        ours, theirs = FORK.Pipe(duplex=False)

        def send(enlarge: bool = enlarge, theirs: Any = theirs) -> None:
            torch.set_num_threads(1)  # the tensors are small
            keep_freed_memory()
            theirs.send(audit_cases(work.cases(enlarge=enlarge), dtypes, policy))

        process = FORK.Process(target=send, daemon=True)
        process.start()
        theirs.close()
        try:
            verdicts: list[Verdict] | None = ours.recv() if ours.poll(MOST_SECONDS) else None
        except EOFError:
            verdicts = None
        process.kill()
        process.join()
        ours.close()
        if verdicts is not None:
            return [replace(v, is_enlarged=enlarge) for v in verdicts]
    return [Verdict(work.op, name, raised="the process ended") for name in dtypes]


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: clearing pages anew was two thirds of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, 2**31 - 1)


def audit_all(todo: list[Work], dtypes: list[str], policy: str) -> list[Verdict]:
    """Audit ops, as many at a time as there are cores; show progress on a terminal."""
    first = Case("sum", "", torch.sum, (torch.ones(2),))
    audit(first, torch.bfloat16, policy)  # the forked processes share what this imports
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lambda work: audit_in_a_process(work, dtypes, policy), todo):
            verdicts += found
            if found and sys.stderr.isatty():
                print(f"\r\033[K{len(verdicts)} {found[0].op}", end="", file=sys.stderr)
    return verdicts


# --- showing --------------------------------------------------------------------------------------


def page(verdicts: list[Verdict], policy: str, *, is_own: bool) -> str:
    """Return the table as Markdown."""
    compared = [v for v in verdicts if v.num_compared or v.raised]
    right = [v for v in compared if v.is_right]
    few = [v for v in compared if v.is_rounded_between]
    wrong = [v for v in compared if v not in right and v not in few]
    version = torch.__version__.partition("+")[0]
    lines = [
        "# Audit of ops",
        "",
        f"`python benchmarks/op_audit.py {'--own ' if is_own else ''}"
        "--markdown benchmarks/op_audit.md`:",
        f"{device_name('cpu')}, PyTorch {version}, policy `{policy}`.",
        "Calls of our own that add many terms (without `--own` also PyTorch's OpInfo database),"
        if is_own
        else "Each op of PyTorch's OpInfo database and of `torch.nn.functional`,",
        "forward and backward,",
        "beside float32 on the same rounded inputs,",
        "with inputs that make it add many like terms. One unit is what one rounding of the inputs",
        "and one of the result explain. Rounding between steps is measured: float32, with the",
        "result of each kernel rounded. It explains no sum that a kernel or autograd rounds.",
        "",
        "| ops, in two dtypes | |",
        "|---|---:|",
        f"| compared | {len(compared)} |",
        f"| right: within one unit | {len(right)} |",
        f"| a formula of several steps: what roundings between them explain | {len(few)} |",
        f"| further off, or an error | {len(wrong)} |",
        f"| random, or without floating-point inputs | {len(verdicts) - len(compared)} |",
        "",
        "## Further off, or an error",
        "",
        "| op | dtype | units | why |",
        "|---|---|---:|---|",
    ]
    for v in sorted(wrong, key=lambda v: (-v.worst.units, v.op)):
        units = "error" if v.raised else f"{v.worst.units:.1f}"
        why = KNOWN.get(v.op) or v.raised or f"{v.worst.where}; {v.worst.of_steps:.1f} of steps"
        lines.append(f"| {v.op} | {v.dtype} | {units} | {why} |")
    lines += [
        "",
        "## Rounded between steps",
        "",
        "Errors of many units are differences of like terms, such as a gradient that is zero, or",
        "come from values between the steps that leave the range of float16.",
        "",
        "| op | dtype | units | where |",
        "|---|---|---:|---|",
    ]
    for v in sorted(few, key=lambda v: (-v.worst.units, v.op)):
        lines.append(f"| {v.op} | {v.dtype} | {v.worst.units:.1f} | {v.worst.where} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", help="names in the database or of our own calls")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--policy", default="standard")
    parser.add_argument("--own", action="store_true", help="only the calls of our own")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    parser.add_argument(
        "--share",
        type=int,
        help="only every N-th op of the database, in little time; fail if "
        "one is further off that is not known",
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = set(args.ops) if args.ops else None
    if args.share:
        global SECONDS_AN_OP
        SECONDS_AN_OP = 0.3
        names = set(list(database())[:: args.share])
    todo = works({} if args.own else database(), names)
    verdicts = audit_all(todo, args.dtypes, args.policy)
    text = page(verdicts, args.policy, is_own=args.own)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    print(text)
    if args.share:
        sys.exit(any(not verdict.is_explained for verdict in verdicts))


if __name__ == "__main__":
    main()
