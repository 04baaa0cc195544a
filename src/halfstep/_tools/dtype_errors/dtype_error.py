"""Explanations of errors about dtypes: the operands of the failing call, and where they are from.

They are read from the frames of the traceback, so nothing has to be recorded before the error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._autocast import current_policy
from halfstep._common.formats import dtype_name
from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.numbers import listed
from halfstep._pytorch import autograd
from halfstep._tools.dtype_errors import rest
from halfstep._tools.dtype_errors.failing_call import (
    Call,
    Context,
    Named,
    calls_of,
    contexts_of,
    function_of,
    is_about_dtypes,
    is_about_integers,
    is_about_one,
    member_of,
    origin_of,
    wanted_by,
)
from halfstep._tools.dtype_errors.rest import Edits, cast_to, casts_of, error_of
from halfstep._tools.line import LineEdit
from halfstep._tools.source import Source
from halfstep._tools.user_code import FUNCTIONS, is_same_view

_RESULTS = (ast.Call, ast.BinOp, ast.Subscript, ast.Compare, ast.UnaryOp)
_IN_BACKWARD = re.compile(r"Found dtype (\w+) but expected (\w+)")


@dataclass(frozen=True)
class TriedEdits:
    """Edits of the user's code with which the failing call runs."""

    edits: tuple[LineEdit, ...]
    ran: str  # what of the code has run with them

    def __str__(self) -> str:
        where = listed([f"{Path(edit.file).name}:{edit.first}" for edit in self.edits])
        lines = (indent(dedent(edit.text), "  ") for edit in self.edits)
        return "\n".join([f"tried, and {self.ran}, in place of {where}:", *lines])


@dataclass(frozen=True)
class DtypeError:
    where: str
    text: str
    operands: tuple[Named, ...]  # by their names in the code of the user, or else in the call
    notes: tuple[str, ...]  # why autocast did not cast
    cures: tuple[TriedEdits, ...]
    inside: tuple[str, ...] = ()  # line of a package that fails, called there, and its text

    def __str__(self) -> str:
        lines = [f"the tensors that the error is about, at {self.where}:", f"> {self.text}"]
        if self.inside:
            where, text = self.inside
            lines += [f"which calls {where}:", f"> {text}"]
        lines += [f"  {operand}" for operand in self.operands]
        return "\n".join([*lines, *self.notes, *map(str, self.cures)])


_NOTE = "halfstep: the tensors that the error is about"


def is_explained(error: BaseException) -> bool:
    """Return whether an error has an explanation as a note."""
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def add_explanation(error: BaseException) -> None:
    """Add the explanation of an error about dtypes to the error, once, as a note."""
    if (found := explain(error)) is not None:
        error.add_note(f"halfstep: {found}")


def explain(error: BaseException) -> DtypeError | None:
    """Explain an error of PyTorch about dtypes; None for others, or if no operand is known.

    None too for one that has its explanation as a note. The failing call is tried again with other
    dtypes. Sync: that of the call.
    """
    if is_about_dtypes(error) and not is_explained(error):
        with suppress(Exception), ExitStack() as stack:  # of the user's objects that are read
            stack.callback(RandomStates(accelerators()).restore)
            return _explained(error)
    return None


