"""Kinds of PyTorch's functions, by their names: which of them a capture keeps, and how."""

from __future__ import annotations

from enum import Enum, auto
from functools import cache
from typing import Any

_LEFT_OUT = ("_foreach_", "_fused_", "_amp_", "_record_function_")
"""Beginnings of the names of functions of optimizers, scalers and profilers."""
_READS = {"item", "tolist", "numpy", "__float__", "__bool__", "__array__"}
"""Names of functions by which a loop gets values out of a tensor."""
_VIEWS = {".T", ".mT", ".H", ".mH", ".real", ".imag", ".data"}
"""Properties that are tensors."""
_NO_TENSORS = {
    *("size", "dim", "numel", "nelement", "stride", "ndimension", "element_size", "is_contiguous"),
    *("is_floating_point", "is_complex", "data_ptr", "storage_offset", "__len__", "__repr__"),
    *("__format__", "__set__", "get_device", "untyped_storage", "_set_grad_enabled"),
}
"""Names of functions that return no tensors; to know them costs less than to look."""
_WRITES = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"),
    *("__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__", "register_hook"),
    *("retain_grad", ".data"),
}
"""Names of functions that change a tensor, besides those that end in an underscore."""
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_", "bernoulli_"),
    *("exponential_", "log_normal_", "cauchy_", "geometric_", "binomial", "rrelu", "rrelu_"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("gumbel_softmax", "scaled_dot_product_attention", "multi_head_attention_forward"),
    *("native_dropout", "dropout_", "_standard_gamma", "_sample_dirichlet"),
}
"""Names of functions that draw random numbers."""


def name_of(function: Any) -> str:
    """Return the name of a function; of the getter of a property, that of the property."""
    name: str = getattr(function, "__name__", "")
    return f".{function.__self__.__name__}" if name == "__get__" else name


class Kind(Enum):
    """What a function is for a capture."""

    LEFT_OUT = auto()
    READS = auto()
    WRITES = auto()
    DRAWS = auto()
    OTHER = auto()


@cache
def kind_of(name: str) -> Kind:
    """Return the kind of a function."""
    is_property = name.startswith(".")
    if name in _NO_TENSORS or name.startswith(_LEFT_OUT) or (is_property and name not in _VIEWS):
        return Kind.LEFT_OUT
    if name in _READS:
        return Kind.READS
    if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
        return Kind.WRITES
    return Kind.DRAWS if name in _DRAWS else Kind.OTHER
