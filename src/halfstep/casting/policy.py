"""Which dtype each op runs in, as data.

A :class:`Policy` is an ordered list of :class:`Rule`; later rules win. Nothing here knows tensors
or the dispatcher: a policy can be built, compared and printed without running anything.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

Action = Literal["lower", "fp32", "fp32-dtype", "promote", "refuse", "leave"]
LOWER_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32)  # float32 lowers nothing
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to one op under autocast.

    Args:
        op: the name of an ATen op. ``"softmax"`` means every overload that takes and returns
            values (no ``out=``, nothing in place, no overload whose caller must name a dtype);
            ``"softmax.int"`` or ``"exp.default"`` means that one overload.
        action: what to do with the floating-point inputs on the autocast device. Integers,
            complex numbers and float64 are never touched, except that ``"promote"`` follows a
            float64 input.

            * ``"lower"``: cast them to the lower precision (float16 or bfloat16).
            * ``"fp32"``: cast them to float32.
            * ``"fp32-dtype"``: ask the op for a float32 result through its ``dtype`` argument,
              unless the caller asked for another; the inputs stay as they are.
            * ``"promote"``: cast them to the widest dtype among them.
            * ``"refuse"``: raise ``RuntimeError`` with ``message``.
            * ``"leave"``: run the op as if it had no rule.
        device: a device type (``"cpu"``, ``"cuda"``, ...), or None for every device.
        dtype: the lower precision for which the rule holds, or None for every one.
        message: for ``"refuse"``: why, and what to use instead.

    Example:
        >>> Rule("softmax", "lower", dtype=torch.bfloat16)
        Rule('softmax', 'lower', dtype=torch.bfloat16)
    """

    op: str
    action: Action
    device: str | None = None
    dtype: torch.dtype | None = None
    message: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or not re.fullmatch(r"\w+(\.\w+)?", self.op):
            raise ValueError(
                f"a rule names an ATen op such as 'softmax' or 'softmax.int', got {self.op!r}"
            )
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
            raise ValueError(
                f"rule for {self.op!r}: unknown action {self.action!r}; "
                f"the actions are {', '.join(map(repr, ACTIONS))}"
            )
        if (self.action == "refuse") != bool(self.message):
            raise ValueError(
                f"rule for {self.op!r}: a message goes with the action 'refuse', and only with it"
            )

    def holds(self, op: str, device: str, dtype: torch.dtype) -> bool:
        """Say whether the rule decides ``op``, an overload such as ``"exp.default"``."""
        return (
            (self.op in (op, op.partition(".")[0]))
            and self.device in (None, device)
            and self.dtype in (None, dtype)
        )

    def __repr__(self) -> str:
        extra = "".join(
            f", {name}={value!r}"
            for name in ("device", "dtype", "message")
            if (value := getattr(self, name))
        )
        return f"Rule({self.op!r}, {self.action!r}{extra})"


@dataclass(frozen=True, init=False)
class Policy:
    """An ordered list of rules; the last one that holds for an op decides.

    An op for which no rule holds runs on its inputs as they are. Two policies with the same rules
    are equal, whatever their names.

    Args:
        rules: :class:`Rule` values, in order.
        name: for messages and ``repr`` only.

    Example:
        Start from a preset and change one op:

        >>> from halfstep.casting import preset
        >>> lean = Policy([*preset("standard").rules, Rule("layer_norm", "leave")], name="lean")
        >>> lean.action("layer_norm.default", "cpu", torch.bfloat16)
        'leave'
    """

    rules: tuple[Rule, ...]
    name: str

    def __init__(self, rules: Iterable[Rule], name: str = "custom") -> None:
        if isinstance(rules, Policy):
            raise TypeError(
                f"a policy is made of rules: pass {rules!r}.rules, and yours behind them"
            )
        rules = tuple(rules)
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"a policy is made of Rule values, got {rule!r}")
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "name", name)

    def rule(self, op: str, device: str, dtype: torch.dtype) -> Rule | None:
        """Return the rule that decides ``op`` (an overload, ``"exp.default"``), or None."""
        return next((rule for rule in self._by_op(op) if rule.holds(op, device, dtype)), None)

    def action(self, op: str, device: str, dtype: torch.dtype) -> Action:
        """Return what happens to ``op`` on ``device`` with the lower precision ``dtype``.

        Example:
            >>> from halfstep.casting import preset
            >>> preset("standard").action("linear.default", "cpu", torch.bfloat16)
            'lower'
        """
        rule = self.rule(op, device, dtype)
        return "leave" if rule is None else rule.action

    def _by_op(self, op: str) -> list[Rule]:
        """Candidates for ``op``, the last rule first."""
        named = self._index.get(op, []) + self._index.get(op.partition(".")[0], [])
        return [rule for _, rule in sorted(named, key=lambda item: -item[0])]

    @cached_property
    def _index(self) -> dict[str, list[tuple[int, Rule]]]:
        index: dict[str, list[tuple[int, Rule]]] = {}
        for position, rule in enumerate(self.rules):
            index.setdefault(rule.op, []).append((position, rule))
        return index

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is the same in every process for the same rules, whatever the name."""
        return hashlib.sha256(repr(self.rules).encode()).hexdigest()[:16]

    # The hash of some 200 rules costs 20 us; entering a context asks for it each time.
    @cached_property
    def _hash(self) -> int:
        return hash(self.rules)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        return self is other or self.rules == other.rules

    def __reduce__(self) -> tuple[object, ...]:
        # What is cached stays here: hashes of strings differ from process to process.
        return Policy, (self.rules, self.name)

    def __repr__(self) -> str:
        return f"<Policy {self.name!r}: {len(self.rules)} rules>"