def _explained(error: BaseException) -> DtypeError | None:
    in_backward = _IN_BACKWARD.search(str(error))
    calls = calls_of(error.__traceback__)
    users = [call for call in calls if call.is_users]
    if not users:
        return None
    user, made = users[-1], None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        contexts = contexts_of(calls)
        for context in contexts:
            if context.is_here:
                stack.enter_context(context.context)
        # The innermost call that names tensors: a check of PyTorch may raise, in Python.
        inner = [c for c in reversed(calls[calls.index(user) :]) if not c.is_between]
        integers, one, wanted = is_about_integers(error), is_about_one(error), wanted_by(error)
        named = [[*call.tensors(with_integers=integers)] for call in inner]
        found = failing = next(filter(None, named), [])
        if in_backward and _is_one_dtype(found):
            made = rest.differentiated(calls, user)
            found = [*made.tensors()] if made is not None else []
        elif _is_one_dtype(found) and not one:  # another call may show more of them
            found = next((each for each in named if not _is_one_dtype(each)), failing)
        own = next((call for call in reversed(users) if not call.is_of_package), user)
        names = (users, own) if made is None else ([made], made)
        operands = tuple(_operand(each, calls, *names, integers) for each in found)
        hidden = None if one or in_backward else _hidden_dtype(found, str(error))
        if not found or (_is_one_dtype(found) and not one and hidden is None):
            return None
        function = _function_of(calls)
        notes = tuple(_why_not_cast(contexts, operands[0].tensor.device.type, function))
        if hidden is not None:
            notes += (f"a tensor that the traceback does not show is {dtype_name(hidden)}",)
        if "without overflow" in str(error):
            notes += tuple(_what_fits(own, operands[0]))
        failing_call = made or (user if user.has_no_effects else inner[0])
        callers = (c for c in reversed(users) if not c.is_of_package)
        # A write to the cast of an argument is lost if the result is not used.
        used = (c for c in callers if not any(isinstance(n, ast.Expr) for n in c.around()[1:2]))
        at = ((c, rest.evaluated(c).tensors(with_integers=integers)) for c in used)
        levels = ((_Failing(c, c, function, hidden), [*named]) for c, named in at)
        tried = list[Edits]()
        if made or user.has_no_effects or found is failing:
            tried += _cures(_Failing(failing_call, made or own, function, hidden), operands, wanted)
        for level in () if tried else (each for each in levels if each[1]):
            tried += [] if tried else _cures(*level, wanted)
        tried.sort(key=lambda edits: not isinstance(next(iter(edits)), FUNCTIONS))
    cures = rest.ordered(tried, calls, user, made or own)
    files = [call.place.code.co_filename for call in users if not call.is_of_package]
    lines = [TriedEdits(edited_lines(edits, files), ran) for edits, ran in cures]
    inside = () if own is user else _told(user)
    return DtypeError(*_told(own), operands, notes, tuple(c for c in lines if c.edits), inside)


def _is_one_dtype(found: list[Named]) -> bool:
    return len({each.tensor.dtype for each in found}) < 2


def _hidden_dtype(found: list[Named], message: str) -> torch.dtype | None:
    """Return the other dtype of a message if all tensors have one of its two dtypes."""
    words = re.findall(r"\b(Half|BFloat16|Float|Double)\b", message)
    said = {getattr(torch, word.lower()) for word in words}
    others = said - {each.tensor.dtype for each in found}
    return others.pop() if len(said) == 2 and len(others) == 1 and _is_one_dtype(found) else None


def _told(call: Call) -> tuple[str, str]:
    line = call.place.line
    return f"{Path(line.file).name}:{line.number}", line.text


# --- operands -------------------------------------------------------------------------------------


def _operand(
    named: Named, calls: list[Call], users: list[Call], line: Call, with_integers: bool
) -> Named:
    """Name an operand as the user's or a package's line does, else as a member of a module."""
    given = [(t, of) for of in (line, users[-1]) for t in of.tensors(with_integers=with_integers)]
    same = [(each, of) for each, of in given if _is_it(each, named.tensor)]
    same.sort(key=lambda each: each[0].tensor.shape != named.tensor.shape)  # not ``h`` for ``h.T``
    own, of = next(iter(same), (None, users[-1]))
    known = own or named
    within = [*of.within(known)]
    for each in within:
        member, kind = member_of(each.tensor, calls)
        if member:
            origin = f"a {kind}, {member}" if own else f"a {kind}"
            return known._replace(name=own.name if own else member, origin=origin)
    of_line = [c for c in users if line.is_of_package or not c.is_of_package]
    origins = (origin_of(each, of_line) for each in within)
    return known._replace(origin=next(filter(None, origins), ""))


def _is_it(known: Named, tensor: Tensor) -> bool:
    """Return whether PyTorch has been given a known tensor, perhaps in another shape."""
    if known.tensor is tensor:
        return True
    kinds = {(each.layout, each.dtype, each.numel()) for each in (tensor, known.tensor)}
    if len(kinds) > 1 or tensor.layout is not torch.strided:
        return False
    other = known.tensor.reshape(tensor.shape)
    is_result = isinstance(known.node, _RESULTS)
    return is_same_view(tensor, other) or (is_result and torch.equal(tensor, other))


# --- why autocast did not cast --------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A ``torch.autograd.Function`` without the decorators of autocast, in the failing frames."""

    kind: Any
    is_backward: bool

    def with_decorators(self, device: str, cast: torch.dtype | None = None) -> Edits:
        """Return the decorators of autocast on its methods."""
        given = f'device_type="{device}"' + (f", cast_inputs={cast}" if cast else "")
        names = ("forward", "backward") if self.is_backward else ("forward",)
        texts = {"forward": "custom_fwd", "backward": "custom_bwd"}
        codes = {name: getattr(self.kind, name).__code__ for name in names}
        return {function_of(c): f"@halfstep.{texts[n]}({given})\n{{}}" for n, c in codes.items()}


