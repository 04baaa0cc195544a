"""Rules: the action for some ops under autocast, independent of tensor values."""

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Literal, get_args

import torch

from halfstep._common.module_names import around
from halfstep._common.text import did_you_mean

Action = Literal[
    "lower", "fp32", "fp32-out", "fp32-dtype", "fp32-sums", "promote", "destination", "refuse",
    "leave",
]  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)
LOWER_PRECISIONS = (*HALVES, torch.float32)  # float32 lowers nothing
ACTIONS: tuple[Action, ...] = get_args(Action)
DTYPE_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SHORT = {dtype: name for name, dtype in DTYPE_NAMES.items()}

_AS_ACTIONS = {
    "half": torch.float16, "float": torch.float32, **DTYPE_NAMES,
    **{str(dtype).removeprefix("torch."): dtype for dtype in LOWER_PRECISIONS},
}  # fmt: skip
"""Names of dtypes that are taken for actions."""

# Common prefixes of op names, longest first.
_PREFIXES = {
    "torch.nn.functional.": "",
    "nn.functional.": "",
    "torch.ops.aten.": "",
    "torch.linalg.": "linalg_",
    "torch.special.": "special_",
    "torch.sparse.": "_sparse_",
    "torch.Tensor.": "",
    "torch.fft.": "fft_",
    "Tensor.": "",
    "aten::": "",
    "aten.": "",
    "torch.": "",
    "F.": "",
}
_ALIASES = {
    "affine_grid": "affine_grid_generator",
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler*",
    "grouped_mm": "_grouped_mm",
    "interpolate": "*upsample_*",
    "multi_dot": "linalg_multi_dot",
    "sdpa": "scaled_dot_product_attention",
}
_OP = re.compile(r"(\w+::)?[\w*?]+(\.[\w*?]+)?")
_MODULE = re.compile(r"[\w*?-]+(\.[\w*?-]+)*")


