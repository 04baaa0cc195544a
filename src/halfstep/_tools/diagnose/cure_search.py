"""Search for a cure: replays of a step with one change after another until it is finite.

A change is a smaller scale, more rules, another dtype, or an edit of the user's code. An edit is
text to paste. A replay applies it in a function mode: calls of the function at that line get other
arguments, as if the line had been edited.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast import Policy, autocast, preset
from halfstep._common.formats import dtype_name
from halfstep._common.module_names import without_wrappers
from halfstep._common.numbers import listed, power
from halfstep._gradients.gradients import parameters
from halfstep._tools.diagnose.changes import Change as Edited
from halfstep._tools.diagnose.changes import edited_lines, in_words
from halfstep._tools.diagnose.diagnosis import BadOp, Cure, fall, pasted, shown
from halfstep._tools.diagnose.edits import (
    IN_FLOAT32,
    OF_OUTPUTS,
    OF_POINTS,
    RECTIFIERS,
    SPLITS,
    STANDARDISED,
    WITHOUT,
    Edit,
    cast_after,
    edits_of,
    edits_of_result,
    edits_of_source,
    is_exponential,
    is_layer,
    is_of_covariance,
    is_singular,
    item_slot,
    row_name,
    shifts_of,
    within,
)
from halfstep._tools.diagnose.flaws import Flaw, flaw_of
from halfstep._tools.diagnose.several_steps import FAR
from halfstep._tools.diagnose.stable_forms import Formulas, StableForm, may_be_in_formula
from halfstep._tools.diagnose.trials import CureTrial, Maker
from halfstep._tools.diagnose.user_calls import Edits, UserCall, UserCalls, call_of, variable_of
from halfstep._tools.replay.blame import OUTSIDE, Blame
from halfstep._tools.replay.replay import OutOfTime
from halfstep._tools.replay.variant import EnteredAutocast, float32_parameters, half_of
from halfstep._tools.trace.ops import OpPlace

CASTS = ("to", "half", "bfloat16", "type", "type_as")
OF_CAST = (
    "the line casts to a lower precision itself, which no rule changes, so its values stay "
    "rounded: pass float32 on there"
)
MOST_RULES = 3
"""The largest number of rules that are added to a policy before another dtype is tried."""
SMALLEST_SCALE = 1.0  # the smallest loss scale that is tried


def smaller_scale(trial: CureTrial, scale: float, bad: BadOp) -> float | None:
    """Return a smaller scale at which the step is finite: a power of two, at least 1; or None."""
    excess = bad.needs / bad.limit if bad.needs and bad.limit else 1.0
    first = power_below(scale / max(2 * excess, 2.0))  # one bit of headroom
    return _first_scale(first, lambda each: trial.is_finite(scale=each))


def _first_scale(largest: float, is_finite: Callable[[float], bool]) -> float | None:
    """Return the first of some smaller and smaller scales with which a step is finite, or None."""
    scales = [each for n in range(5) if (each := largest / 4.0**n) > SMALLEST_SCALE]
    if scales and is_finite(scales[0]):
        return scales[0]
    if not is_finite(SMALLEST_SCALE):  # nor is it then with those between
        return None
    return next(filter(is_finite, scales[1:]), SMALLEST_SCALE)


def of_scale(scale: float, *, is_finite: bool | None = None) -> Cure:
    size = f"{scale:g}" if scale <= 65536 else f"2.0**{math.log2(scale):g}"
    text = (
        f"halfstep.GradScaler(init_scale={size}, max_scale={size})  "
        f"# in a run: scaler.update(new_scale={size})"
    )
    return Cure("scale", text, is_finite, scale=scale)


def of_range(trial: CureTrial, blame: Blame, bad: BadOp, call: UserCall | None) -> Cure | None:
    """Return a cure for values out of range: rules, another dtype, or casts in the code.

    The first that trains is returned; if none does, the first.
    """
    is_rounded = not bad.is_beyond_its_dtype
    if not trial.entered:
        if is_rounded:
            trial.origins(blame)  # for its note
        cure = _of_half_model(trial) or in_float32(trial, blame, call)
        text = f"compute {bad.forward_op or bad.op} there in float32: pass x.float()"
        return cure or Cure("code", text)
    if is_rounded and call is not None and (cure := _of_singular(trial, blame, call)) is not None:
        return cure
    line = None if call is None else call.place.line
    makers = (maker.call for maker in trial.makers(blame.forward_number))
    if any(each.function in CASTS and each.place.line == line for each in makers):
        trial.replayer.notes.append(OF_CAST)
    first: Cure | None = None
    for cure in filter(None, _of_autocast(trial, blame, call, is_rounded=is_rounded)):
        if cure.is_finite:
            return _with_function(cure, blame, call)
        first = first or cure
    return first


def _of_singular(trial: CureTrial, blame: Blame, call: UserCall) -> Cure | None:
    """Return an edit of a function that is singular where an earlier op was rounded to 1.

    A wider dtype only delays that, since it rounds to 1 too.
    """
    if not is_singular(call.function) or not any(each.is_one for each in trial.origins(blame)):
        return None
    cure = _best(trial, blame, [], _of_edits(trial, blame, call))
    if cure is None or cure.kind == "look" or flaw_of(cure, trial.usual) > Flaw.DOUBT:
        return None
    return cure


def _with_function(cure: Cure, blame: Blame, call: UserCall | None) -> Cure:
    """Add which function of the line runs the op of a rule, if its name is another."""
    op, name = blame.place.op or blame.op, "" if call is None else call.function.rstrip("_")
    is_named = not name or name.startswith("_") or name == op
    if is_named or not re.search(rf"\b{op}\b", cure.policy or ""):
        return cure
    return replace(cure, remarks=(f"{name} runs the op {op}", *cure.remarks))


def _of_autocast(
    trial: CureTrial, blame: Blame, call: UserCall | None, *, is_rounded: bool
) -> Iterator[Cure | None]:
    """Yield cures of a step under autocast, the narrowest first."""
    entered, standard = trial.entered[0], preset("standard")
    for policy in dict.fromkeys((entered.policy or standard, standard)):
        yield _of_origin(trial, blame, policy) if is_rounded else None
        yield _of_rules(trial, blame, policy)
    if entered.dtype is not torch.bfloat16 and trial.is_finite(dtype=torch.bfloat16):
        text = f'halfstep.autocast("{entered.device}", dtype=torch.bfloat16)'
        cure = Cure("dtype", text, is_finite=True, dtype="bfloat16")
        yield trial.judged(cure, dtype=torch.bfloat16)
    edited = () if call is None else _of_edits(trial, blame, call, lambda _: IN_FLOAT32)
    yield next((cure for cure in edited if cure is not None and cure.is_finite), None)
    if trial.is_finite(dtype=torch.float32):
        text = f'halfstep.autocast("{entered.device}", enabled=False)  # float32'
        cure = Cure("dtype", text, is_finite=True, dtype="float32")
        yield trial.judged(cure, dtype=torch.float32)
    yield in_float32(trial, blame, call)


def _of_half_model(trial: CureTrial) -> Cure | None:
    """Return float32 parameters plus autocast, with rules if needed, as the cure; or None."""
    half = half_of(trial.replayer.modules)
    if half is None:
        return None
    device, dtype = half

    @contextmanager
    def under_autocast() -> Iterator[None]:
        with float32_parameters(trial.replayer.modules), autocast(device, dtype=dtype):
            yield

    inner = trial.inside(under_autocast, EnteredAutocast(device, dtype, preset("standard")))
    blame = inner.blame()
    policy: str | None = None
    if blame is not None:
        base = preset("standard")
        found = None if blame.number == OUTSIDE else _of_rules(inner, blame, base)
        found = found or _of_origin(inner, blame, base)
        if found is None:
            return None
        policy = found.policy
    given = "" if policy is None else f', policy="{policy}"'
    text = (
        "model.float()  # once, before the optimizer is made\n"
        f'with halfstep.autocast("{device}", dtype={dtype}{given}):'
        "  # around the model and the loss, not around backward"
    )
    rules: dict[str, Any] = {} if policy is None else {"policy": Policy.parse(policy)}
    cure = Cure("dtype", text, is_finite=True, policy=policy, dtype=dtype_name(dtype))
    return inner.judged(cure, **rules)


def of_swallowed(trial: CureTrial, first: Blame, call: UserCall | None) -> Cure | None:
    """Return one rule or edit as the cure that makes an earlier overflow and the step finite."""
    if trial.entered:
        policy = trial.entered[0].policy or preset("standard")
        if (cure := _of_rules(trial, first, policy, most=1)) is not None:
            return cure
    if call is None:
        return None
    form = of_formula(trial, call)
    if form is not None and form.edits:
        return form
    edits = islice(edits_of(call.function), MOST_EDITS_TRIED)
    return form or _best(trial, first, [], (of_edit(trial, call, edit) for edit in edits))


MOST_ORIGINS = 4  # the largest number of ops before the bad one for which a rule is tried


def _of_origin(trial: CureTrial, blame: Blame, base: Policy) -> Cure | None:
    """Try a rule for each earlier op whose rounding spoils the bad op."""
    origins = trial.origins(blame)
    rules = dict.fromkeys(next(_rules_for(o.place, o.op, trial.model), "") for o in origins)
    for policy in islice(filter(None, (_with_rules(base, [r]) for r in rules)), MOST_ORIGINS):
        if trial.is_finite(policy=policy):
            return trial.judged(_of_policy(policy, trial, is_finite=True), policy=policy)
    return None


def _of_rules(trial: CureTrial, blame: Blame, base: Policy, most: int = MOST_RULES) -> Cure | None:
    """Add rules until a replay is finite; for each bad op, try the narrowest rule first."""
    rules: dict[str, Blame] = {}
    for _ in range(most):
        for rule in _rules_for(blame.place, blame.op, trial.model):
            policy = _with_rules(base, [*rules, rule])
            if policy is None or rule in rules:
                continue
            after = trial.blame(policy=policy)
            is_finite = partial(trial.is_finite, policy=policy)
            scale = None if blame.phase == "backward" else _scale_with(trial, after, is_finite)
            if after is None or scale is not None:
                changes: dict[str, Any] = {"policy": policy, "scale": scale or trial.scale}
                wider, remarks = _with_siblings(trial, base, {**rules, rule: blame}, changes)
                cure = _of_policy(wider or policy, trial, scale, is_finite=True)
                changes["policy"] = wider or policy
                return trial.judged(replace(cure, remarks=remarks), **changes)
            if after.where != blame.where:  # one rule is not enough
                rules[rule], blame = blame, after
                break
        else:
            return None
    return None


NEAR = 16.0  # how far from the limit of its dtype a result is that may reach it in a later step


def _with_siblings(
    trial: CureTrial, base: Policy, rules: dict[str, Blame], changes: dict[str, Any]
) -> tuple[Policy | None, tuple[str, ...]]:
    """Return a policy that also serves modules in which the same line comes near the limit.

    ``changes`` have a policy of the rules with which the step is finite. The modules are of the
    class of one that has a rule. Many of them are all modules, for an op. None if there are none.
    """
    named = () if trial.model is None else trial.model.named_modules()
    kinds = {without_wrappers(name): type(module) for name, module in named}
    bad = {r: b.where for r, b in rules.items() if "@" in r and b.phase == "forward"}
    if not any([*kinds.values()].count(kinds[module]) > 1 for _, module, _ in bad.values()):
        return None, ()
    by_line = trial.shares_of_limits({op for op, _, _ in bad.values()}, **changes)
    more, remarks = [*rules], dict[str, None]()  # several rules may be of one line
    for rule, (op, module, _) in bad.items():
        near = {
            other: share
            for shares in by_line.values()
            for other, share in shares.items()
            if module in shares and kinds.get(other) is kinds[module] and share * NEAR >= 1
        }
        of_others = [rule.replace(f"@{module}:", f"@{other}:") for other in near]
        if len(near) > MOST_RULES and rule.startswith(f"{op}@"):
            of_others = [f"{op}:fp32"]
        more += of_others
        said = listed([f"{share:.0%} in {other}" for other, share in near.items()])
        remarks |= {f"{op} of the same line reaches, of the limit, {said}": None} if near else {}
    policy = _with_rules(base, [*dict.fromkeys(more)]) if remarks else None
    is_finite = policy is not None and trial.is_finite(**{**changes, "policy": policy})
    return (policy, tuple(remarks)) if is_finite else (None, ())


def _rules_for(place: OpPlace, name: str, model: nn.Module | None) -> Iterator[str]:
    module, op = place.module, place.op or name
    if module and (
        model is None or module not in map(without_wrappers, dict(model.named_modules()))
    ):
        module = ""  # the module is not part of this model
    if op and op != "_to_copy":
        yield f"{op}@{module}:fp32" if module else f"{op}:fp32"
    if module:
        yield f"@{module}:fp32"


def _with_rules(base: Policy, rules: list[str]) -> Policy | None:
    try:
        return Policy.parse("; ".join([str(base), *rules]))
    except ValueError:  # the name is not valid in a rule
        return None


def _scale_with(
    trial: CureTrial, after: Blame | None, is_finite: Callable[..., bool]
) -> float | None:
    """Return a scale at which a step is finite whose backward pass goes bad after a change."""
    if trial.scale is None or after is None or after.phase != "backward":
        return None
    return _first_scale(trial.scale / 16, lambda each: is_finite(scale=each))


def _of_policy(
    policy: Policy, trial: CureTrial | None, scale: float | None = None, *, is_finite: bool | None
) -> Cure:
    entered = trial.entered[0] if trial is not None else None
    own = f'policy="{policy}"{", module=model" if policy.module_rules else ""}'
    text = f"halfstep.autocast(..., {own})"
    if entered is not None:
        text = f'halfstep.autocast("{entered.device}", dtype={entered.dtype}, {own})'
    if scale is not None:
        text += _at_scale(scale)
    return Cure("policy", text, is_finite, policy=str(policy), scale=scale)


def _at_scale(scale: float) -> str:
    return (
        f"  # finite at a loss scale of {power(scale)}, not at the present one; a GradScaler backs "
        "off to it by itself"
    )


def of_inputs(trial: CureTrial, other: Cure | None = None) -> Cure | None:
    """Return standardised inputs as the cure if the loss falls with them; another cure follows."""
    text, change = trial.usual.standardise()
    if change is None:
        return None
    scale, after = trial.scale, trial.blame(change())
    if after is not None:
        scale = _scale_with(
            trial, after, lambda scale: trial.is_finite(around=change(), scale=scale)
        )
        if scale is None:
            return None
        text += _at_scale(scale)
    found = trial.judged(Cure("code", text, is_finite=True), change, scale=scale)
    if found.is_finite is not True or fall(found.losses) <= 0:
        return None
    return found if other is None else replace(found, text=f"{text}\nor {other.text}")


# --- edits ----------------------------------------------------------------------------------------

MOST_EDITS = 3  # the largest number of calls that are edited together
MOST_EDITS_TRIED = 8  # the largest number of edits of one call that are tried
MOST_REPLAYS = 64  # the number of replays of a diagnosis after which no more edits are tried
OF_PARAMETER = (
    "train the logarithm of {0}, a parameter: {0} = log_{0}.exp() is above 0 after every step. A "
    "clamp gives {0} no gradient beyond its limit"
)
SHIFTED = "it is an equal formula: with another shift the losses are the same"
_SAME = 1e-3  # the largest relative difference of two losses that are the same
OF_COVARIANCE = (
    "keep {names} above 0, as by F.softplus({first}) + 1e-4 in place of {first}, and so each other "
    "variance in the matrix: where one is below 0, it is not positive definite"
)


def of_maths(
    trial: CureTrial, blame: Blame, call: UserCall | None, *, is_overflow: bool = False
) -> Cure | None:
    """Return edits as the cure that keep functions away from values where they are undefined.

    A stable form of the formula comes first, since a clamp changes what is computed; then, if the
    result overflowed, edits of the exponent of an earlier exp.
    """
    form = None if call is None else of_formula(trial, call)
    is_found = form is not None and form.edits and form.is_finite is not False
    if form is not None and is_found and (not form.losses or trial.usual.is_like(form.losses[0])):
        return form
    of_domain = None if form or call is None else _of_covariance(trial, blame, call)
    if of_domain is not None:
        return of_domain
    makers = trial.makers(blame.forward_number)
    before = [*filter(None, [call]), *(maker.call for maker in makers)]
    if form is None and (shifted := _of_shift(trial, before)) is not None:
        return shifted
    near = {row_name(each.call.function): each.call for each in reversed(makers)}
    edits = OF_POINTS | (OF_OUTPUTS if is_overflow else {})
    of_near = (of_edit(trial, near[name], *edits[name]) for name in reversed(near) if name in edits)
    of_exponents = _of_exponents(trial, call, makers) if is_overflow else ()
    cures = chain(of_near, of_exponents, _of_calls(trial, blame, call, makers))
    cure = _best(trial, blame, makers, cures)
    if form is None:
        return cure
    if cure is None or cure.kind == "look" or not _is_better(cure, form):
        return form
    said = form.text.replace("\n", "; ")
    trial.replayer.notes.append(f"a stable form is finite too: {said}")
    return cure


def _of_shift(trial: CureTrial, before: Iterable[UserCall]) -> Cure | None:
    """Return exponents less the largest one as the cure, if they are those of a softmax by hand.

    They are if a later call divides by what is computed of them, and the losses of the first steps
    are the same with another shift.
    """
    exp = next((each for each in before if is_exponential(each.function)), None)
    if exp is None or (calls := trial.divides_by(exp)) is None:
        return None
    sums = calls.after(exp, ("index_add", "scatter_add"))
    indices = ((row_name(each.function), _index_in(each)) for each in sums)
    for edit, more in shifts_of((name, index) for name, index in indices if index):
        one, other = (of_edit(trial, exp, each) for each in (edit, more))
        pairs = zip(one.losses[:2], other.losses, strict=False) if one and other else ()
        is_equal = [math.isclose(*pair, rel_tol=_SAME) for pair in pairs]
        if one and any(is_equal) and all(is_equal) and flaw_of(one, trial.usual) < Flaw.NO_CURE:
            return replace(one, remarks=(SHIFTED, *one.remarks))
    return None


def _index_in(call: UserCall) -> str:
    """Return the expression of the index in a call that adds values to places; else empty."""
    match call.place.node:
        case ast.Call(args=[*_, index, _]):
            return ast.unparse(index)
    return ""


def _of_covariance(trial: CureTrial, blame: Blame, call: UserCall) -> Cure | None:
    """Return the cure of parameters of a covariance below 0, if the step is finite above it."""
    if not is_of_covariance(call.function):
        return None
    known = dict.fromkeys(chain.from_iterable(map(parameters, trial.all_optimizers())))
    below = [each for each in known if each.dim() < 2 and bool((each < 0).any())]
    below = trial.read_before(blame.forward_number, below) if below else []
    for chosen in [*([each] for each in below[:MOST_MAKERS]), below] if below else []:
        if trial.blame(_above_zero(chosen)) is None:
            names = {variable_of(each): float(each.detach().min()) for each in chosen}
            lows = listed([f"{name} was {low:.4g}" for name, low in names.items()])
            remark = f"{lows}; with its size in place of it the step is finite"
            text = OF_COVARIANCE.format(names=listed([*names]), first=next(iter(names)))
            return Cure("code", text, remarks=(remark,))
    return None


@contextmanager
def _above_zero(weights: list[Tensor]) -> Iterator[None]:
    with torch.no_grad():
        for weight in weights:
            weight.abs_()
    yield


def _is_better(cure: Cure, form: Cure) -> bool:
    """Return whether an edit that leaves a loss is better than a form, which computes the same."""
    if cure.losses and form.losses and 0 < FAR**4 * abs(cure.losses[-1]) < abs(form.losses[-1]):
        return True
    return fall(cure.losses) >= fall(form.losses) / 2


def _of_calls(
    trial: CureTrial, blame: Blame, call: UserCall | None, makers: list[Maker]
) -> Iterator[Cure | None]:
    """Yield edits of the calls that made an operand, and of the bad call.

    An operand that is read at more than one place is edited where it is made, which all reads see.
    An edit that cannot be pasted comes last.
    """
    in_words: list[Cure] = []
    for cure in chain(
        () if call is None else _of_sources(trial, call, makers),
        () if call is None else _of_edits(trial, blame, call),
        _of_makers(trial, makers, blame.op if call is None else call.function),
    ):
        if cure is not None and cure.is_finite and not cure.edits:
            in_words.append(cure)
        else:
            yield cure
    yield from in_words


def _best(
    trial: CureTrial, blame: Blame, makers: list[Maker], cures: Iterable[Cure | None]
) -> Cure | None:
    """Return the first cure without a flaw, else the one with the least, and with no giant loss.

    If all that are finite are no cures, a note has the first, and where to look is returned.
    """
    found: list[tuple[Flaw, Cure]] = []
    try:
        for cure in filter(None, cures):
            found.append((flaw_of(cure, trial.usual), cure))
            finite = {cure.text for flaw, cure in found if flaw is not Flaw.NOT_FINITE}
            if found[-1][0] is Flaw.NONE or len(finite) == MOST_FINITE:
                break
    except OutOfTime:
        if not found:
            raise
    if not found:
        return None
    flaw = min(flaw for flaw, _ in found)
    equals = [cure for each, cure in found if each is flaw]
    least = min((abs(cure.losses[-1]) for cure in equals if cure.losses), default=0.0)
    limit = FAR * max(least, 1.0)
    cure = next(each for each in equals if not each.losses or abs(each.losses[-1]) <= limit)
    if len({*cure.losses}) == 1 and abs(cure.losses[0]) <= trial.usual.largest:
        # Its gradient is 0, at a loss that good steps had: a larger bound of it leaves them theirs.
        at = [edit.first for edit in cure.edits]
        alike = [each for each in equals if [edit.first for edit in each.edits] == at]
        beyond = [e for e in alike if e.losses and abs(e.losses[-1]) > trial.usual.largest]
        cure = min(beyond, key=lambda each: abs(each.losses[-1]), default=cure)
    if flaw is not Flaw.NO_CURE:
        return cure
    said, why = cure.text.replace("\n", "; "), "; ".join(shown(cure))
    trial.replayer.notes.append(f"finite, but no cure: {said}: {why}")
    return _where_to_look(blame, makers)


MOST_FINITE = 6  # the number of changes with which the step is finite after which no more are tried
MOST_FORMS = 3
"""The largest number of ways to rewrite the formulas around a bad call that are tried."""


def of_formula(trial: CureTrial, call: UserCall) -> Cure | None:
    """Return the stable form of the formula that a bad call is part of as the cure; or None."""
    if not may_be_in_formula(call.function):
        return None
    _, formulas = trial.rewritten([])
    return _of_formulas(trial, call, formulas, [])


def _of_formulas(
    trial: CureTrial, call: UserCall, formulas: Formulas, chosen: list[StableForm]
) -> Cure | None:
    """Rewrite formulas with the bad call, then those with the call that is bad after that.

    A form that can be pasted comes first.
    """
    told: Cure | None = None
    for forms in formulas.around(call)[:MOST_FORMS]:
        now = [*chosen, *forms]
        tried, found = trial.rewritten(now)
        if tried.blame is None:
            cure = replace(_of_changes([form.rewrite for form in now]), is_finite=True)
            if cure.edits or told is None:
                told = trial.judged(cure, partial(Formulas, [form.root for form in now]))
            if cure.edits:
                return told
            continue
        if (after := call_of(tried.calls, tried.blame)) is not None and len(now) < MOST_EDITS:
            further = _of_formulas(trial, after, found, now)
            if further is not None:
                return further
    return told


def _where_to_look(blame: Blame, makers: list[Maker]) -> Cure:
    """Return where to look if no change was a cure: what made the operands of the bad call."""
    small = (each.call.place.line for each in makers if each.call.function in _SMALL)
    line = next(small, None)
    if line is not None and blame.op not in _SMALL:
        return Cure("look", IN_LOGS.format(line.number))
    made = [f": {m.call.function} in line {m.call.place.line.number}" for m in makers[:1]]
    return Cure("look", "".join([LOOK, *made]))


_SMALL = ("exp", "prod", "cumprod", "softmax", "sigmoid")
IN_LOGS = (
    "compute with logarithms from line {0} on, whose results are too small for the dtype: log_k in "
    "place of k = exp(log_k), torch.logsumexp(log_k + log_v, 1) in place of k @ v, a - b in place "
    "of a / b, and exp at the end; or make the exponent smaller, by a larger temperature"
)
LOOK = "check why what it reads is out of its range, where that is made"
MOST_MAKERS = 6  # the largest number of calls before the bad one whose results are clamped in turn
MOST_OF_RESULT = 4  # the largest number of edits of one of these results that are tried


def _of_sources(trial: CureTrial, call: UserCall, makers: list[Maker]) -> Iterator[Cure | None]:
    """Yield edits of the results of calls that the bad call and others read, or that rectify."""
    for number, maker in enumerate(makers[: 2 * MOST_MAKERS]):
        is_near = maker.is_shared and number < MOST_MAKERS
        if is_near or row_name(maker.function) in RECTIFIERS:
            for edit in edits_of_source(call.function, maker.function):
                is_item = maker.is_part and row_name(maker.call.function) in SPLITS
                at = edit._replace(slots=(item_slot(maker.item),)) if is_item else edit
                yield of_edit(trial, maker.call, at)


def _of_exponents(
    trial: CureTrial, call: UserCall | None, makers: list[Maker]
) -> Iterator[Cure | None]:
    """Yield edits of the exponents of the nearest exp whose result has led to a bad op."""
    exp = next((each for each in makers if is_exponential(each.call.function)), None)
    if exp is None or (call is not None and is_exponential(call.function)):
        return
    before = trial.makers(exp.op)
    num = next((n for n, each in enumerate(before) if is_layer(each.function)), 0)
    yield from _of_sources(trial, exp.call, before[: num + 1])
    for edit in islice(edits_of(exp.call.function), MOST_EDITS_TRIED):
        yield of_edit(trial, exp.call, edit)


def _of_makers(trial: CureTrial, makers: list[Maker], function: str) -> Iterator[Cure | None]:
    """Yield edits of the results of calls before the bad one, as a function needs its argument."""
    for maker in [each for each in makers if not each.is_part][:MOST_MAKERS]:
        for edit in islice(edits_of_result(function), MOST_OF_RESULT):
            cure = of_edit(trial, maker.call, edit)
            yield cure if cure is not None and cure.edits else None


def in_float32(trial: CureTrial, blame: Blame, call: UserCall | None) -> Cure | None:
    """Return casts of arguments to float32 as the cure, or edits specific to the function."""
    if call is None:
        return None
    if (limited := _of_limited_cast(trial, blame, call)) is not None:
        return limited
    cures = _of_edits(trial, blame, call, lambda function: (*IN_FLOAT32, *edits_of(function)))
    cure = _best(trial, blame, [], chain(_of_cast(trial, blame, call), cures))
    last = abs(cure.losses[-1]) if cure is not None and cure.losses else 0.0
    scaled = _of_cast_data(trial, blame, call) if last > FAR else None
    return scaled if scaled and abs(scaled.losses[-1]) < last / FAR else cure


def _of_cast_data(trial: CureTrial, blame: Blame, call: UserCall) -> Cure | None:
    """Return standardised data as the cure, if a cast outside of all modules reads their values."""
    if call.function not in CASTS or blame.place.module:
        return None
    is_data = not any(is_layer(each.function) for each in trial.makers(blame.forward_number))
    cure = of_edit(trial, call, STANDARDISED) if is_data else None
    return cure if cure is not None and fall(cure.losses) > 0 else None


def _of_limited_cast(trial: CureTrial, blame: Blame, call: UserCall) -> Cure | None:
    """Return a clamp of what a cast reads, if the cast is there for its rounding.

    It is if no op computes in its dtype, or if the same statement casts back.
    """
    if call.function not in CASTS or blame.dtype is None:
        return None
    limit = torch.finfo(blame.dtype).max
    edits: Edits = ((call, within(-limit, limit)),)
    tried = trial.edited(edits, trial.scale)
    made = tried.calls.call_of(call.ops[0])
    if tried.blame is not None or made is None:
        return None
    back = tried.calls.after(made, (*CASTS, "float", "double"))
    is_back = any(
        each.place.statement is made.place.statement and each.ops[0] == made.ops[-1] + 1
        for each in back
    )
    if not is_back and blame.dtype.itemsize > 1:
        return None
    cure = _judged_edits(trial, tried.calls)
    return cure if cure is not None and cure.is_finite else None


_SHRINKING = ("div", "truediv", "mul", "sub", "log", "log1p", "log10", "sqrt")


def _of_cast(trial: CureTrial, blame: Blame, call: UserCall) -> Iterator[Cure | None]:
    """Yield changes that leave out a cast, or cast the result of a later call of its function.

    The weights that follow may need the dtype.
    """
    if call.function not in CASTS:
        return
    todo: list[Edits] = [((call, WITHOUT),)]
    for edits in todo:
        tried = trial.edited(edits, trial.scale)
        if tried.blame is None:
            yield _judged_edits(trial, tried.calls)
        if len(todo) == 1 and blame.dtype is not None:
            cast = cast_after(dtype_name(blame.dtype))
            later = tried.calls.after(call, _SHRINKING)[:MOST_EDITS]
            todo += [((call, WITHOUT), (each, cast)) for each in later]


def _of_edits(
    trial: CureTrial,
    blame: Blame,
    call: UserCall,
    edits_for: Callable[[str], Iterable[Edit]] = edits_of,
    chosen: Edits = (),
) -> Iterator[Cure | None]:
    """Edit the bad call alone, then also the call that is bad after that edit, and so on.

    ``edits_for`` returns the edits of a function, the least invasive first. The edits ``chosen``
    for other calls are applied too. What is not finite comes last.
    """
    best, further = None, []
    for edit in islice(edits_for(call.function), MOST_EDITS_TRIED):
        now = (*chosen, (call, edit))
        if trial.replayer.num_replays >= MOST_REPLAYS:
            break
        tried = trial.edited(now, trial.scale)
        if len(chosen) not in tried.calls.reached:
            break
        if tried.blame is None:
            yield _of_finite(trial, tried.calls, now)
            continue
        if tried.blame.number == OUTSIDE:  # the replay was not completed
            continue
        best = best or tried.calls
        is_finite = partial(lambda now, scale: trial.edited(now, scale).blame is None, now)
        is_moved = blame.where != tried.blame.where
        if is_moved and (scale := _scale_with(trial, tried.blame, is_finite)) is not None:
            yield _judged_edits(trial, tried.calls, scale)
            return
        after = call_of(tried.calls, tried.blame)
        if after is not None and not after.is_at(call) and len(now) < MOST_EDITS:
            further.append((tried.blame, after, now))
    for blame, after, now in further:
        yield from _of_edits(trial, blame, after, edits_for, now)
    if best is not None and not chosen:
        yield _of_placed(best, is_finite=False)


def of_edit(trial: CureTrial, call: UserCall, *all_edits: Edit) -> Cure | None:
    """Return edits of one call as the cure if the step is finite with them."""
    edits: Edits = tuple((call, edit) for edit in all_edits)
    tried = trial.edited(edits, trial.scale)
    return None if tried.blame is not None else _of_finite(trial, tried.calls, edits)


def _of_finite(trial: CureTrial, calls: UserCalls, edits: Edits) -> Cure | None:
    """Return edits as the cure, after several steps with them.

    Other calls of the function in the statement, as in ``log(p)`` and ``log(1 - p)``, are clamped
    too; those in the user's whole function are edited if the steps go bad without that.
    """
    (call, edit), at = edits[-1], edits[-1][0].place.statement
    new = [each for each in calls.like(call) if not any(each.is_at(old) for old, _ in edits)]
    here = tuple((each, edit) for each in new if at is not None and each.place.statement is at)
    if here and len(edits) + len(here) <= MOST_EDITS:
        tried = trial.edited((*edits, *here), trial.scale)
        if tried.blame is None and tried.calls.keep_values(here):
            return _judged_edits(trial, tried.calls)
    cure = _judged_edits(trial, calls)
    if cure is None or cure.is_finite is not False or not new:
        return cure
    both = (*edits, *((each, edit) for each in new))[:MOST_EDITS]
    tried = trial.edited(both, trial.scale)
    better = None if tried.blame is not None else _judged_edits(trial, tried.calls)
    return better if better is not None and better.is_finite else cure


def _judged_edits(trial: CureTrial, calls: UserCalls, scale: float | None = None) -> Cure | None:
    cure = _of_placed(calls, scale, is_finite=True)
    if cure is None:
        return None
    made = [calls]

    def change() -> AbstractContextManager[None]:
        made.append(calls.again())
        return made[-1].active()

    cure = trial.judged(replace(cure, remarks=calls.remarks()), change, scale=scale or trial.scale)
    if calls.held_parameter and made[-1].lost:  # it has not moved, without a gradient
        return Cure("code", OF_PARAMETER.format(calls.held_parameter))
    least, last = sorted(each.share for each in [calls, *made][-2:])  # of it, and the one before
    if cure.trial and last:
        still = max(each.changed for each in [calls, *made][-2:])
        said = f"at the end of the trial, {still:.0%} of the values are still changed"
        cure = replace(cure, remarks=(*cure.remarks, said))
    return replace(cure, changed=(calls.share, last, least) if calls.share or last else ())


def _of_placed(
    calls: UserCalls, scale: float | None = None, *, is_finite: bool | None
) -> Cure | None:
    placed = list(calls.placed.values())
    if not placed:
        return None
    cure = _of_changes(placed)
    if scale is not None:
        cure = replace(cure, text=cure.text + _at_scale(scale), scale=scale)
    return replace(cure, is_finite=is_finite)


def _of_changes(changes: Sequence[Edited]) -> Cure:
    lines = edited_lines(changes)
    return Cure("code", in_words(changes)) if lines is None else pasted(lines)


def narrowest_rule(blame: Blame, model: nn.Module | None) -> Cure | None:
    """Return a rule as the cure for an op that needs a wider dtype, without a replay."""
    rules = _rules_for(blame.place, blame.op, model)
    policies = filter(None, (_with_rules(preset("standard"), [rule]) for rule in rules))
    return next((_of_policy(each, None, is_finite=None) for each in policies), None)


def power_below(scale: float) -> float:
    """Return the largest power of two that does not exceed a scale."""
    return float(2.0 ** math.floor(math.log2(scale)))
