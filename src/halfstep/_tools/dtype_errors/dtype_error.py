"""Explanations of errors about dtypes: the operands of the failing call, and where they are from.

They are read from the frames of the traceback, so nothing has to be recorded before the error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import autocast, current_policy, custom_bwd, custom_fwd
from halfstep._common.formats import dtype_name
from halfstep._common.machine import RandomStates, accelerators
from halfstep._pytorch import autograd
from halfstep._tools.dtype_errors.failing_call import (
    ABOUT_DTYPES,
    Call,
    Context,
    Named,
    called,
    calls_of,
    contexts_of,
    member_of,
    nodes_of,
    origin_of,
)
from halfstep._tools.dtype_errors.rest import Cure, cast_cure, ordered
from halfstep._tools.user_code import is_same_view

_ABOUT_ONE = re.compile(
    "not implemented for|weight dtype|Low precision|Unsupported dtype|float or double dtype"
    "|Expected both inputs|unsupported ScalarType|without overflow|only supported for"
)
_ABOUT_INTEGERS = re.compile(r"unsigned char|long int|\b(Long|Int|Byte)\b")
_DTYPES = {
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
}
_IN_BACKWARD = re.compile(r"Found dtype (\w+) but expected (\w+)")


@dataclass(frozen=True)
class GivenTensor:
    """A tensor of the failing call."""

    name: str  # in the code of the user, or else where the call was made
    tensor: Tensor
    origin: str  # empty if it is not known

    def __str__(self) -> str:
        dtype, shape = dtype_name(self.tensor.dtype), list(self.tensor.shape)
        return f"{self.name}: {dtype} {shape}" + (f", {self.origin}" if self.origin else "")


@dataclass(frozen=True)
class DtypeError:
    """An explanation of an error about dtypes."""

    where: str
    text: str
    operands: tuple[GivenTensor, ...]
    notes: tuple[str, ...]  # why autocast did not cast
    cures: tuple[str, ...]  # tried, and they run
    inside: tuple[str, ...] = ()  # line of a package that fails, called there, and its text

    def __str__(self) -> str:
        lines = [f"the tensors that the error is about, at {self.where}:", f"> {self.text}"]
        if self.inside:
            where, text = self.inside
            lines += [f"which calls {where}:", f"> {text}"]
        lines += [f"  {operand}" for operand in self.operands]
        return "\n".join([*lines, *self.notes, *(f"tried, and it runs: {c}" for c in self.cures)])


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
    is_of_torch = isinstance(error, (RuntimeError, TypeError, ValueError))
    if is_of_torch and ABOUT_DTYPES.search(str(error)) and not is_explained(error):
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
        integers = _ABOUT_INTEGERS.search(str(error)) is not None
        is_about_one = _ABOUT_ONE.search(str(error)) is not None
        named = [[*call.tensors(with_integers=integers)] for call in inner]
        found = failing = next(filter(None, named), [])
        if in_backward and _is_one_dtype(found):
            made, found = _of_loss(users, in_backward)
        elif _is_one_dtype(found) and not is_about_one:  # another call may show more of them
            found = next((each for each in named if not _is_one_dtype(each)), failing)
        own = next((call for call in reversed(users) if not call.is_of_package), user)
        operands = tuple(_operand(each, calls, users, own, integers) for each in found)
        hidden = None if is_about_one or in_backward else _hidden_dtype(found, str(error))
        if not found or (_is_one_dtype(found) and not is_about_one and hidden is None):
            return None
        function = _function_of(calls)
        notes = tuple(_why_not_cast(contexts, operands[0].tensor.device.type, function))
        if hidden is not None:
            notes += (f"a tensor that the traceback does not show is {dtype_name(hidden)}",)
        if "without overflow" in str(error):
            notes += tuple(_what_fits(own, operands[0]))
        again, tried = None, list[Cure]()
        if made or user.has_no_effects:
            again = _again(made or user)
        if again is None and made is None and found is failing:
            again = _again(inner[0])
        if again is not None:
            tried += _cures(again, made or own, operands, function, hidden)
            tried.sort(key=lambda cure: not cure.text.startswith("@"))  # for all of its lines
    is_ordered = made is not None or own is user
    cures = ordered(tried, calls, user, made or user) if is_ordered else [c.text for c in tried]
    if made is not None and isinstance(made.other, ast.Call):
        cures = [f"{cure} at line {made.other.lineno}" for cure in cures]
    where, text = _told(own)
    inside = () if own is user else _told(user)
    return DtypeError(where, text, operands, notes, tuple(cures), inside)


def _is_one_dtype(found: list[Named]) -> bool:
    return len({each.tensor.dtype for each in found}) < 2


def _hidden_dtype(found: list[Named], message: str) -> torch.dtype | None:
    """Return the other dtype of a message if all tensors have one of its two dtypes."""
    said = {dtype for word, dtype in _DTYPES.items() if re.search(rf"\b{word}\b", message)}
    others = said - {each.tensor.dtype for each in found}
    return others.pop() if len(said) == 2 and len(others) == 1 and _is_one_dtype(found) else None


def _told(call: Call) -> tuple[str, str]:
    line = call.place.line
    return f"{Path(line.file).name}:{line.number}", line.text


# --- operands -------------------------------------------------------------------------------------


def _operand(
    named: Named, calls: list[Call], users: list[Call], line: Call, with_integers: bool
) -> GivenTensor:
    """Name an operand as the user's line does, or that of a package, else as a member of a module.

    ``line`` is the last line outside of packages.
    """
    tensors = (
        (tensor, call)
        for call in (line, users[-1])
        for tensor in call.tensors(with_integers=with_integers)
    )
    same = [(each, call) for each, call in tensors if _is_it(each, named.tensor)]
    same.sort(key=lambda each: each[0].tensor.shape != named.tensor.shape)  # not ``h`` for ``h.T``
    own, of = next(iter(same), (None, users[-1]))
    known = own or named
    within = [*of.within(known)]
    for each in within:
        member, kind = member_of(each.tensor, calls)
        if member:
            origin = f"a {kind}, {member}" if own else f"a {kind}"
            return GivenTensor(own.name if own else member, known.tensor, origin)
    of_line = [c for c in users if line.is_of_package or not c.is_of_package]
    origins = (origin_of(each, of_line) for each in within)
    return GivenTensor(known.name, known.tensor, next(filter(None, origins), ""))


def _is_it(known: Named, tensor: Tensor) -> bool:
    """Return whether PyTorch has been given a known tensor, perhaps in another shape."""
    if known.tensor is tensor:
        return True
    if tensor.layout is not torch.strided or known.tensor.layout is not torch.strided:
        return False
    if known.tensor.dtype is not tensor.dtype or known.tensor.numel() != tensor.numel():
        return False
    other = known.tensor.reshape(tensor.shape)
    is_result = isinstance(known.node, (ast.Call, ast.BinOp))
    return is_same_view(tensor, other) or (is_result and torch.equal(tensor, other))


def _of_loss(users: list[Call], found: re.Match[str]) -> tuple[Call | None, list[Named]]:
    """Return the call that made a loss of two dtypes, if it is known, and its tensors.

    The node of autograd that fails still has them.
    """
    wanted = {getattr(torch, word.lower(), None) for word in found.groups()}
    losses = [each for each in users[-1].tensors() if each.tensor.grad_fn is not None]
    made = next((call for loss in losses for call in _made_by(loss.tensor, users)), None)
    names = (made or users[-1]).local
    waiting: list[Any] = [each.tensor.grad_fn for each in losses]
    for node in waiting:
        saved = autograd.saved_by(node)
        if {tensor.dtype for tensor in saved.values()} >= wanted:
            of = re.sub(r"Backward\d*$", "", type(node).__name__)
            named = [_named_in(names, t, f"{name} of {of}") for name, t in saved.items()]
            return made, named + losses[:1]
        waiting += [n for n, _ in node.next_functions if n is not None and n not in waiting]
    return None, losses


def _named_in(names: dict[str, Any], tensor: Tensor, otherwise: str) -> Named:
    tensors = {name: value for name, value in names.items() if isinstance(value, Tensor)}
    same = (name for name, value in tensors.items() if is_same_view(tensor, value))
    return Named(next(same, otherwise), tensor)


def _made_by(tensor: Tensor, users: list[Call]) -> Iterator[Call]:
    """Yield the calls of PyTorch whose result is a variable that has a tensor."""
    for call in users:
        for node in nodes_of(call.place.code):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as value):
                    made = replace(call, other=value)
                    if call.local.get(name) is tensor and made.has_no_effects:
                        yield made


# --- why autocast did not cast --------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A ``torch.autograd.Function`` without the decorators of autocast, in the failing frames."""

    name: str
    is_backward: bool


