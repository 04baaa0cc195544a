"""Edits of calls that keep PyTorch's functions away from values where they are undefined.

An edit is an expression in which ``{}`` stands for the original code: an argument or the call
itself. It may have names of the user's function. A replay evaluates the same expression that the
diagnosis shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._autocast import HALVES
from halfstep._pytorch import autograd
from halfstep._tools.measure import is_large_in_most

Expression = Callable[[Any, float], str | None]
"""A function from a value and a small number to an expression; None if none fits the value."""

CALL = "call"  # the slot of the call itself
OPERAND = "operand"
"""The slot of the call itself, if an expression of what it is called on takes its place."""
SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind")
"""Functions that return parts of a tensor as a tuple."""
DIVISIONS = ("div", "true_divide", "divide", "rdiv", "rtruediv", "reciprocal")
NARROW = "narrow"  # the slot that stands for all arguments in float16 and bfloat16
RATIO = "ratio"  # the slot that stands for both arguments of a ratio of new to old probabilities
USUAL_NAMES = ("input", "other", "var")
"""The usual parameter names of the first arguments of PyTorch's functions."""


_MULTIPLES = ("Mul", "Div", "Select", "Slice", "Index", "View", "Unsqueeze", "Squeeze", "Expand")
"""The first letters of the names of nodes of autograd for functions that keep or scale values."""


def maker_of(value: Tensor) -> Any:
    """Return the node of autograd of which the values of a tensor are multiples, or None."""
    node = value.grad_fn
    while node is not None and node.name().startswith(_MULTIPLES):
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return node


def parameter_in(value: Tensor) -> Tensor | None:
    """Return the parameter whose entries, or multiples of them, are the values of a tensor."""
    node = maker_of(value)
    leaf = value if value.grad_fn is None else getattr(node, "variable", None)
    if not (isinstance(leaf, Tensor) and leaf.requires_grad):
        return None
    return leaf if isinstance(leaf, nn.Parameter) or not leaf.dim() else None


def item_slot(item: int) -> str:
    """Return the slot of an item of what a call returns."""
    return f"{CALL} {item}"


def item_of(slot: int | str) -> int | None:
    """Return the item of what a call returns that is a slot, or None if the slot is none."""
    text = str(slot)
    return int(text.removeprefix(f"{CALL} ")) if text.startswith(f"{CALL} ") else None


class Edit(NamedTuple):
    """Edit of a call."""

    slots: tuple[int | str, ...]  # arguments, keywords, NARROW, RATIO or CALL
    expression: Expression
    factor: float = 1.0  # for the small number
    told: str = ""  # the expression to show if a PyTorch module makes the call

    def slots_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, ...]:
        """Return the slots for the given arguments; none if the edit does not fit them."""
        if RATIO in self.slots:
            return (0, 1) if len(args) > 1 and _are_probabilities(*args[:2]) else ()
        if NARROW not in self.slots:
            return self.slots
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        narrow = [slot for slot, value in given if _is_narrow(value)]
        return (*narrow, *self.slots[1:]) if narrow else ()

    def text(self, value: Any) -> str | None:
        """Return the expression for a value; None if it does not fit."""
        dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        return self.expression(value, (1e-3 if dtype is torch.float16 else 1e-6) * self.factor)


# --- expressions ----------------------------------------------------------------------------------

_FAR = "10000.0"
"""A number larger than any score. All formats can hold it, and exp(-10000) is 0 in each."""


def _limited(low: str | None, high: str | None) -> Expression:
    """Clamp values; the limits are numbers or the names that ``_bound`` knows."""

    def expression(value: Any, eps: float) -> str | None:
        below, above = (_bound(each, eps) for each in (low, high))
        if isinstance(value, Tensor):
            if value.is_complex() or value.dtype is torch.bool:
                return None
            if not value.is_floating_point():
                return "{}.clamp_min(1)" if low == "eps" else None
            if above is None:
                below = "1" if low == "eps" and _are_counts(value) else below
                return f"{{}}.clamp_min({below})"
            return f"{{}}.clamp_max({above})" if below is None else f"{{}}.clamp({below}, {above})"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if math.isinf(value):
            return above if value > 0 else below
        return f"max({{}}, {1 if isinstance(value, int) else below})" if low == "eps" else None

    return expression


