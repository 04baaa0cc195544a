"""Gradients of parameters: collected in one walk, checked, multiplied and measured in one pass.

PyTorch's kernels take them all at once. Sync: none, in all of these functions but
:meth:`Norms.unscaled`.

Source of the clipping: Pascanu et al., "On the difficulty of training recurrent neural networks"
(2013, arXiv:1211.5063), with the epsilon of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial, reduce
from operator import attrgetter, eq
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep._common.text import names_text
from halfstep._gradients.optimizers import HOLDERS, members, name
from halfstep._gradients.scalars import (
    CPU,
    READABLE,
    Scalar,
    as_tensor,
    describe,
    flag_nonfinite,
    is_nonfinite,
    reciprocal,
    scalar,
)
from halfstep._pytorch.amp import (
    check_and_unscale_,
    check_each_,
    increment_version,
    multiply_each_,
    norms_of_each,
    set_grad_enabled,
)
from halfstep._pytorch.devices import facts, has_float64, to_device, widest_float
from halfstep._pytorch.distributed import is_dtensor, local_part, reduce_partial
from halfstep._pytorch.storages import values_of_sparse

NUM_ASKED = 256
LARGE = 1 << 20  # from this mean size on norms are as fast: an H200's host takes some 2.5 us each

Kind: TypeAlias = tuple[torch.device, torch.dtype]
Flags: TypeAlias = dict[torch.device, Tensor]  # float32 scalars: 1 if inf or NaN is there, else 0

_version_of: Callable[[Tensor], int] = attrgetter("_version")
_is_cpu: Callable[[Tensor], bool] = attrgetter("is_cpu")
_device_of, _dtype_of, _layout_of = map(attrgetter, ("device", "dtype", "layout"))
_DENSE_OR_NONE = {Tensor, type(None)}
_STRIDED = {torch.strided}
_USUAL_PARAMETERS = {Tensor, torch.nn.Parameter}


@dataclass(eq=False, slots=True)
class Gradients:
    """The gradients of some parameters, as three lists of the same length."""

    params: list[Tensor]  # parameters that have a gradient
    grads: list[Tensor]  # their grad
    # Dense real tensors that share memory with grads: the values of a sparse gradient, a complex
    # gradient as real with a last dimension of 2, the local part of a DTensor.
    values: list[Tensor]

    by_kind: dict[Kind, list[Tensor]]  # values by device and dtype, as the fused kernels need them

    def by_device(self) -> Mapping[torch.device, Sequence[int]]:
        if len(self.by_kind) == 1:
            ((device, _),) = self.by_kind
            return {device: range(len(self.values))}
        found = defaultdict[torch.device, list[int]](list)
        for index, values in enumerate(self.values):
            found[values.device].append(index)
        return found

    def without(self, ids: Set[int]) -> Gradients:
        rows = zip(self.params, self.grads, self.values, strict=True)
        kept = [row for row in rows if id(row[1]) not in ids]
        return _gradients(*([row[part] for row in kept] for part in range(3)))

    def versions(self) -> list[int]:
        return list(map(_version_of, self.grads))

    def written_since(self, versions: list[int]) -> Gradients:
        """Return the gradients that do not have these versions, one for each, any more."""
        now = self.versions()
        if now == versions:
            return NONE
        if not any(map(eq, now, versions)):
            return self
        rows = zip(self.grads, now, versions, strict=True)
        return self.without({id(grad) for grad, version, before in rows if version == before})

    def is_measured_fast(self) -> bool:
        """Return whether measuring norms is no slower than a check.

        On a CPU it takes 1.2 times as long, and 2 to 7 times for bfloat16 and small gradients. It
        is slower elsewhere for many small ones, each of which makes a result of its own.
        """
        for device, dtype in self.by_kind:
            if device.type == "cpu":
                return False
            if dtype not in facts(device.type).unscales:
                return True  # a check measures them too
        # A sample is enough: asking thousands of tensors is slow.
        some = self.values[:: len(self.values) // NUM_ASKED + 1]
        return sum(map(Tensor.numel, some)) >= LARGE * len(some)

    # One *pass* (G) reads all gradients once or writes them once.

    def unscale_(self, scale: Scalar, *, can_amplify: bool) -> Flags:
        """Divide all by the scale in place, and check for inf and NaN. One read and write.

        With a scale that may be below 1 (``can_amplify``), a finite gradient may become inf, so the
        gradients are checked once more. Returns the same as :meth:`multiply_`.
        """
        found_inf = self.multiply_(reciprocal(scale))
        return self.check() if can_amplify else found_inf  # non-finite values stay non-finite

    def check(self, flags: Flags | None = None, one: Tensor | None = None) -> Flags:
        """Check for inf and NaN with the multiplying kernel and a factor of exactly 1."""
        return self.multiply_(1.0, flags=flags, on_device=one)

    def multiply_(
        self,
        factor: Scalar,
        *,
        was_just_read: bool = False,
        flags: Flags | None = None,
        on_device: Tensor | None = None,  # the factor, if there is a tensor of it
    ) -> Flags:
        """Multiply all by a float32 number in place. One read and write.

        A dtype for which the device has no such kernel, such as bfloat16 on CUDA, takes another
        read and five more ops, but no write for a factor of exactly 1. If another pass has just
        read them, the order is reversed: the last ones are still in the cache. Returns what was inf
        or NaN before, in ``flags`` of 0 if given.
        """
        found_inf: Flags = {} if flags is None else flags
        made = factor if isinstance(factor, Tensor) else on_device
        factors = {} if made is None else {made.device: made}
        # Intended as a check, but also PyTorch's fastest kernel for multiplying by a device scalar:
        # 0.8 ms for 4,096 x 256 entries, where _foreach_mul_ takes 1.5.
        is_grad_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            for (device, dtype), values in self.by_kind.items():
                flag, by = found_inf.get(device), factors.get(device)
                if flag is None:
                    flag = torch.zeros((), dtype=torch.float32, device=device)
                    found_inf[device] = flag
                if by is None:
                    by = factors[device] = (
                        to_device(factor, device)
                        if isinstance(factor, Tensor)
                        else torch.full((), factor, dtype=torch.float32, device=device)
                    )
                if dtype in facts(device.type).unscales:
                    ordered = values[::-1] if was_just_read else values
                    check_and_unscale_(ordered, flag, by)
                else:
                    check_each_(values, flag)
                    if isinstance(factor, Tensor) or factor != 1.0:
                        multiply_each_(values[::-1], by)
                # The kernel does not bump versions. Two are enough for code that checks them.
                increment_version((values[0], values[-1]))
        finally:
            set_grad_enabled(is_grad_enabled)
        return found_inf


NONE = Gradients([], [], [], {})


grad_of: Callable[[Tensor], Any] = attrgetter("grad")

Seen: TypeAlias = tuple[weakref.ref[Tensor], int]  # a gradient and its version at one time


def seen(grad: Tensor) -> Seen:
    """Return what :func:`is_as_seen` needs later, without keeping the gradient alive."""
    return weakref.ref(grad), grad._version


def is_as_seen(earlier: Seen, grad: Tensor | None) -> bool:
    """Return whether a gradient is the tensor of that time and was not written since."""
    ref, version = earlier
    return grad is not None and ref() is grad and grad._version == version


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, or of all that a container holds, each once.

    None in a group, as some optimizers have for a removed parameter, is left out. Anything else
    there is a TypeError.
    """
    params: list[Tensor] = []
    # Ask the class first: a property of it may raise. map() adds no Python call per holder.
    is_container = any(map(partial(hasattr, type(optimizer)), HOLDERS)) or any(
        map(partial(hasattr, optimizer), HOLDERS)
    )
    has_groups = hasattr(optimizer, "param_groups")
    found = members(optimizer) if is_container or not has_groups else [optimizer]
    for each in found:
        for group in each.param_groups:
            params += group["params"]
    if not set(map(type, params)) <= _USUAL_PARAMETERS:
        params = [param for param in params if param is not None]
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"{name(optimizer)}: its param_groups hold a {type(param).__name__} among the "
                    "parameters. Each group['params'] is a list of tensors"
                )
    return list(dict.fromkeys(params)) if len(found) > 1 else params


