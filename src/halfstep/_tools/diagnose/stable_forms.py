"""Stable forms of formulas: log(softmax(x)) is log_softmax(x), log(1 + exp(x)) is softplus(x).

A formula is a chain of the user's calls, one of which overflows or returns 0. Its stable form
follows from the calls by the rules of logarithms. In exact arithmetic it has the values and the
gradients of the formula; a clamp changes both where it applies.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from halfstep._common.nested import tensors_in
from halfstep._pytorch import autograd, modes
from halfstep._tools.diagnose.changes import Placed, Rewrite, Slot, parameters_of
from halfstep._tools.diagnose.edits import row_name, writes_to_first
from halfstep._tools.diagnose.user_calls import UserCall
from halfstep._tools.source import Filled
from halfstep._tools.user_code import torch_modules, user_place, user_spot

# --- rules ----------------------------------------------------------------------------------------

_LOGS = {
    "exp": ("input", "input"),
    "softmax": ("input dim dtype", "torch.log_softmax(input, dim, dtype=dtype)"),
    "sigmoid": ("input", "F.logsigmoid(input)"),
    "cosh": ("input", f"torch.logaddexp(input, -input) - {math.log(2)}"),
    "sum": ("input dim keepdim", "torch.logsumexp(L(input), dim, keepdim=keepdim)"),
    "mean": (
        "input dim keepdim",
        "torch.logsumexp(L(input), dim, keepdim=keepdim) - torch.tensor(L(input).shape[dim]).log()",
    ),
    "masked_fill": ("input mask value", "L(input).masked_fill(mask, L(value))"),
    "trace": ("input", "torch.logsumexp(L(input).diagonal(), 0)"),
    "prod": ("input dim keepdim", "L(input).sum(dim, keepdim=keepdim)"),
    "cumsum": ("input dim", "torch.logcumsumexp(L(input), dim)"),
    "cumprod": ("input dim", "torch.cumsum(L(input), dim)"),
    "mul": ("input other", "L(input) + L(other)"),
    "div": ("input other", "L(input) - L(other)"),
    "rdiv": ("input other", "L(other) - L(input)"),
    "reciprocal": ("input", "-L(input)"),
    "add": ("input other", "torch.logaddexp(L(input), L(other))"),
    "det": ("input", "torch.linalg.slogdet(input).logabsdet"),
}
"""The arguments of functions, and the logarithms of their results; ``L`` is that of an argument."""
_OF_ALL = {
    "sum": "torch.logsumexp(L(input).flatten(), 0)",
    "mean": "torch.logsumexp(L(input).flatten(), 0) - torch.tensor(L(input).numel()).log()",
    "prod": "L(input).sum()",
}
"""The logarithms of reductions over all dimensions."""
_ROOTS = {
    "log": ("input", "L(input)"),
    "log2": ("input", f"L(input) / {math.log(2)}"),
    "log1p": ("input", "F.softplus(L(input))"),
    "logdet": ("input", "torch.linalg.slogdet(input).logabsdet"),
    "div": ("input other", "torch.exp(L(input) - L(other))"),
    "rdiv": ("input other", "torch.exp(L(other) - L(input))"),
    "reciprocal": ("input", "torch.exp(-L(input))"),
}
"""The arguments of functions that end a formula, and the stable forms."""
_SELECT = {
    *("getitem", "gather", "index_select", "masked_select", "take_along_dim", "select", "narrow"),
    *("squeeze", "unsqueeze", "view", "reshape", "flatten", "transpose", "permute", "expand"),
    *("diag", "diagonal", "t", "roll", "flip", "contiguous", "float", "double", "clone"),
}
"""Functions that only move entries; the logarithm passes through them."""
_JOIN = {"cat", "concat", "concatenate", "stack"}
"""Functions that join a sequence of tensors; the logarithm is that of each."""
_WITHOUT_DIAGONAL = (
    "torch.logsumexp(L(input).masked_fill(torch.eye(len(L(input)), dtype=torch.bool), -torch.inf), "
    "dim, keepdim=keepdim)"
)
"""The logarithm of the sum of a square matrix minus its diagonal."""
_SAME = {"multiply": "mul", "rmul": "mul", "divide": "div", "true_divide": "div", "truediv": "div"}
_SAME |= {"rtruediv": "rdiv", "radd": "add", "expit": "sigmoid"}
_DETERMINANTS = {"det", "logdet"}
_FAR = {"exp", "softmax", "sigmoid", "cosh", "prod"} | _DETERMINANTS
"""The functions whose results are often out of range; a formula without one is left as it is."""
_SIMPLER = [
    (ast.parse(formula, mode="eval").body, ast.parse(simpler, mode="eval").body)
    for formula, simpler in (
        ("x - torch.logsumexp(x, d, keepdim=True)", "torch.log_softmax(x, d)"),
        ("torch.exp(torch.log_softmax(x, d))", "torch.softmax(x, d)"),
        ("x.diagonal() - torch.logsumexp(x, d)", "torch.log_softmax(x, d).diagonal()"),
        ("x.diag() - torch.logsumexp(x, d)", "torch.log_softmax(x, d).diag()"),
        ("0.0 - x", "-x"),
        ("x + 0.0", "x"),
        ("x - 0.0", "x"),
        ("--x", "x"),
        ("-F.softplus(x)", "F.logsigmoid(-x)"),
        ("x - F.softplus(x)", "F.logsigmoid(x)"),
        ("torch.exp(F.logsigmoid(x))", "torch.sigmoid(x)"),
    )
]
_SMALLEST_TERM = 1e-4
"""The largest number that was added only to keep a logarithm from 0; a stable form needs none."""
_FLOORS = {"clamp", "clamp_min", "clip"}
"""Functions that raise numbers to a smallest one, of which the same holds."""
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""The names that NumPy gives to arguments, and those that PyTorch gives them."""
_WITHOUT_EFFECT = (None, False, 1)
"""The defaults of further arguments, such as ``rounding_mode`` and ``alpha``."""


