"""A policy on one device type: what runs each op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch

from halfstep._autocast import sums
from halfstep._autocast.casts import carry_out, lower_unlike_pytorch, lower_with_pytorch, pytorchs
from halfstep._autocast.policy import Policy, fingerprint, meant_by, preset, rules_within
from halfstep._autocast.rule import LOWER_PRECISIONS, Action, Rule
from halfstep._pytorch import dispatch
from halfstep._pytorch.dispatch import Kernel

# The kernel of each op that a policy treats differently from PyTorch's autocast.
Plan = dict[str, Kernel]


@dataclass(eq=False)
class PolicyOnDevice:
    """A policy on one device type, with a plan for each lower precision, made on demand.

    :func:`halfstep._autocast.kernels.prepare` documents the attributes.
    """

    policy: Policy
    device: str
    module: str
    number: int
    only_observed: bool

    def __post_init__(self) -> None:
        self.is_pytorchs = self.policy == preset("torch")
        self.plan_for = cache(self._plan)  # not a method: a cache hit makes no Python call
        self.observed_kernel = cache(self._observed_kernel)
        self._ruled = meant_by(self.policy.rules)

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is equal in every process for the same rules in effect."""
        within = rules_within(self.policy, self.module)
        return fingerprint(self.policy) + ("@" + "; ".join(map(str, within)) if within else "")

    def lower_precision(self) -> torch.dtype:
        return torch.get_autocast_dtype(self.device)

    def rule(self, op: str) -> Rule | None:
        """Return the rule that decides an overload in this thread, None if none does."""
        return self._rule(op, self.lower_precision())

    def ops(self) -> set[str]:
        """Return the overloads that PyTorch does not run alike."""
        return {op for plan in self._plans() for op in plan if plan[op] not in pytorchs}

    def products(self) -> set[str]:
        """Return the other overloads of plans: PyTorch's kernels run them alike, as a rule."""
        return {op for plan in self._plans() for op in plan} - self.ops()

    def table(self) -> frozenset[str]:
        """Return the overloads that have a rule in the policy or an autocast kernel in PyTorch."""
        return dispatch.overloads_with_autocast_kernel(self.device) | self._ruled

    def _rule(self, op: str, dtype: torch.dtype) -> Rule | None:
        return self.policy.rule(op, self.device, dtype, self.module)

    def _plans(self) -> list[Plan]:
        return list(map(self.plan_for, LOWER_PRECISIONS))

    def _plan(self, dtype: torch.dtype) -> Plan:
        kernels = {op: self._kernel(op, dtype) for op in sorted(self.table())}
        return {op: kernel for op, kernel in kernels.items() if kernel is not None}

    def _kernel(self, op: str, dtype: torch.dtype) -> Kernel | None:
        """Return what runs an op by its rule, None if PyTorch's own kernel does."""
        rule = self._rule(op, dtype) or _leaving(op)
        theirs = _action_of_pytorch(op, self.device, dtype)
        is_left = (rule.action, theirs) == ("fp32-sums", "leave")
        if _is_native(rule, theirs) or (is_left and sums.adds_nothing_rounded(op, self.device)):
            return None
        is_native = rule.action == theirs == "lower"
        if is_native and lower_unlike_pytorch(rule, op, self.device, dtype) is None:
            return lower_with_pytorch(rule, op, self.device, dtype)
        return carry_out(rule, op, self.device, dtype)

    def _observed_kernel(self, op: str, dtype: torch.dtype) -> Kernel:
        """Return halfstep's kernel: one of PyTorch's that does the same could not be observed."""
        return carry_out(self._rule(op, dtype) or _leaving(op), op, self.device, dtype)


@cache
def _action_of_pytorch(op: str, device: str, dtype: torch.dtype) -> Action:
    if op not in dispatch.overloads_with_autocast_kernel(device):
        return "leave"
    return preset("torch").action(op, device, dtype)


@cache
def _leaving(op: str) -> Rule:
    return Rule(op, "leave")


def _is_native(rule: Rule, theirs: Action) -> bool:
    """Return whether PyTorch's own kernel does what a rule requires."""
    match theirs:
        case "lower":  # PyTorch's cache may return a stale cast of a weight
            return False
        case "promote":  # PyTorch's promotion rejects the other half precision
            return rule in preset("torch").rules
    return rule.action == theirs