def collect(params: Iterable[Tensor]) -> Gradients:
    """Collect the gradients of parameters; parameters without one are left out.

    Some gradients are replaced in ``param.grad`` first. Sparse COO gradients are coalesced: entries
    that are finite one by one may overflow when they are added, above all in float16. Gradients
    that cannot be written in place (expanded, lazily conjugated or negated) are copied. DTensors
    with partial placements are reduced, which takes a collective. Other sparse layouts are a
    TypeError, before anything is changed.
    """
    params = list(params)
    grads = list(map(grad_of, params))
    types = set(map(type, grads))
    if type(None) in types:
        params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
        grads = list(map(grad_of, params))
    # For thousands, a set of tuples takes half as long again.
    devices = {CPU} if all(map(_is_cpu, grads)) else set(map(_device_of, grads))
    dtypes, is_plain = set(map(_dtype_of, grads)), types <= _DENSE_OR_NONE
    is_plain = is_plain and set(map(_layout_of, grads)) == _STRIDED
    for dtype in dtypes:
        is_plain = is_plain and not dtype.is_complex
    if (
        is_plain
        and not any(map(Tensor.is_neg, grads))
        and (all(map(Tensor.is_contiguous, grads)) or not any(0 in g.stride() for g in grads))
    ):
        if not len(devices) == len(dtypes) == 1:
            return _gradients(params, grads, grads)
        (device,), (dtype,) = devices, dtypes
        return Gradients(params, grads, grads, {(device, dtype): grads})
    # Some are not dense and real, or cannot be written in place.
    for grad in grads:
        if grad.layout not in (torch.strided, torch.sparse_coo):
            raise TypeError(
                f"a gradient is {describe(grad)} in the layout {grad.layout}: a GradScaler reads "
                "dense gradients and sparse COO ones. Convert it: param.grad = "
                "param.grad.to_dense() or .to_sparse()"
            )
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            writable = reduce_partial(param, grad) if is_dtensor(grad) else _writable(grad)
            if writable is not grad:
                param.grad = writable
    grads = list(map(grad_of, params))
    return _gradients(params, grads, list(map(_values, grads)))