def _function_of(calls: list[Call]) -> _Function | None:
    for call in (call for call in reversed(calls) if call.is_users):
        function = autograd.function_without_autocast(next(iter(call.local.values()), None))
        if function is not None:
            return _Function(function, call.place.code.co_name != "forward")
    return None


def _why_not_cast(
    contexts: list[Context], device: str, function: _Function | None
) -> Iterator[str]:
    is_on = torch.is_autocast_enabled(device)
    if function is not None and function.is_backward and not is_on:
        name = function.kind.__name__
        yield f"{name}.backward has no custom_bwd: it is outside of its forward's autocast"
    elif function is not None and is_on:
        yield f"{function.kind.__name__}.forward has no custom_fwd: its arguments come as they are"
    here = [context for context in contexts if context.is_here]
    others = [c for c in contexts if not c.is_here and c.switches.enabled]
    if is_on:
        return
    if here and here[-1].switches.device == device:
        yield f"autocast is off here: {here[-1].text}"
    elif any(other.switches.device == device for other in others):
        yield f"autocast is off here: another thread entered it ({others[-1].text})"
    elif here:
        yield f"autocast is off here: {here[-1].text} is not for {device}"


def _what_fits(line: Call, operand: Named) -> Iterator[str]:
    """Yield, for each number of a line that the dtype of an operand cannot hold, one that fits."""
    info = torch.finfo(operand.tensor.dtype)
    for node in ast.iter_child_nodes(line.node or ast.Module([], [])):
        given, number = node.value if isinstance(node, ast.keyword) else node, None
        with suppress(Exception):
            number = line.value(given)
        if isinstance(number, (int, float)) and info.max < abs(number):
            end = "min" if number < 0 else "max"
            yield (
                f"{ast.unparse(given)} does not fit: {dtype_name(operand.tensor.dtype)} ends at "
                f"{info.max:,.0f}. torch.finfo({operand.name}.dtype).{end} does"
            )


# --- cures ----------------------------------------------------------------------------------------


class _Failing(NamedTuple):
    """A failing call of a line of the user, and casts in both with which it fails otherwise."""

    call: Call
    line: Call
    function: _Function | None
    hidden: torch.dtype | None  # dtype of a tensor that is no operand, if there is one
    in_call: Edits = {}  # noqa: RUF012  (never written to)
    in_line: Edits = {}  # noqa: RUF012

    def with_casts(self, wrong: Sequence[Named], text: str) -> _Failing:
        edits = tried = casts_of([each.name for each in wrong], self.line, text)
        if self.call is not self.line:
            dtypes = {each.tensor.dtype for each in wrong}
            given = self.call.tensors(with_integers=True)
            names = (each.name for each in given if each.tensor.dtype in dtypes)
            tried = casts_of(names, self.call, text)
        in_call, in_line = {**self.in_call, **tried}, {**self.in_line, **edits}
        return self._replace(in_call=in_call, in_line=in_line)

    def error(self, context: str = "") -> Exception | None:
        return error_of(self.call, self.in_call, context)


def _cures_of_one(
    failing: _Failing, operands: Sequence[Named], wanted: torch.dtype
) -> Iterator[Edits]:
    """Yield a cast of one operand, labels without their column, or another order of arguments.

    With each, a call runs. Values are cast to integers and masks only if these hold them exactly.
    A cast with which it fails in another way is kept, and the others are cast, too.
    """
    call, line = failing.call, failing.line
    floats = [o.tensor.dtype for o in operands if o.tensor.is_floating_point()]
    dtype = floats[0] if wanted is torch.float32 and floats else wanted
    texts = [cast_to(dtype)]
    texts += ["{}.squeeze(1)", "{}.squeeze(1).long()"] if wanted is torch.int64 else []
    before, further = str(failing.error()), list[Iterator[Edits]]()
    for text, operand in product(texts, reversed(operands)):
        tensor = operand.tensor
        is_rounded = wanted in (torch.int64, torch.bool) and tensor.is_floating_point()
        is_exact = not is_rounded or torch.equal(tensor, tensor.to(wanted).to(tensor.dtype))
        if not is_exact or ("squeeze" not in text and tensor.dtype is dtype):
            continue
        cast = failing.with_casts([operand], text)
        error = cast.error()
        if error is None and cast.in_line:
            yield cast.in_line
            return
        if error is not None and is_about_dtypes(error) and str(error) != before:
            rest = [each for each in operands if each is not operand]
            further.append(_cures(cast, rest, wanted_by(error)))
    variables = [each.name for each in operands if call is line and each.name.isidentifier()]
    for one, other in combinations(variables, 2):
        swapped = {**casts_of([one], line, other), **casts_of([other], line, one)}
        if len({*swapped.values()}) == 2 and error_of(call, swapped) is None:
            yield swapped
            return
    yield from next(filter(None, map(list, further)), [])