def _function_of(calls: list[Call]) -> _Function | None:
    for call in (call for call in reversed(calls) if call.is_users):
        function = autograd.function_without_autocast(next(iter(call.local.values()), None))
        if function is not None:
            return _Function(function.__name__, call.place.code.co_name != "forward")
    return None


def _why_not_cast(
    contexts: list[Context], device: str, function: _Function | None
) -> Iterator[str]:
    is_on = torch.is_autocast_enabled(device)
    if function is not None and function.is_backward and not is_on:
        yield f"{function.name}.backward has no custom_bwd: it is outside of its forward's autocast"
    elif function is not None and is_on:
        yield f"{function.name}.forward has no custom_fwd: its arguments come as they are"
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


def _what_fits(line: Call, operand: GivenTensor) -> Iterator[str]:
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

_Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Again:
    """The failing call as a function of what happens to its tensors."""

    name: str
    call: Callable[[_Change], Any]  # writes to a copy of what the failing call writes to
    written: Tensor | None = None


def _cures(
    again: _Again,
    line: Call,
    operands: tuple[GivenTensor, ...],
    function: _Function | None,
    hidden: torch.dtype | None,
) -> Iterator[Cure]:
    """Yield the changes of a line of the user with which the failing call runs.

    ``hidden`` is the dtype of a tensor that is no operand, if there is one.
    """
    tensors = [operand.tensor for operand in operands]
    dtypes = [tensor.dtype for tensor in tensors]
    fixed = [t for t in tensors if t is again.written]
    fixed += [t for t in tensors if isinstance(t, nn.Parameter)]
    floats = {d: dtypes.count(d) for d in dtypes if d.is_floating_point}
    each_wanted = sorted(floats, key=lambda dtype: -torch.finfo(dtype).bits)[:1]
    if len(set(dtypes)) == 1:
        each_wanted = [hidden or torch.float32]
    elif fixed:
        each_wanted = [fixed[0].dtype]
    elif len(floats) == 2 and floats[each_wanted[0]] == 1 < max(floats.values()):
        each_wanted.insert(0, max(floats, key=floats.__getitem__))  # that changes one tensor
    others = [dtype for dtype in floats if dtype not in each_wanted]  # if nothing else is offered
    device, is_offered = tensors[0].device.type, False
    is_on, policy = torch.is_autocast_enabled(device), current_policy(device)
    written = {ast.unparse(node) for node in ast.walk(line.node or ast.Module([], []))}
    for wanted in (*each_wanted, *others):

        def cast(tensor: Tensor, dtype: torch.dtype = wanted) -> Tensor:
            is_known = tensor.is_floating_point() or tensor.dtype in dtypes
            return tensor.to(dtype) if is_known else tensor

        wrong = {o.name: o for o in operands if o.tensor.dtype is not wanted}
        changed = [operand for name, operand in wrong.items() if name in written]
        if wanted in others and (is_offered or len(changed) < len(wrong)):
            continue
        if not _runs(lambda cast=cast: again.call(cast)):  # type: ignore[misc]
            continue
        if changed:
            is_offered = True
            yield cast_cure({operand.name: wanted for operand in changed}, line)
        if function is not None and not function.is_backward and is_on:
            arguments = f'device_type="{device}", cast_inputs={wanted}'
            yield Cure(
                f"@halfstep.custom_fwd({arguments}) on {function.name}.forward",
                decorators={"forward": partial(custom_fwd, device_type=device, cast_inputs=wanted)},
            )
    lower = next((d for d in dtypes if d in (torch.float16, torch.bfloat16)), None)
    rule = f"{policy}; {again.name}:fp32"
    for rules in (None, rule)[: 0 if lower is None else 2 if is_on and policy else 1]:
        halfsteps = partial(autocast, device, lower, policy=rules)
        pytorchs = partial(torch_autocast, device, lower)

        def under_autocast(around: Callable[[], Any]) -> Any:
            with around():
                return again.call(lambda t: t)

        if not _runs(partial(under_autocast, halfsteps)):
            continue
        arguments = f'"{device}", {lower}' + ("" if rules is None else f', policy="{rules}"')
        is_ours = rules is not None or not _runs(partial(under_autocast, pytorchs))
        text = f"the call inside {'halfstep.' * is_ours}autocast({arguments})"
        yield Cure(text, context=halfsteps if is_ours else pytorchs)
        if function is not None and function.is_backward:
            yield Cure(
                f'@halfstep.custom_fwd(device_type="{device}") on {function.name}.forward, '
                f'@halfstep.custom_bwd(device_type="{device}") on {function.name}.backward',
                decorators={
                    "forward": partial(custom_fwd, device_type=device),
                    "backward": partial(custom_bwd, device_type=device),
                },
            )


