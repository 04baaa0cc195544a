"""What a policy does on one device type, op by op."""

from functools import cached_property

import torch

from halfstep._autocast import op_names
from halfstep._autocast.actions import carry_out, lower_with_pytorch
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.rule import LOWER_PRECISIONS, PHASES, Action, Phase, Rule
from halfstep._pytorch import dispatch
from halfstep._pytorch.dispatch import Kernel

# What a policy does to each op, where PyTorch's autocast does something else.
Plan = dict[str, Kernel]


class PolicyOnDevice:
    """What a policy does on one device type: a plan for each lower precision, made when asked for.

    Args:
        policy: the policy.
        device: the device type.
        native: whether PyTorch's own kernels carry out the rules that they agree with.
        number: what :func:`prepared` finds it by.
        module: the module in which it is active: some rules may hold there only. Empty outside of
            modules that have rules.
    """

    def __init__(
        self, policy: Policy, device: str, *, native: bool, number: int, module: str
    ) -> None:
        self.policy = policy
        self.device = device
        self.number = number
        self.module = module
        self._native = native
        self._ruled = op_names.meant_by(policy.rules)
        self._has_phases = any(rule.phase is not None for rule in policy.rules)
        self._plans: dict[Phase, dict[torch.dtype, Plan]] = {phase: {} for phase in PHASES}
        self.numbers_within: dict[tuple[str, torch.dtype, Phase], int | None] = {}
        self._casts: dict[tuple[torch.dtype, Phase], Plan] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is the same in every process for the same rules in force."""
        within = self.policy.rules_within(self.module)
        return self.policy.fingerprint + ("@" + "; ".join(map(str, within)) if within else "")

    def plan(self) -> Plan:
        """Return the plan for the lower precision and the phase of this thread."""
        return self.plan_for(torch.get_autocast_dtype(self.device), self.phase())

    def rule(self, op: str) -> Rule | None:
        """Return the rule that decides an overload in this thread, None if none does."""
        dtype = torch.get_autocast_dtype(self.device)
        return self.policy.rule(op, self.device, dtype, self.phase(), self.module)

    def casts(self) -> Plan:
        """Return all that the policy does now, by our kernels, also where PyTorch's agree."""
        now = torch.get_autocast_dtype(self.device), self.phase()
        casts = self._casts.get(now)
        if casts is None:
            casts = self._casts[now] = self._all_casts(*now)
        return casts

    def plan_for(self, dtype: torch.dtype, phase: Phase) -> Plan:
        """Return the plan for a lower precision and a phase."""
        plan = self._plans[phase].get(dtype)
        if plan is None:
            plan = self._plans[phase][dtype] = self._plan(dtype, phase)
        return plan

    def ops(self) -> set[str]:
        """Return the overloads that some plan names."""
        phases = PHASES if self._has_phases else PHASES[:1]
        return {op for dtype in LOWER_PRECISIONS for p in phases for op in self.plan_for(dtype, p)}

    def table(self) -> frozenset[str]:
        """Return the overloads that the policy rules or PyTorch casts."""
        return dispatch.overloads_with_autocast_kernel(self.device) | self._ruled

    def _all_casts(self, dtype: torch.dtype, phase: Phase) -> Plan:
        rules = {
            op: self.policy.rule(op, self.device, dtype, phase, self.module) for op in self._ruled
        }
        return {
            op: carry_out(rule, op, self.device, dtype)
            for op, rule in rules.items()
            if rule is not None and rule.action != "leave"
        }

    @cached_property
    def observed(self) -> "PolicyOnDevice":
        """The same policy with every rule carried out by our kernels, so that each can be told."""
        return PolicyOnDevice(
            self.policy, self.device, native=False, number=self.number, module=self.module
        )

    def ruled_ops(self) -> set[str]:
        """Return the overloads that some plan names, or some rule, if only to leave them alone."""
        return self.ops() | self._ruled

    def phase(self) -> Phase:
        """Return the phase of this thread: "train" where no rule asks for it."""
        return "eval" if self._has_phases and not torch.is_grad_enabled() else "train"

    def _plan(self, dtype: torch.dtype, phase: Phase) -> Plan:
        plan: Plan = {}
        by_pytorch = dispatch.overloads_with_autocast_kernel(self.device)
        for op in sorted(self.table()):
            rule = self.policy.rule(op, self.device, dtype, phase, self.module) or Rule(op, "leave")
            theirs = _pytorchs_action(op, self.device, dtype) if op in by_pytorch else "leave"
            is_native = self._native and _is_native(rule, theirs)
            if is_native or (rule.action, theirs) == ("leave", "leave"):
                continue
            if self._native and rule.action == theirs == "lower":
                plan[op] = lower_with_pytorch(op, self.device, dtype)
            else:
                plan[op] = carry_out(rule, op, self.device, dtype)
        return plan


def _is_native(rule: Rule, theirs: Action) -> bool:
    """Say whether PyTorch's own kernel does what a rule says."""
    match theirs:
        case "lower":  # PyTorch's cache may give an old cast of a weight
            return False
        case "promote":  # PyTorch's promotion refuses the other half precision
            return rule in preset("torch").rules
    return rule.action == theirs


def _pytorchs_action(op: str, device: str, dtype: torch.dtype) -> Action:
    return preset("torch").action(op, device, dtype)
