"""Policies: the dtype of each op, as data.

A :class:`Policy` is an ordered list of :class:`Rule`; later rules win. It can be built, compared,
printed and saved without running anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

import torch

from halfstep._autocast import sums, written
from halfstep._autocast.rule import Action, Rule, holds_where, holds_within, is_in_place
from halfstep._autocast.written import PRESETS, rules_of
from halfstep._common.text import did_you_mean, shown
from halfstep._pytorch import compiler, dispatch
from halfstep._pytorch.dispatch import overload


@compiler.constant_while_tracing
class Policy:
    """An ordered list of rules; the last one that applies to an op decides.

    An op without an applicable rule runs on its inputs as they are. Policies are values: two with
    the same rules are equal. ``str()`` returns the text form, which :meth:`parse` reads.

    Args:
        rules: :class:`Rule` values, in order. To start from a preset, see :meth:`parse` and
            ``preset(...) | rules``.

    Raises:
        TypeError: An element is not a rule.

    Example:
        >>> from halfstep import Rule, preset
        >>> policy = preset("standard") | Rule("layer_norm", "leave")
        >>> print(policy)
        standard; layer_norm:leave
        >>> policy == Policy.parse("standard; F.layer_norm:leave")
        True
        >>> policy.action("layer_norm.default", "cpu", torch.bfloat16)
        'leave'
    """

    rules: tuple[Rule, ...]

    def __init__(self, rules: Iterable[Rule]) -> None:
        if isinstance(rules, Policy | str):
            cure = f"Policy.parse({rules!r})" if isinstance(rules, str) else "policy | rules"
            raise TypeError(f"a policy is made of rules: write {cure}")
        if not isinstance(rules, Iterable):
            raise TypeError(f"a policy is made of Rule values, got {shown(rules)}")
        self.__dict__["rules"] = tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"a policy is made of Rule values, got {rule!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a policy cannot be changed ({name}): make another, policy | rules")

    # --- reading and writing ----------------------------------------------------------------------

    @staticmethod
    def parse(text: str) -> Policy:
        """Return the policy for a text such as ``"standard; softmax:lower"``.

        The text is a preset, then rules, of which later ones win:
        ``op,op@module[conditions]:action``. The optional conditions are device types, and ``fp16``
        or ``bf16``. The module, a glob, is optional; with it, so are the ops. docs/policies.md has
        the grammar.

        Raises:
            ValueError: The text is invalid. The message names the wrong part and the nearest valid
                name.

        Example:
            >>> print(Policy.parse("standard; conv*,F.linear[cuda,fp16]:fp32"))
            standard; conv*,linear[cuda,fp16]:fp32
        """
        if not isinstance(text, str):
            raise TypeError(f"Policy.parse(): got {shown(text)}; pass a text, 'standard; mul:fp32'")
        return _parsed(text)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Read a file of the text that :meth:`parse` takes: lines end parts, ``#`` begins comments.

        Raises:
            OSError: The file cannot be read.
            TypeError: The path is not one.
            ValueError: The file is no text, or an invalid one.
        """
        file = _file("load", path)
        try:
            return _parsed(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a text file: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a file that :meth:`load` reads.

        Raises:
            OSError: The file cannot be written.
            TypeError: The path is not one.
        """
        _file("save", path).write_text(written.to_text(self.rules, "\n") + "\n", encoding="utf-8")

    def __or__(self, rules: Rule | Iterable[Rule] | str) -> Policy:
        """Return a policy with more rules: one, several, or their text (``"softmax:fp32"``)."""
        if isinstance(rules, Rule):
            rules = [rules]
        elif isinstance(rules, str):
            rules = written.parse_rules(rules)
            check(rules)
        return Policy((*self.rules, *Policy(rules).rules))

    def __str__(self) -> str:
        return written.to_text(self.rules)

    def __repr__(self) -> str:
        text = str(self)
        return f"<Policy {text if len(text) <= 100 else text[:97] + '...'}>"

    def by_action(self) -> dict[str, list[str]]:
        """Return the names of the ops by action; overruled rules are left out."""
        return written.by_action(self.rules)

    # --- deciding ---------------------------------------------------------------------------------

    def rule(self, op: str, device: str, dtype: torch.dtype, module: str = "") -> Rule | None:
        """Return the rule that decides ``op`` (an overload, ``"exp.default"``), or None.

        Raises:
            ValueError: No rule decides, and ``op`` is no overload, or does not exist.

        Example:
            >>> policy = Policy.parse("standard; exp[bf16]:leave")
            >>> print(policy.rule("exp.default", "cpu", torch.bfloat16))
            exp[bf16]:leave
        """
        for rule in self._about(op):
            if holds_where(rule, device, dtype) and rule.names(op) and holds_within(rule, module):
                return rule
        if op not in (overloads := _meant_by(op)):
            cure = f"; name an overload: {', '.join(sorted(overloads))}" if overloads else _near(op)
            raise ValueError(f"there is no overload {op!r}{cure}")
        return None

    def island(self, module: str, device: str, dtype: torch.dtype) -> Rule | None:
        """Return the rule that makes a module, given by name, an island, or None."""
        for rule in reversed(self.module_rules):
            is_meant = rule.is_for_whole_module and rule.is_about(module)
            if is_meant and holds_where(rule, device, dtype):
                return rule if rule.action == "fp32" else None
        return None

    @cached_property
    def module_rules(self) -> tuple[Rule, ...]:
        """The rules that apply only in some modules."""
        return tuple(rule for rule in self.rules if rule.module is not None)

    def action(self, op: str, device: str, dtype: torch.dtype, module: str = "") -> Action:
        """Return the action for ``op`` on ``device`` with the lower precision ``dtype``.

        ``module``: the name of the calling module, as in ``model.named_modules()``.

        Example:
            >>> preset("standard").action("linear.default", "cpu", torch.bfloat16)
            'lower'
        """
        rule = self.rule(op, device, dtype, module)
        return "leave" if rule is None else rule.action

    def _about(self, op: str) -> list[Rule]:
        """Return the rules that may concern ``op``, last one first."""
        keys = op, op.rpartition(".")[0], "*"
        found = [position for key in keys for position in self._index.get(key, ())]
        return [self.rules[position] for position in sorted(found, reverse=True)]

    @cached_property
    def _index(self) -> dict[str, list[int]]:
        """The positions of rules, by op; those of globs under ``"*"``."""
        index: dict[str, list[int]] = {}
        for position, rule in enumerate(self.rules):
            index.setdefault("*" if rule.is_glob else rule.op, []).append(position)
        return index

    # --- being a value ----------------------------------------------------------------------------

    # Cached: hashing some 200 rules costs 20 us, and every entered context needs the hash.
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
        # Caches are not pickled: hashes of strings differ between processes.
        return Policy, (self.rules,)


def rules_within(policy: Policy, module: str) -> tuple[Rule, ...]:
    """Return the rules about ops that apply in a module but not everywhere."""
    if not module:
        return ()
    ops = (rule for rule in policy.module_rules if not rule.is_for_whole_module)
    return tuple(rule for rule in ops if holds_within(rule, module))


@cache
def fingerprint(policy: Policy) -> str:
    """Return a short text that is equal in every process for the same rules."""
    return hashlib.sha256(repr(policy.rules).encode()).hexdigest()[:16]


def preset(name: str) -> Policy:
    """Return a predefined policy.

    Args:
        name: ``"standard"``, ``"torch"``, ``"torch-cuda"``, ``"bf16-lean"`` or ``"fp32"``.

    Raises:
        TypeError: The name is not a text.
        ValueError: There is no preset of that name.

    Example:
        >>> preset("standard").action("softmax.int", "cpu", torch.float16)
        'fp32-dtype'
        >>> preset("torch").action("softmax.int", "cpu", torch.float16)
        'leave'
    """
    if not isinstance(name, str):
        raise TypeError(f"preset(): got {shown(name)}; pass a name, such as 'standard'")
    if name not in PRESETS:
        names = ", ".join(map(repr, PRESETS))
        near = did_you_mean(name, PRESETS)
        raise ValueError(f"there is no policy preset {name!r}{near}; the presets are {names}")
    return _preset(name)


@cache
def _preset(name: str) -> Policy:
    return Policy(rules_of(name))


@cache  # called each time autocast(policy="...") is entered
def _parsed(text: str) -> Policy:
    name, rules = written.parse(text)
    check(rules)
    return preset(name) | rules


def _file(method: str, path: object) -> Path:
    if not isinstance(path, str | Path):
        raise TypeError(f"Policy.{method}(): got {shown(path)}; pass the path of a file")
    return Path(path)


# --- the ops that rules are about -----------------------------------------------------------------

# "softmax.int" is an overload of the ATen op "softmax"; "mylib::attention.default" of a custom op.


def meant_by(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the overloads that the rules name."""
    return frozenset(op for rule in rules for op in _meant_by(rule.op) if rule.names(op))


def check(rules: Iterable[Rule]) -> None:
    """Raise ``ValueError`` if a rule cannot be applied.

    An op of a preset may be missing: some exist only in some versions and builds of PyTorch.
    """
    ours = _preset_rules()
    checked: set[tuple[str, str]] = set()  # of a million rules, most name the same few ops
    for rule in rules:
        if (rule.op, rule.action) in checked or rule.is_for_whole_module or rule in ours:
            continue
        try:
            _check_one(rule)
        except ValueError as error:
            raise ValueError(f"rule {str(rule)!r}: {error}") from None
        checked.add((rule.op, rule.action))


def _check_one(rule: Rule) -> None:
    meant = meant_by([rule])
    if rule.is_glob and not meant:
        near = did_you_mean(rule.op.replace("*", ""), _ops_of_presets())
        raise ValueError(f"no op named in a preset matches {rule.op!r}{near}")
    if not _exists(rule.op) and not rule.is_glob:
        raise ValueError(f"there is no op {rule.op!r}{_near(rule.op)}")
    if not meant:
        raise ValueError(
            "'destination' is the action for ops in place, such as "
            "'index_put_', and the only one that casts for them; out= has no rules"
        )
    if rule.action == "fp32-dtype" and not all(map(dispatch.takes_dtype, meant)):
        raise ValueError(
            "it needs an op with an optional dtype argument, such as softmax or sum; use the "
            "action 'fp32'"
        )
    if rule.action == "fp32-out" and not meant <= {f"{op}.default" for op in sums.PRODUCTS}:
        raise ValueError(
            f"it is for matrix products: {', '.join(sums.PRODUCTS)}; use the action 'fp32'"
        )


def _meant_by(rule_op: str) -> frozenset[str]:
    if "::" not in rule_op:
        return _of_aten(rule_op)
    # Not cached for libraries other than ATen, which may be loaded later.
    glob = Rule(rule_op, "leave")
    names = _overloads_beside(rule_op)
    return frozenset(name for name in names if glob.names(name) and not _writes_out(name))


@cache
def _of_aten(rule_op: str) -> frozenset[str]:
    if "*" in rule_op or "?" in rule_op:
        glob = Rule(rule_op, "leave")
        return frozenset(
            name for op in _ops_of_presets() for name in _of_aten(op) if glob.names(name)
        )
    op, _, of_op = rule_op.partition(".")
    if of_op:
        return frozenset({rule_op} if _exists(rule_op) and not _writes_out(rule_op) else ())
    names = (f"{op}.{of_op}" for of_op in dispatch.aten_overloads().get(op, ()))
    return frozenset(n for n in names if not _writes_out(n) and not _must_name_dtype(n))


def _overloads_beside(rule_op: str) -> list[str]:
    """Return all overloads in the library of a custom op."""
    return dispatch.overloads_of_namespace(rule_op.rpartition("::")[0])


def _exists(rule_op: str) -> bool:
    if "::" in rule_op:
        return any(map(Rule(rule_op, "leave").names, _overloads_beside(rule_op)))
    op, _, of_op = rule_op.partition(".")
    known = dispatch.aten_overloads().get(op, [])
    return of_op in known if of_op else bool(known)


@cache
def _preset_rules() -> frozenset[Rule]:
    return frozenset(rule for name in PRESETS for rule in rules_of(name))


@cache
def _ops_of_presets() -> frozenset[str]:
    """Return the ops, or overloads, that any preset names: the domain of globs."""
    return frozenset(rule.op for rule in _preset_rules() if not rule.is_glob)


def _writes_out(name: str) -> bool:
    """Return whether an op writes to ``out=``, or to several arguments in place.

    One that updates statistics, such as fused_moving_avg_obs_fake_quant, can have rules: what it
    writes to is not cast.
    """
    written = dispatch.written_by(overload(name))
    if is_in_place(name.rpartition(".")[0]):
        return written != {0}
    return any(dispatch.arguments_of(name)[position].kwarg_only for position in written)


def _must_name_dtype(name: str) -> bool:
    """Return whether the caller must pass a dtype, as in the overload ``norm(x, 2, dtype=...)``."""
    return any(
        arg.name in ("dtype", "out_dtype") and not arg.has_default_value()
        for arg in dispatch.arguments_of(name)
    )


def _near(rule_op: str) -> str:
    if "::" in rule_op:
        custom = _overloads_beside(rule_op)
        near = did_you_mean(rule_op, [name.rpartition(".")[0] for name in custom])
        return near if custom else "; import the library that defines it first"
    op = rule_op.partition(".")[0]
    known = dispatch.aten_overloads()
    return did_you_mean(rule_op, [f"{op}.{o}" for o in known[op]] if op in known else known)