_INNER = {*_LOGS, *_SELECT, *_JOIN, *_FLOORS, "rsub", "sub"}
"""The functions through which the logarithm passes."""


def may_be_in_formula(function: str) -> bool:
    return _name_of(function) in {*_INNER, *_ROOTS}


def _name_of(function: str) -> str:
    name = row_name(function)
    return _SAME.get(name, name)


class _NoForm(Exception):  # noqa: N818  (control flow, not an error)
    """A formula has no stable form that the rules give."""


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    """Call of a function by the user's code."""

    user_call: UserCall
    placed: Placed
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: dict[int, int]  # of tensors among its arguments, by id

    def is_again(self, other: _Call) -> bool:
        """Return whether this is another call at the same instruction."""
        return self is not other and self.user_call.is_at(other.user_call)

    def arguments(self, names: str) -> dict[str, _Argument]:
        """Return the arguments by name; those that are not given are None."""
        known = names.split()
        slots: dict[str, Slot] = {name: slot for slot, name in enumerate(known)}
        slots |= {_OF_NUMPY.get(name, name): name for name in self.kwargs}
        named = {_OF_NUMPY.get(name, name): value for name, value in self.kwargs.items()}
        given = dict(zip(known, self.args, strict=False)) | named
        others = [each for name, each in given.items() if name not in (*known, "_stacklevel")]
        others += self.args[len(known) :]
        if any(isinstance(value, Tensor) or value not in _WITHOUT_EFFECT for value in others):
            raise _NoForm
        return {name: _Argument(given.get(name), self, slots[name]) for name in known}


class _Argument(NamedTuple):
    value: Any
    call: _Call
    slot: Slot

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, (int, float)) and not isinstance(self.value, bool)

    @property
    def is_written_out(self) -> bool:
        """Whether the value is an expression without names, the same in every step."""
        return _has_text(self.value) and self.placed.is_written_out

    @property
    def placed(self) -> Placed:
        return replace(self.call.placed, slot=self.slot)


class _Result(NamedTuple):
    call: _Call
    tensor: Tensor
    version: int


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """Return a call by the user's code that is running; None if no user's code is running."""
    place, spot, function = user_place(), user_spot(), func.__name__
    if place is None or spot is None:
        return None
    module = next(iter(torch_modules()), "")
    placed = Placed(spot, function, 0, parameters=parameters_of(func), module=module)
    versions = {id(tensor): autograd.version_of(tensor) for tensor in tensors_in([args, kwargs])}
    user_call = UserCall(place, function, range(0))
    return _Call(user_call, placed, _name_of(function), args, kwargs, versions)