def is_nonzero(grad: Tensor) -> Tensor:
    """Return whether an entry is not 0, of a DTensor's local part. No collective."""
    grad = local_part(grad)
    return (values_of_sparse(grad) if grad.is_sparse else grad).any()


def refuse_float16(gradients: Gradients, owner: str, names: list[str]) -> None:
    """Raise the error for float16 gradients, whose small entries would underflow when unscaled."""
    found = [
        f"{name} ({describe(grad)})"
        for name, grad in zip(names, gradients.grads, strict=True)
        if grad.dtype in (torch.float16, torch.complex32)
    ]
    raise ValueError(
        f"{owner} has float16 gradients, which cannot be unscaled without "
        f"losing the small values that the scale protects: {names_text(found)}.\n"
        "Cause: these parameters are stored in float16 (model.half(), .to(torch.float16), or a "
        "checkpoint loaded in float16).\n"
        "Cure: keep the parameters in float32 (model.float()) and let autocast choose float16 for "
        "each op; or keep float32 master weights, and with them float32 gradients: "
        "halfstep.master_weights(optimizer, store='float32'); or train in bfloat16, which needs no "
        "GradScaler."
    )


def _gradients(params: list[Tensor], grads: list[Tensor], values: list[Tensor]) -> Gradients:
    by_kind: dict[Kind, list[Tensor]] = defaultdict(list)
    for tensor in values:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    return Gradients(params, grads, values, by_kind)