def _again(failing: Call) -> _Again | None:
    """Return the failing call as a function, if it is simple and writes to no ``out``."""
    with suppress(Exception):
        match failing.node:
            case ast.Assign(targets=[ast.Subscript(value=of, slice=key)], value=given):
                written, index, value = failing.value(of), failing.value(key), failing.value(given)

                def put(change: _Change) -> None:
                    written.clone()[index] = change(value)

                return _Again("index_put_", put, written)
            case ast.Assign(targets=[ast.Attribute(value=of, attr="grad")], value=given):
                written, value = failing.value(of), failing.value(given)

                def assign(change: _Change) -> None:
                    written.detach().requires_grad_().grad = change(value)

                return _Again("grad", assign, written)
            case ast.Call(func=func) as node:
                function = failing.value(func)
                args, named = failing.arguments(node)
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                function, named = torch.matmul, {}
                args = [failing.value(left), failing.value(right)]
            case _:
                return None
        if "out" in named or isinstance(function, (type, torch.ScriptMethod)):  # as an exception
            return None
        name, written = getattr(function, "__name__", "").removeprefix("_"), None  # F.threshold
        if isinstance(own := getattr(function, "__self__", None), Tensor):
            function, args = getattr(Tensor, name), [own, *args]
            written = own if name.endswith("_") else None
        elif name.endswith("_"):  # it may run code of the user
            return None

        def call(change: _Change) -> Any:
            def changed(value: Any) -> Any:
                if written is not None and value is written:
                    return value.clone()
                if isinstance(value, tuple) and hasattr(value, "_fields"):
                    return type(value)(*map(changed, value))
                if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
                    return type(value)(map(changed, value))
                return change(value) if isinstance(value, Tensor) else value

            return called(
                function, [*map(changed, args)], {k: changed(v) for k, v in named.items()}
            )

        def call_and_backward(change: _Change) -> None:
            with torch.enable_grad():
                loss = call(lambda t: change(t.detach().requires_grad_(t.is_floating_point())))
                torch.autograd.backward(loss.sum())

        return _Again(name, call if failing.other is None else call_and_backward, written)
    return None


def _runs(call: Callable[[], Any]) -> bool:
    with suppress(Exception):
        call()
        return True
    return False