class StableForm(NamedTuple):
    """Stable form of a formula."""

    root: UserCall  # call that ends the formula
    rewrite: Rewrite
    values: dict[str, Any]  # by the names in the expression

    def evaluated(self) -> Any:
        names = {"torch": torch, "F": functional, **self.values}
        return eval(ast.unparse(self.rewrite.tree), names)


class Formulas(TorchFunctionMode):
    """Function mode that finds the stable forms of formulas, and applies some of them."""

    def __init__(self, applied: Sequence[UserCall]) -> None:
        super().__init__()
        self._applied = applied  # calls that return the values of stable forms
        self._made: dict[int, _Result] = {}
        self._found: list[_Derivation] = []

    def around(self, bad: UserCall) -> list[list[StableForm]]:
        """Return the stable forms with a call that are not applied yet, to be applied in turn.

        All that are in no other come first, then each alone, the outer ones first.
        """
        found = [each for each in reversed(self._found) if each.has(bad)]
        new = [each for each in found if not self._is_applied(each.form.root)]
        outer = [e for e in new if not any(o.has(e.form.root) for o in found if o is not e)]
        ways = [*([outer] if outer[1:] else []), *([each] for each in new)]
        return [[each.form for each in way] for way in ways]

    def _is_applied(self, root: UserCall) -> bool:
        return any(root.is_at(each) for each in self._applied)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, function = kwargs or {}, getattr(func, "__name__", "")
        is_new = may_be_in_formula(function) and not function.startswith("__i")
        is_new &= not writes_to_first(function)
        call = _called(func, args, kwargs) if is_new else None
        form = None if call is None else self._form(call)
        if form is not None and self._is_applied(form.root):
            result = form.evaluated()
        else:
            result = func(*args, **kwargs)
        # Such as x.contiguous(), a tensor may be its own result.
        if call is not None and isinstance(result, Tensor) and id(result) not in call.versions:
            self._made[id(result)] = _Result(call, result, autograd.version_of(result))
        return result

    def _form(self, call: _Call) -> StableForm | None:
        """Return the stable form of the formula that a call ends, if the rules give one."""
        if call.name not in _ROOTS:
            return None
        with modes.unseen_by_modes():
            try:
                derivation = _Derivation(self._made, call)
            except Exception:  # _NoForm, or a tensor subclass without the ops that the rules need
                return None
        self._found.append(derivation)
        return derivation.form


# --- derivation -----------------------------------------------------------------------------------