def _writable(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        return grad.coalesce()
    # Autograd stores the conjugate of a complex gradient lazily; such a tensor has no real view.
    grad = grad.resolve_conj().resolve_neg()
    return grad.clone() if 0 in grad.stride() and grad.numel() > 1 else grad


def _values(grad: Tensor) -> Tensor:
    grad = local_part(grad)
    values = values_of_sparse(grad) if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


# --- norms ----------------------------------------------------------------------------------------

CLIP_EPSILON = 1e-6  # the epsilon that PyTorch adds to the norm before it divides by it


class Norms(NamedTuple):
    """The L2 norm of every gradient, on the devices where the gradients are."""

    params: list[Tensor]
    # By device: the positions of its gradients in `params`, and the sums of their squares.
    on_device: Mapping[torch.device, tuple[Sequence[int], Tensor]]
    scale: Scalar | None  # by which the gradients were multiplied when measured; None if unscaled
    squares: Scalar = math.nan  # the sum of all, over all ranks, once it was formed
    # 1 if that is inf or NaN, else 0, on the device of the scale; None if the host knows it.
    found_inf: Tensor | None = None

    @property
    def norm(self) -> Scalar:
        """The total norm, unscaled, once the squares were summed."""
        squares = self.squares
        norm = squares.sqrt() if isinstance(squares, Tensor) else math.sqrt(squares)
        return norm if self.scale is None else norm / self.scale

    def flag(self, device: torch.device) -> Tensor:
        """Return 1 if the sum of all squares is inf or NaN, else 0, on the device of the scale."""
        return flag_nonfinite(self.squares, device) if self.found_inf is None else self.found_inf

    def sum_of_squares(self, device: torch.device, shares: Sequence[float] = ()) -> Tensor:
        """Return the sum of all squares, not unscaled, on ``device``, weighted by ``shares``."""
        sums = []
        for where, (positions, squares) in self.on_device.items():
            if shares:
                own = [shares[position] for position in positions]
                squares = squares * torch.tensor(own, dtype=squares.dtype).to(squares.device)
            total = squares.sum()
            if where != device:
                total = to_device(total if has_float64(device) else total.float(), device)
            sums.append(total)
        if not sums:  # another rank has all of them
            return torch.zeros((), dtype=widest_float(device), device=device)
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def unscaled(self) -> list[float]:
        """Return the unscaled norm of every gradient. Sync: one for each device."""
        scale = 1.0 if self.scale is None else float(self.scale)
        norms = [0.0] * len(self.params)
        for positions, squares in self.on_device.values():
            for position, square in zip(positions, squares.tolist(), strict=True):
                norms[position] = math.sqrt(square) / scale
        return norms


def norms_of(
    gradients: Gradients, scale: Scalar | None, device: torch.device | None = None
) -> Norms:
    """Return the norms of gradients that are multiplied by ``scale``. One read (1 G).

    A norm is inf or NaN if and only if the gradient has such an entry, so this is also a check.
    With a ``device``, that of the scale, the sum of all squares is formed there.
    """
    on_device = {}
    is_grad_enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        for where, positions in gradients.by_device().items():
            values = gradients.values
            if len(positions) < len(values):
                values = [values[position] for position in positions]
            on_device[where] = positions, sums_of_squares(values)
    finally:
        set_grad_enabled(is_grad_enabled)
    norms = Norms(gradients.params, on_device, scale)
    if device is None:
        return norms
    squares = scalar(norms.sum_of_squares(device))
    found_inf = is_nonfinite(squares) if isinstance(squares, Tensor) else None
    return Norms(gradients.params, on_device, scale, squares, found_inf)


@torch.no_grad()
def largest(gradients: Gradients, scale: Scalar, device: torch.device) -> Tensor:
    """Return the largest magnitude of gradients multiplied by ``scale``, unscaled. 1 G."""
    amaxes = [largest_magnitudes(values).amax() for values in gradients.by_kind.values()]
    if not amaxes:  # another rank has gradients, and all ranks measure the same steps
        return torch.zeros((), device=device)
    found = torch.stack([to_device(amax, device).float() for amax in amaxes])
    return found.amax() * reciprocal(scale)


@torch.no_grad()
def overflows_when_divided(gradients: Gradients, scale: Scalar) -> list[Tensor]:
    """Return flags, 1 if finite gradients overflow when divided by a scale below 1. 1 G."""
    found = []
    for (device, dtype), values in gradients.by_kind.items():
        amax, by = largest_magnitudes(values).amax(), as_tensor(scale, device)
        # Kernels divide or multiply by the reciprocal. Both results, rounded to the gradient's
        # dtype, are what they would write.
        unscaled = torch.maximum(amax * reciprocal(by), amax / by).to(dtype)
        found.append(is_nonfinite(unscaled))
    return found


def clip_coefficient(norm: Scalar, max_norm: float, found_inf: Tensor | None = None) -> Scalar:
    """Return the factor that reduces gradients of this norm to at most ``max_norm``.

    It is 1 for a norm that is inf or NaN: inf times 0 would be NaN and would hide the cause.
    ``found_inf``: 1 if it is, else 0, on the device of the norm, if that is known there.
    """
    if not isinstance(norm, Tensor):
        # PyTorch divides a number by a tensor in this way: by multiplying with the reciprocal.
        return min(1.0 / (norm + CLIP_EPSILON) * max_norm, 1.0) if math.isfinite(norm) else 1.0
    coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    # fmax ignores a coefficient that is NaN, and 1 is the largest.
    return torch.fmax(coefficient, is_nonfinite(norm) if found_inf is None else found_inf)


# --- reductions -----------------------------------------------------------------------------------

ROW = 1 << 10  # squares that are added up in float32; the norms of the rows are in float64
SMALL = 1 << 15  # entries up to which a CPU tensor is converted to float64, which copies it


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor.

    The square root has a relative error of 1e-5. Squares may underflow in float32: entries below
    1e-19 may count as zero. A sum that overflows becomes the largest finite number.

    Takes one or more real, strided tensors on one device, of any shapes and dtypes, and returns
    float64 ``[len(tensors)]``, inf or NaN if and only if that tensor contains inf or NaN. On a
    device without float64 it is float32, and inf also for a norm above 1.8e19. The result has no
    gradient.
    """
    device = tensors[0].device
    dtype = widest_float(device)
    shortened = list(tensors)
    if device.type in READABLE and any(map(SMALL.__lt__, map(Tensor.numel, tensors))):
        shortened = list(map(_shortened, tensors))
    sums = torch.stack(norms_of_each(shortened, 2, dtype=dtype)).square_()
    if dtype is torch.float32:
        return sums  # an overflow of the sum is one of the gradients, which could not be clipped
    may_exceed = torch.float64 in map(attrgetter("dtype"), tensors)
    if may_exceed and not (device.type in READABLE and sums.isfinite().all()):
        is_finite = largest_magnitudes(tensors).isfinite()
        sums = torch.where(is_finite, sums.clamp(max=torch.finfo(dtype).max), sums)
    return sums


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of every tensor: 0 if empty, NaN if it contains NaN.

    Takes tensors as above; returns ``[len(tensors)]`` in the widest of their dtypes and float32.
    """
    widest = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    # The kernel rejects an empty tensor.
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(norms_of_each(filled, math.inf, dtype=widest))


def _shortened(tensor: Tensor) -> Tensor:
    """Return a tensor of the same norm: for a large one, the norms of its rows.

    PyTorch's CPU kernel copies what it is to add up in float64, and takes 100 times as long.
    """
    size = tensor.numel()
    if size <= SMALL:
        return tensor
    if not tensor.is_contiguous():  # any order of the entries will do, so that nothing is copied
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride)
    entries, end = tensor.reshape(-1), size - size % ROW
    # In pieces, so that one that is converted stays in the cache.
    pieces = torch.split(entries[:end].view(-1, ROW), ROW)
    return torch.cat([*map(_norms_of_rows, pieces), entries[end:].double()])


def _norms_of_rows(rows: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=wide).double()
    is_exceeded = norms.isfinite().logical_not_()
    if is_exceeded.any():  # maybe by the squares alone
        norms[is_exceeded] = torch.linalg.vector_norm(rows[is_exceeded], dim=1, dtype=norms.dtype)
    return norms