def _data_in(value: Any) -> Tensor | None:
    """Return data, or what is computed of points, whose gradient is taken as in a PDE, or None."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return None
    leaves = autograd.leaves_of([value]) if value.requires_grad else []
    return None if any(isinstance(leaf, nn.Parameter) for leaf in leaves) else value.detach()


def _left_out(value: Any, eps: float) -> str | None:
    """Divide by inf where data are 0, or few points are near others, which leaves out terms."""
    if (sizes := _data_in(value)) is None:
        return None
    maker = maker_of(value)  # of distances: few terms of a power are near 0 by themselves
    is_distance = maker is not None and maker.name().startswith(("Sqrt", "Linalg", "Norm", "Cdist"))
    if is_distance and sizes.numel() and bool((sizes > 0).all()):
        limit = float(f"{float(sizes.float().median()) / 100:.0e}")  # its 12th power may overflow
        if 0 < int((sizes < limit).sum()) <= sizes.numel() / 4:
            return f'{{0}}.masked_fill({{0}} < {limit:g}, float("inf"))'
    is_some = 0 < int((sizes == 0).sum()) < sizes.numel()
    return '{0}.masked_fill({0} == 0, float("inf"))' if is_some else None


def _far_apart(value: Any, eps: float) -> str | None:
    """Move points that are at the same place far apart, where their distance has a slope."""
    if (points := _data_in(value)) is None or points.dim() < 2 or not value.requires_grad:
        return None
    same = (points == 0).all(-1)
    is_some = 0 < int(same.sum()) < same.numel()
    return "{0}.masked_fill(({0} == 0).all(-1, keepdim=True), 1e4)" if is_some else None


def _are_probabilities(new: Any, old: Any) -> bool:
    """Return whether probabilities are divided by others of their shape, which are data."""
    both = [v for v in (new, old) if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
    is_ratio = len(both) == 2 and new.shape == old.shape and new.requires_grad > old.requires_grad
    return is_ratio and all(bool(((v >= 0) & (v <= 1)).all()) for v in both)


def _beside_zero(value: Any, eps: float) -> str | None:
    """Divide by a small number where a parameter is 0, as it may be at the start."""
    is_parameter = isinstance(value, Tensor) and parameter_in(value) is not None
    if not (is_parameter and bool((value == 0).any())):
        return None
    return f"{{0}}.masked_fill({{0}}.abs() < {eps:g}, {eps:g})"


def _are_counts(value: Any) -> bool:
    """Return whether the values are whole numbers of things, so that a small one would be none."""
    is_known = isinstance(value, Tensor) and not value.requires_grad and value.numel() > 1
    return is_known and bool((value == value.round()).all()) and float(value.amax()) >= 2


def _bound(bound: str | None, eps: float) -> str | None:
    names = {"eps": eps, "edge": 1 - eps, "-edge": eps - 1, "1+eps": 1 + eps}
    return None if bound is None else f"{names[bound]:.10g}" if bound in names else bound


def _exponent(share: float) -> Expression:
    """Clamp an exponent well below the limit of its dtype, since a sum may follow."""

    def expression(value: Any, eps: float) -> str | None:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return None
        return f"{{}}.clamp_max({math.floor(share * math.log(torch.finfo(value.dtype).max))})"

    return expression


def _above_zero(value: Any, eps: float) -> str | None:
    """Make numbers of any sign positive, with a gradient for each."""
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return f"F.softplus({{}}) + {eps:g}" if is_number and bool((value < 0).any()) else None


def _smoothed(value: Any, eps: float) -> str | None:
    """Make numbers of any sign positive with a function that has a slope everywhere."""
    if not (isinstance(value, Tensor) and value.requires_grad):
        return None
    return f"F.softplus({{}}) + {eps:g}" if value.dtype in HALVES else "F.softplus({})"


def _normalized(dim: int, value: Any, eps: float) -> str | None:
    """Normalise an output; weights would become other weights."""
    is_made = isinstance(value, Tensor) and value.requires_grad and parameter_in(value) is None
    return f"F.normalize({{}}, dim={dim})" if is_made else None


def _of_weights(text: str) -> Expression:
    """Edit what is computed of weights; data would become other data."""
    return lambda value, eps: text if isinstance(value, Tensor) and value.requires_grad else None


def _above_pole(value: Any, eps: float) -> str | None:
    """Clamp what log1p reads above -1, or far from there if it goes beyond 1, as prices do."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return None
    return f"{{}}.clamp_min({0 if bool((value > 1).any()) else eps - 1:.10g})"