class _Derivation:
    """Derivation of the stable form of a formula; raises ``_NoForm`` if the rules give none."""

    def __init__(self, made: dict[int, _Result], root: _Call) -> None:
        self._made, self._root = made, root
        self.parts, self._operands = [root], dict[str, _Argument]()
        names, rule = _ROOTS[root.name]
        tree = self._filled(rule, root.arguments(names))
        if not any(part.name in _FAR for part in self.parts):
            raise _NoForm
        dets = (part.arguments("input") for part in self.parts if part.name in _DETERMINANTS)
        if any(_is_indefinite(each["input"].value) for each in dets):
            raise _NoForm
        tree = _Simplified().visit(tree)
        operands = {name: each.placed for name, each in self._operands.items()}
        rewrite = Rewrite(root.placed, tree, operands, [part.placed for part in self.parts])
        values = {name: each.value for name, each in self._operands.items()}
        self.form = StableForm(root.user_call, rewrite, values)

    def has(self, call: UserCall) -> bool:
        return any(part.user_call.is_at(call) for part in self.parts)

    def _filled(self, rule: str, arguments: Mapping[str, _Argument | ast.expr]) -> ast.expr:
        """Return the expression of a rule; arguments that are not given are left out of it."""

        def of_name(name: str) -> ast.expr | None:
            given = arguments.get(name)
            return self.operand(given) if isinstance(given, _Argument) else given

        def of_log(name: str) -> ast.expr:
            given = arguments[name]
            assert isinstance(given, _Argument)
            return self.log(given)

        filled: ast.expr = _WithLogs(of_name, of_log).visit(ast.parse(rule, mode="eval").body)
        for call in ast.walk(filled):
            if isinstance(call, ast.Call):
                call.keywords = [k for k in call.keywords if getattr(k.value, "value", True)]
        return filled

    def operand(self, given: _Argument) -> ast.expr:
        value = given.value
        if given.is_written_out:
            return ast.Constant(value)
        known = {id(each.value): name for name, each in self._operands.items()}
        if isinstance(value, Tensor):
            _check(given.call.versions.get(id(value)) == autograd.version_of(value))
            if id(value) in known:
                return ast.Name(known[id(value)])
        name = f"v{len(self._operands)}"
        self._operands[name] = given
        return ast.Name(name)

    def log(self, given: _Argument) -> ast.expr:
        """Return the expression of the logarithm of an argument."""
        if given.is_number:
            _check(given.value >= 0)
            if given.is_written_out and given.value == 0:
                return ast.parse("-torch.inf", mode="eval").body
            if given.is_written_out:
                return ast.Constant(math.log(given.value))
            return self._filled("torch.tensor(input).log()", {"input": given})
        _check(isinstance(given.value, Tensor))
        before = len(self.parts)
        call = self._maker(given)
        if call is None:
            return self._of_outside(given)
        try:
            return self._of_call(call)
        except _NoForm:
            if given.value.requires_grad:
                raise
            del self.parts[before:]
            return self._of_outside(given)

    def _of_call(self, call: _Call) -> ast.expr:
        """Return the expression of the logarithm of the result of a call."""
        if call.name in _SELECT:
            return self._of_selection(call, self.log)
        if call.name == "rsub":
            arguments = call.arguments("input other")
            _check(arguments["other"].value == 1 and arguments["other"].is_written_out)
            return self._of_rest(arguments["input"])
        if call.name in _JOIN:
            return self._of_joined(call)
        if call.name == "sub":
            return self._of_difference(call)
        if call.name in _FLOORS:
            return self._of_floor(**call.arguments("input min max"))
        names, rule = _LOGS[call.name]
        arguments = call.arguments(names)
        if call.name in _OF_ALL and arguments["dim"].value is None:
            rule = _OF_ALL[call.name]
        terms = [argument for argument in arguments.values() if argument.is_number]
        if call.name == "add" and terms:
            (other,) = (argument for argument in arguments.values() if argument is not terms[0])
            return self._of_sum(other, terms[0])
        return self._filled(rule, arguments)

    def _maker(self, given: _Argument) -> _Call | None:
        """Return the call that made a tensor; None if the rules take the tensor as it is."""
        value = given.value
        made = self._made.get(id(value))
        if made is None or made.version != autograd.version_of(value):
            return None
        is_constant = not value.requires_grad and bool((value > 0).all())
        if made.call.name not in _INNER or is_constant:
            return None
        _check(not any(made.call.is_again(part) for part in self.parts))  # the body of a loop
        self.parts.append(made.call)
        return made.call

    def _of_outside(self, given: _Argument) -> ast.expr:
        """Return the logarithm of a tensor that is not part of the formula, such as a mask."""
        value = given.value
        _check(given.call is not self._root and bool((value >= 0).all()))
        is_safe = self._root.name.startswith("log") and bool((value > 0).all())
        _check(is_safe or not value.requires_grad)
        return self._filled("torch.log(input)", {"input": given})

    def _of_sum(self, given: _Argument, term: _Argument) -> ast.expr:
        """Return the logarithm of a tensor plus a number."""
        log, of_term = self.log(given), self.log(term)
        if term.value <= _SMALLEST_TERM:
            return log
        rule = "F.softplus(input - other) + other"
        return self._filled(rule, {"input": log, "other": of_term})

    def _of_floor(self, input: _Argument, min: _Argument, max: _Argument) -> ast.expr:
        """Return the logarithm of a tensor that is kept from 0, and from 1, by little."""
        _check(min.is_number and 0 <= min.value <= _SMALLEST_TERM)
        _check(max.value is None or (max.is_number and 0 <= 1 - max.value <= _SMALLEST_TERM))
        return self.log(input)

    def _of_rest(self, given: _Argument) -> ast.expr:
        """Return the logarithm of 1 - x, where x is a sigmoid."""
        made = self._made.get(id(given.value))
        if made is not None and made.call.name in _SELECT:
            self.parts.append(made.call)
            return self._of_selection(made.call, self._of_rest)
        match _Simplified().visit(self.log(given)):
            case ast.Call(ast.Attribute(ast.Name("F"), "logsigmoid"), [of]):
                return self._filled("F.logsigmoid(-input)", {"input": of})
        raise _NoForm

    def _of_joined(self, call: _Call) -> ast.expr:
        """Return the logarithm of tensors that are joined, all of which the formula makes."""
        arguments = call.arguments("tensors dim")
        makers = [self._maker(_Argument(each, call, 0)) for each in arguments["tensors"].value]
        logs = ast.List([self._of_call(each) for each in makers if each is not None])
        _check(len(logs.elts) == len(makers))
        dim = arguments["dim"]
        rest = [] if dim.value is None else [ast.keyword("dim", self.operand(dim))]
        return ast.Call(ast.Attribute(ast.Name("torch"), call.name), [logs], rest)

    def _of_difference(self, call: _Call) -> ast.expr:
        """Return the logarithm of the sums of the rows of a matrix minus its diagonal."""
        arguments = call.arguments("input other")
        total, diagonal = (self._maker(arguments[name]) for name in ("input", "other"))
        if total is None or diagonal is None:
            raise _NoForm
        _check(total.name == "sum" and diagonal.name in ("diagonal", "diag"))
        of, matrix = total.arguments("input dim keepdim"), diagonal.args[0]
        _check(of["dim"].value is not None and not diagonal.args[1:])
        _check(of["input"].value is matrix and matrix.dim() == 2 and not diagonal.kwargs)
        rule = _WITHOUT_DIAGONAL
        if matrix.device.type != "cpu":
            rule = rule.replace("torch.bool", "torch.bool, device=L(input).device")
        return self._filled(rule, of)

    def _of_selection(self, call: _Call, log: Callable[[_Argument], ast.expr]) -> ast.expr:
        """Return the logarithm of the result of a function that moves entries."""
        of, *others = (_Argument(value, call, slot) for slot, value in enumerate(call.args))
        if call.name == "getitem":
            return ast.Subscript(log(of), self.operand(others[0]))
        rest = [self.operand(other) for other in others]
        named = [
            ast.keyword(name, self.operand(_Argument(value, call, name)))
            for name, value in call.kwargs.items()
        ]
        return ast.Call(ast.Attribute(log(of), call.name), rest, named)