@dataclass(frozen=True)
class Rule:
    """The action for one op, or for several, under autocast.

    Args:
        op: the name of an ATen op, of a custom op (``"mylib::attention"``), or a glob over the ops
            named by any preset (``"conv*"``). ``"softmax"`` means every overload that takes and
            returns values (no ``out=``, no overload with a required dtype); ``"softmax.int"`` or
            ``"exp.default"`` means that one overload. Names such as ``"F.layer_norm"``,
            ``"torch.linalg.qr"`` and ``"aten::mm"`` are converted to those of ATen. ``""``, with a
            module, means the module as a whole: ``"fp32"`` makes it an island (see
            :func:`halfstep.keep`), ``"leave"`` overrules an earlier such rule.
        action: how to cast the floating-point inputs on the autocast device. Integers and complex
            numbers are never cast. If an input is float64, ``"lower"``, ``"fp32"``,
            ``"fp32-out"`` and ``"promote"`` run the op in float64.

            * ``"lower"``: cast them to the lower precision (float16 or bfloat16).
            * ``"fp32"``: cast them to float32.
            * ``"fp32-out"``: for a matrix product (``linear``, ``matmul``, ``mm``, ``bmm``,
              ``addmm``, ``baddbmm``): cast its factors to the lower precision, add their products
              in float32, and return that sum in float32. What is added to it, such as a bias, is
              cast to float32. The backward pass is that of ``"lower"``.
            * ``"fp32-dtype"``: request a float32 result through the op's ``dtype`` argument, unless
              the caller passes one; the inputs are not cast.
            * ``"fp32-sums"``: for an op that adds many terms: add in float32, forward and backward,
              and round the sum once, to the widest dtype among them.
            * ``"promote"``: cast them to the widest dtype among them.
            * ``"destination"``: for an in-place op (``"index_put_"``): cast the other inputs to the
              dtype of the tensor that is written to, float64 included.
            * ``"refuse"``: raise ``RuntimeError`` with ``message``.
            * ``"leave"``: run the op as if it had no rule.
        device: a device type (``"cpu"``, ``"cuda"``, ...), or None for every device.
        dtype: the lower precision for which the rule applies, or None for all.
        message: for ``"refuse"``: the reason, and what to use instead.
        module: a glob over the names of ``model.named_modules()`` (``"blocks.*.attn"``; a ``*``
            also matches dots): the rule applies in these modules and in their submodules. None for
            everywhere.

    Raises:
        ValueError: An argument is invalid.

    Example:
        >>> Rule("F.softmax", "lower", dtype=torch.bfloat16)
        Rule('softmax', 'lower', dtype=torch.bfloat16)
    """

    op: str
    action: Action
    device: str | None = None
    dtype: torch.dtype | None = None
    message: str = ""
    module: str | None = None

    def __post_init__(self) -> None:
        if self.module is not None and not _MODULE.fullmatch(str(self.module)):
            raise ValueError(
                f"rule for {self.op!r}: a module is a name such as 'blocks.0.attn' or a glob such "
                f"as '*.norm', got {self.module!r}"
            )
        if self.is_for_whole_module and self.action not in ("fp32", "leave"):
            raise ValueError(
                f"rule for the module {self.module!r}: as a whole it can be an island, 'fp32', or "
                f"'leave' an earlier rule, not {self.action!r}; name ops to give them other actions"
            )
        name = canonical(self.op) if isinstance(self.op, str) else ""
        if not _OP.fullmatch(name) and not self.is_for_whole_module:
            raise ValueError(
                f"a rule names an op such as 'softmax', 'softmax.int', 'F.layer_norm', 'conv*' or "
                f"'mylib::myop', got {self.op!r}"
            )
        object.__setattr__(self, "op", name)
        if self.device is not None and not re.fullmatch(r"[a-z]\w*", str(self.device)):
            raise ValueError(
                f"rule for {self.op!r}: a device type is 'cpu', 'cuda', ..., got {self.device!r}"
            )
        if self.dtype not in (None, *LOWER_PRECISIONS):
            raise ValueError(
                f"rule for {self.op!r}: the lower precision is torch.float16 or torch.bfloat16, "
                f"got dtype={self.dtype!r}"
            )
        if self.action not in ACTIONS:
            raise ValueError(f"rule for {self.op!r}: {unknown_action(self.action)}")
        if (self.action == "refuse") != bool(self.message):
            raise ValueError(
                f"rule for {self.op!r}: a message goes with the action 'refuse', and only with it"
            )

    @property
    def is_for_whole_module(self) -> bool:
        """Whether the rule concerns whole modules, not ops in them."""
        return self.op == "" and self.module is not None

    @cached_property
    def is_glob(self) -> bool:
        """Whether the op is a glob."""
        return "*" in self.op or "?" in self.op

    def names(self, op: str) -> bool:
        """Return whether the rule names ``op``, an overload such as ``"exp.default"``."""
        of_any_overload = op.rpartition(".")[0]
        casts_in_place, casts = self.action == "destination", self.action not in ("leave", "refuse")
        if casts and is_in_place(of_any_overload) != casts_in_place:
            return False  # the cast would write to a copy of the destination
        if self.is_glob:
            return fnmatchcase(op if "." in self.op else of_any_overload, self.op)
        return self.op in (op, of_any_overload)

    def is_about(self, module: str) -> bool:
        """Return whether the rule names this module itself."""
        return self.module is not None and fnmatchcase(module, self.module)

    @property
    def limits_and_action(self) -> str:
        """The part after the op in the text form: ``"@blocks.*[cuda,fp16]:fp32"``."""
        dtype = None if self.dtype is None else _SHORT[self.dtype]
        limits = ",".join(limit for limit in (self.device, dtype) if limit)
        module = f"@{self.module}" if self.module else ""
        message = f" {json.dumps(self.message, ensure_ascii=False)}" if self.message else ""
        return f"{module}{f'[{limits}]' if limits else ''}:{self.action}{message}"

    def __str__(self) -> str:
        """Return the text form, as in :meth:`halfstep.Policy.parse`."""
        return self.op + self.limits_and_action

    def __repr__(self) -> str:
        extra = "".join(
            f", {name}={value!r}"
            for name in ("device", "dtype", "message", "module")
            if (value := getattr(self, name))
        )
        return f"Rule({self.op!r}, {self.action!r}{extra})"


def holds_where(rule: Rule, device: str, dtype: torch.dtype) -> bool:
    """Return whether the conditions of a rule are met."""
    return rule.device in (None, device) and rule.dtype in (None, dtype)


def holds_within(rule: Rule, module: str) -> bool:
    """Return whether a rule names a module, or one that contains it."""
    return rule.module is None or any(map(rule.is_about, around(module)))


def unknown_action(action: object) -> str:
    """Return what to say of an action that does not exist."""
    dtype = _AS_ACTIONS.get(str(action).removeprefix("torch."))
    if dtype is torch.float32:
        return f"{action} is not an action; write fp32"
    if dtype is not None:
        short = _SHORT[dtype]
        return (
            f"{action} is not an action; write lower, which casts to the dtype of the autocast: "
            f"{short} in autocast(device, {dtype}). [{short}] limits a rule to such contexts"
        )
    near = did_you_mean(str(action), ACTIONS)
    return f"unknown action {action!r}, not one of {', '.join(ACTIONS)}{near}"


@lru_cache(maxsize=10_000)
def canonical(name: str) -> str:
    """Return the ATen name of an op, without checking that it exists."""
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            name = instead + name.removeprefix(prefix)
            if prefix.endswith(("functional.", "F.")):  # not those of Tensor
                name = {"fold": "col2im", "unfold": "im2col"}.get(name, name)
            break
    return _ALIASES.get(name, name)


def is_in_place(op: str) -> bool:
    return op.endswith("_") and not op.endswith("__")