def _cures(
    failing: _Failing, operands: Sequence[Named], of_one: torch.dtype | None
) -> Iterator[Edits]:
    """Yield changes of a line with which a failing call runs; its error wants ``of_one``."""
    if of_one and (found := [*_cures_of_one(failing, operands, of_one)]):
        yield from found
        return
    call, line, function, hidden, _, kept = failing
    tensors = [operand.tensor for operand in operands]
    dtypes = [tensor.dtype for tensor in tensors]
    name, written = call.name_and_written
    kinds = [d for d in dtypes if d.is_complex] or [d for d in dtypes if d.is_floating_point]
    floats = {dtype: kinds.count(dtype) for dtype in kinds}
    fixed = [t for t in tensors if t is written or isinstance(t, nn.Parameter)]
    fixed = sorted((t for t in fixed if t.dtype in floats), key=lambda t: t is not written)
    each_wanted = sorted(floats, key=lambda dtype: -torch.finfo(dtype).bits)[:1]
    if written is not None and not (written.is_floating_point() or written.is_complex()):
        is_exact = all(torch.equal(t, t.to(written.dtype).to(t.dtype)) for t in tensors)
        each_wanted = [written.dtype][:is_exact]  # integers that would be rounded are left
    elif len(set(dtypes)) == 1:
        each_wanted = [hidden or torch.float32]
    elif fixed:
        each_wanted = [fixed[0].dtype]
    elif len(floats) == 2 and floats[each_wanted[0]] == 1 < max(floats.values()):
        each_wanted.insert(0, max(floats, key=floats.__getitem__))  # that changes one tensor
    others = [dtype for dtype in floats if dtype not in each_wanted]  # if nothing else is offered
    device, is_offered = tensors[0].device.type, False
    is_on, policy = torch.is_autocast_enabled(device), current_policy(device)
    for wanted in (*each_wanted, *others):
        wrong, text = [o for o in operands if o.tensor.dtype is not wanted], cast_to(wanted)
        has_names = all(casts_of([each.name], line, text) for each in wrong)
        if wanted in others and (is_offered or not has_names):
            continue
        # What is written is cast, but an index is not.
        ways = [wrong, *([each] for each in wrong[: len(wrong) * (written is not None)])]
        cast = next((c for w in ways if (c := failing.with_casts(w, text)).error() is None), None)
        if cast is None:
            continue
        if cast.in_line:
            is_offered = True
            yield cast.in_line
        if function is not None and not function.is_backward and is_on:
            yield function.with_decorators(device, wanted)
    lower = next((d for d in dtypes if d in (torch.float16, torch.bfloat16)), None)
    rule = f"{policy}; {name}:fp32"
    for rules in (None, rule)[: 0 if lower is None else 2 if is_on and policy else 1]:
        arguments = f'"{device}", {lower}' + ("" if rules is None else f', policy="{rules}"')
        for whose in ("halfstep",) if rules else ("torch", "halfstep"):
            text = f"{whose}.autocast({arguments})"
            if failing.error(text) is None:
                yield {**kept, line.statement: f"with {text}:\n    {{}}"}
                if function is not None and function.is_backward:
                    yield function.with_decorators(device)
                break


# --- the lines ------------------------------------------------------------------------------------


def edited_lines(edits: Edits, files: Iterable[str]) -> tuple[LineEdit, ...]:
    """Return the changed lines of files; none if one of them cannot be changed so."""
    found: list[LineEdit] = []
    for file in dict.fromkeys(files):
        source = Source(file)
        if own := {node: text for node, text in edits.items() if node in source.tree.parents}:
            if not all(map(source.put, own, own.values())) or not (lines := source.edited()):
                return ()
            found += lines
    return tuple(found)