class _WithLogs(Filled):
    """Expression with others in place of its names and of its calls of ``L``."""

    def __init__(
        self, of_name: Callable[[str], ast.expr | None], of_log: Callable[[str], ast.expr]
    ) -> None:
        super().__init__(of_name)
        self._of_log = of_log

    def visit_Call(self, node: ast.Call) -> ast.expr:  # noqa: N802 - the name is that of `ast`
        match node:
            case ast.Call(ast.Name("L"), [ast.Name(name)]):
                return self._of_log(name)
        self.generic_visit(node)
        return node


class _Simplified(ast.NodeTransformer):
    """Expression in which the functions of PyTorch stand for their own formulas."""

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        for formula, function in _SIMPLER:
            found: dict[str, ast.expr] = {}
            if _matches(formula, node, found):
                return self.visit(Filled(found.get).visit(copy.deepcopy(function)))
        return node


def _matches(formula: Any, node: Any, found: dict[str, ast.expr]) -> bool:
    """Return whether an expression has the form of another, whose names in ``xd`` are free."""
    if isinstance(formula, ast.Name) and formula.id in "xd":
        known = found.setdefault(formula.id, node)
        return ast.dump(known) == ast.dump(node)
    if isinstance(formula, list):
        pairs = zip(formula, node, strict=True)
        return len(formula) == len(node) and all(_matches(*pair, found) for pair in pairs)
    if not isinstance(formula, ast.AST):
        return bool(formula == node)
    fields = (field for field in formula._fields if field != "ctx")
    return type(formula) is type(node) and all(
        _matches(getattr(formula, each), getattr(node, each), found) for each in fields
    )


def _check(is_so: bool) -> None:
    if not is_so:
        raise _NoForm


def _is_indefinite(matrix: Tensor) -> bool:
    """Return whether a covariance has a negative determinant, which has no logarithm. Sync: two.

    That of a matrix that is not symmetric, as in a flow, stands for its absolute value.
    """
    difference, size = (matrix - matrix.mT).abs().amax(), matrix.abs().amax()
    is_symmetric = bool(difference <= 1e-4 * size)
    return is_symmetric and bool((torch.linalg.slogdet(matrix).sign.real < 0).any())


def _has_text(value: Any) -> bool:
    """Return whether the representation of a value is an expression for it."""
    if isinstance(value, tuple):
        return all(map(_has_text, value))
    return value is None or isinstance(value, (bool, int, float, torch.dtype))