def _raised_if_exact(value: Any, eps: float) -> str | None:
    """Add to numbers, unless they are differences that rounding makes less than 0 by more."""
    node = maker_of(value) if isinstance(value, Tensor) else None
    if node is not None and node.name().startswith(("Sub", "Rsub")):
        size = float(value.detach().abs().nan_to_num().amax())
        if bool((value < 0).any()) or size * torch.finfo(value.dtype).eps > eps:
            return None
    return _raised(value, eps)


def _raised(value: Any, eps: float) -> str | None:
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        sizes = value.detach().abs()
        sizes = sizes[(sizes > 0) & sizes.isfinite()]
        if sizes.numel() > 1 and float(sizes.median()) < eps:  # it would take the place of most
            eps *= 1e-10 if value.dtype is torch.float32 else 1e-2
    is_number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return f"{{}} + {eps:g}" if is_number else None


def _lower_limit(value: Any, eps: float) -> str | None:
    """Clamp a sum of masks to the range of its dtype."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return None
    return f"{{}}.clamp_min(torch.finfo({value.dtype}).min)"


def _zero_for_nan(value: Any, eps: float) -> str | None:
    if not isinstance(value, Tensor) or bool(value.isinf().any()):
        return None  # the mean of an empty tensor is NaN, never inf
    return "{}.nan_to_num()"


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALVES


def _cast_to(name: str) -> Expression:
    """Cast arguments to float32, and the result to ``name`` if that is not empty."""

    def expression(value: Any, eps: float) -> str | None:
        if _is_narrow(value):
            return "{}.float()"
        return f"{{}}.{name}()" if name and isinstance(value, Tensor) else None

    return expression


def _is(text: str) -> Expression:
    return lambda value, eps: text


def _distinct(value: Any, eps: float) -> str | None:
    """Add different numbers to the diagonal of a matrix to separate equal eigenvalues."""
    spread = f"torch.linspace({eps:g}, {1e3 * eps:g}, {{n}}{{where}})"
    return _plus_diagonal(value, f"torch.eye({{m}}, {{n}}{{where}}) * {spread}")


def _plus_diagonal(value: Any, diagonal: str) -> str | None:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return None
    where = "" if value.device.type == "cpu" else f', device="{value.device}"'
    return "{} + " + diagonal.format(m=value.shape[-2], n=value.shape[-1], where=where)


_SOME_KEY = "{0} & ~{0}.all(-1, keepdim=True)"


def _some_key(value: Any, eps: float) -> str | None:
    """Unmask all keys of a row that is fully masked (True)."""
    if isinstance(value, Tensor) and value.dtype is torch.bool:
        return _SOME_KEY
    return _limited(f"-{_FAR}", None)(value, eps)


def _standardised(value: Any, eps: float) -> str | None:
    """Standardise data with large values, by column if they have some."""
    is_number = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
    if not is_number or value.requires_grad or not is_large_in_most(value):
        return None
    at = "0" if value.dim() == 2 else ""
    return f"({{0}} - {{0}}.mean({at})) / ({{0}}.std({at}) + {eps:g})"


# --- the table ------------------------------------------------------------------------------------

_LEAST = (Edit((0,), _limited("eps", None)), Edit((0,), _limited("eps", None), 1e3))
_OF_COUNTS = Edit((OPERAND,), lambda v, _: "torch.log1p({})" if _are_counts(v) else None)
_LARGER = (Edit((0,), _raised), Edit((0,), _raised, 1e2))
_DIVISORS = [
    Edit((1,), expression, factor)
    for factor in (1, 1e3)
    for expression in (_limited("eps", None), _raised)
]
OF_POINTS = {name: (Edit((int(name in DIVISIONS[:3]),), _left_out),) for name in DIVISIONS}
OF_POINTS |= dict.fromkeys(("norm", "vector_norm"), (Edit((0,), _far_apart),))
"""Edits of calls on the way from data, or points whose gradient is taken, to a result."""
_SCORES = tuple(Edit((0,), _limited(f"-{_FAR}", high)) for high in (None, _FAR))
_EPS = tuple(Edit(("eps",), lambda _, eps: f"{eps:g}", factor) for factor in (1, 1e2))
_FINITE = tuple(
    Edit(slots, _limited(f"-{size}", size))
    for size in (_FAR, "10.0")
    for slots in ((0,), (1,), (0, 1))
)
_EMPTY = (Edit((CALL,), _zero_for_nan),)
_OF_SUM = (Edit(("reduction",), _is('"sum"')),)  # of classes whose weights may all be 0
_REGULAR = tuple(
    Edit((0,), lambda v, eps: _plus_diagonal(v, f"{eps:g} * torch.eye({{n}}{{where}})"), factor)
    for factor in (1, 1e3, 1e5)
)
_DISTINCT = tuple(Edit((0,), _distinct, factor) for factor in (1, 1e2))
_EXPONENT = (
    *(Edit((0,), _exponent(share)) for share in (0.9, 0.25)),
    *(Edit((0,), _limited(None, size)) for size in ("10.0", "2.0")),
)
_INSIDE = (Edit((0,), _limited("-edge", "edge")), Edit((0,), _limited("-edge", "edge"), 1e2))

_TABLE: dict[str, tuple[Edit, ...]] = {
    "log": (_OF_COUNTS, *_LEAST),
    "log2 log10 lgamma digamma mvlgamma entr": _LEAST,
    "polygamma xlogy xlog1py": (Edit((1,), _limited("eps", None)), *_LEAST),
    "log1p": (*(Edit((0,), _above_pole, factor) for factor in (1, 1e2)), Edit((0,), _smoothed)),
    "div true_divide divide": (
        *(Edit((RATIO,), lambda _, eps: f"{{}} + {eps:g}", 0.1), Edit((1,), _left_out)),
        Edit((1,), _beside_zero, 1e3),
        *(*_DIVISORS, *_FINITE),
    ),
    "rdiv rtruediv reciprocal": (Edit((0,), _left_out), *_LEAST, *_LARGER),
    "sqrt rsqrt": (*(Edit((0,), _raised_if_exact, factor) for factor in (1, 1e2)), *_LEAST),
    "pow float_power": (*_LEAST, *_LARGER, *_FINITE),
    "rpow exp expm1 exp2": _EXPONENT,
    "cosh sinh": (Edit((0,), _limited("-80", "80")), Edit((0,), _limited("-9", "9"))),
    "matrix_exp": _FINITE,
    "acos asin atanh arccos arcsin arctanh erfinv": _INSIDE,
    "acosh arccosh": (Edit((0,), _limited("1+eps", None)), Edit((0,), _limited("1+eps", None), 10)),
    "logit": _EPS,
    "softmax log_softmax softmin safe_softmax logsumexp logcumsumexp": _SCORES,
    "logaddexp logaddexp2": (*_SCORES, Edit((0, 1), _limited(f"-{_FAR}", None))),
    "scaled_dot_product_attention": (Edit(("attn_mask",), _some_key), *_FINITE),
    "multi_head_attention_forward": (
        Edit(("key_padding_mask",), _some_key, told=_SOME_KEY),
        Edit(("attn_mask",), _some_key, told=_SOME_KEY),
    ),
    "masked_fill index_fill": (Edit((2,), _limited(f"-{_FAR}", _FAR)),),
    "where": (Edit((1,), _limited(f"-{_FAR}", _FAR)), Edit((2,), _limited(f"-{_FAR}", _FAR))),
    "full full_like new_full fill": (Edit((1,), _limited(f"-{_FAR}", _FAR)),),
    "gumbel_softmax": (Edit(("tau",), _limited("eps", None), 1e3), *_SCORES),
    "cross_entropy nll_loss": (*_EMPTY, *_OF_SUM, *_SCORES[:1], *_FINITE),
    "kl_div": (*_SCORES, Edit((1,), _limited("eps", None))),
    "binary_cross_entropy": (Edit((0,), _limited("eps", "edge")), *_EMPTY),
    "poisson_nll_loss": (*_EXPONENT, *_LEAST),
    "gaussian_nll_loss": (*_EPS, Edit((2,), _limited("eps", None))),
    "ctc_loss": (Edit(("zero_infinity",), _is("True")),),
    "normalize cosine_similarity pairwise_distance triplet_margin_loss cosine_embedding_loss "
    "layer_norm batch_norm group_norm instance_norm rms_norm": (*_EPS, *_LARGER, *_FINITE),
    "std var std_mean var_mean": (Edit(("correction",), _is("0")), *_LARGER, *_EMPTY),
    "mean nanmean mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits": (
        *_EMPTY,
        *_FINITE,
    ),
    "atan2 arctan2": (Edit((1,), _raised), *_LARGER),
    "hypot norm vector_norm cdist dist angle": _LARGER,
    "matrix_norm nuclear_norm eigh eig svd svdvals": _DISTINCT,
    "logdet slogdet det inv inverse pinv cholesky solve lu_factor qr": _REGULAR,
    "einsum": tuple(Edit(slots, _limited(f"-{_FAR}", _FAR)) for slots in ((1,), (2,), (1, 2))),
    "add": (Edit((CALL,), _lower_limit), *_FINITE),
}
_ROWS = {name: edits for names, edits in _TABLE.items() for name in names.split()}
_SINGULAR = ("log", "sqrt", "rsqrt", "pow", "div", "true_divide", "reciprocal", "rdiv", "rtruediv")
IN_FLOAT32 = (
    Edit((NARROW,), _cast_to("")),
    Edit((NARROW, CALL), _cast_to("half")),
    Edit((NARROW, CALL), _cast_to("bfloat16")),
)
"""Casts of lower-precision arguments, for calls that autocast does not control."""
WITHOUT = Edit((OPERAND,), _is("{}"))
"""The edit that leaves out a call, such as a cast, and keeps what it is called on."""

STANDARDISED = Edit((0,), _standardised)
"""The edit that standardises the data that a call reads, such as a cast."""


def cast_after(name: str) -> Edit:
    """Return the cast of the result of a call to a dtype, as it would be written."""
    short = {"float16": "half", "bfloat16": "bfloat16"}.get(name)
    return Edit((CALL,), _is(f"{{}}.{short}()" if short else f"{{}}.to(torch.{name})"))


def _normed(value: Any, eps: float) -> str | None:
    is_matrix = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
    return "F.layer_norm({0}, {0}.shape[-1:])" if is_matrix else None


_COSINE = [Edit((at,), partial(_normalized, d)) for at, d in ((0, -1), (1, -2))]
OF_OUTPUTS = dict.fromkeys(("matmul", "mm"), tuple(_COSINE))
"""The edits of a product of two outputs, as of a contrastive loss."""
NORM = Edit((0,), _normed)  # a norm of what a call reads, if that grows from call to call


def shifts_of(sums: Iterable[tuple[str, str]]) -> Iterator[tuple[Edit, Edit]]:
    """Yield edits that take the largest exponent from all, and others that take more from each.

    ``sums`` are functions that sum over segments, and the expressions of their indices.
    """
    for function, index in sums:
        yield _shifts_by(partial(_largest_of_segment, function, index))
    yield _shifts_by(lambda value: "{0}.detach().amax(-1, keepdim=True)" if value.dim() > 1 else "")
    yield _shifts_by(lambda value: "{0}.detach().max()")


def _shifts_by(shift: Callable[[Tensor], str]) -> tuple[Edit, Edit]:
    def by(rest: str) -> Edit:
        def expression(value: Any, eps: float) -> str | None:
            text = shift(value) if isinstance(value, Tensor) and value.is_floating_point() else ""
            return f"{{0}} - {text}{rest.format(text)}" if text else None

        return Edit((0,), expression)

    return by(""), by(" - 2 - torch.cos({0})")


def _largest_of_segment(function: str, index: str, value: Tensor) -> str:
    is_of_rows = value.dim() == 1 or function == "index_add"
    places = f"{index}[:, None].expand_as({{0}})" if is_of_rows and value.dim() == 2 else index
    made = f"{{0}}.new_full((int({index}.max()) + 1, *{{0}}.shape[1:]), -torch.inf)"
    made += f'.scatter_reduce(0, {places}, {{0}}.detach(), "amax")'
    return f"{made}[{index}]" if is_of_rows else f"{made}.gather(0, {index})"


_LAYERS = ("linear", "addmm", "baddbmm", "matmul", "mm", "bmm", "conv1d", "conv2d", "conv3d")
"""Functions whose results have any sign."""
_OF_EXPONENTS = (
    Edit((CALL,), _of_weights("{}.clamp(-30, 10)")),
    Edit((CALL,), _of_weights("{}.clamp(-30, 20)")),
    Edit((CALL,), _of_weights("2 * torch.tanh({} / 2)")),
)
RECTIFIERS = ("relu", "clamp", "clamp_min")  # functions whose results are often exactly 0
_OF_RECTIFIED = (Edit((OPERAND,), _smoothed, told="torch.nn.Softplus()"),)


def edits_of_source(function: str, maker: str) -> Sequence[Edit]:
    """Return the edits of the result of a call that a function and others read."""
    if is_exponential(function):
        return _OF_EXPONENTS
    name = row_name(function)
    is_positive = name in ("log", "log2", "log10", "sqrt", "rsqrt", "pow", "float_power")
    if row_name(maker) in RECTIFIERS:
        return _OF_RECTIFIED if is_positive or name in DIVISIONS else ()
    return (Edit((CALL,), _above_zero, 1e4),) if is_positive and is_layer(maker) else ()


def is_layer(function: str) -> bool:
    return row_name(function) in _LAYERS


def is_exponential(function: str) -> bool:
    return row_name(function) in ("exp", "exp2", "expm1")


def is_singular(function: str) -> bool:
    """Return whether a function has values at which it, or its slope, is not finite."""
    return row_name(function) in _SINGULAR


def is_of_covariance(function: str) -> bool:
    """Return whether a function is finite for matrices that are positive definite."""
    return _ROWS.get(row_name(function)) is _REGULAR


def row_name(function: str) -> str:
    """Return the table key of a function: ``div`` for ``div_``, ``inv`` for ``linalg_inv_ex``."""
    name = function.strip("_").removesuffix("_ex")
    for prefix in ("linalg_", "special_"):
        name = name.removeprefix(prefix)
    return name


def writes_to_first(function: str) -> bool:
    """Return whether a function modifies its first argument, as ``fill_diagonal_`` does."""
    return function.endswith("_") and not function.endswith("__")


def in_place(text: str) -> str | None:
    """Return the in-place form of an expression, or None if there is none.

    A function that modifies its first argument would only modify the copy ``x.clamp(...)``. The
    replay would then be finite because the write, and with it the fault, is lost.
    """
    changed, count = re.subn(r"^\{\}\.(clamp\w*?)_?\(", r"{}.\1_(", text)
    return changed if count else None


def edits_of(function: str) -> Iterator[Edit]:
    """Yield the edits of a function, the least invasive first."""
    yield from _ROWS.get(row_name(function), (*_FINITE, *_LARGER))


def edits_of_result(function: str) -> Iterator[Edit]:
    """Yield the edits of an argument of a function, as those of the call that returns it."""
    edits = [edit for edit in edits_of(function) if isinstance(edit.slots[0], int)]
    for edit in edits:
        if edit.slots == edits[0].slots:
            yield edit._replace(slots=(CALL,))


def within(low: float, high: float) -> Edit:
    """Return the clamp of the first argument of a call."""
    return Edit((0,), _limited(f"{low:g}", f"{high:g}"))
