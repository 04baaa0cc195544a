"""The paths through a file or a function: the calls in order, and the known facts on each path.

The walk is an abstract interpretation: each arm of an undecided condition becomes a path,
conditions with the same text are decided together, loops run at most twice, and paths in the same
state are merged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from halfstep._tools.doctor.read_names import Function, NameScope, arguments, dotted, passed_to
from halfstep._tools.doctor.read_sites import (
    Around,
    Inside,
    Names,
    Path,
    Site,
    condition_of,
    forked,
    merged,
)
from halfstep._tools.doctor.read_values import Meaning

MOST_NESTED_CALLS = 5  # the depth to which function calls are followed
MOST_SITES = 5000
"""The largest number of visits for a root, since nested functions can multiply the calls."""

UNKNOWN = -1  # the number of scalings of a value that may or may not be scaled
LOSSES = re.compile(r"loss|cost|err|objective", re.I)
"""A pattern for names that are typical for a loss."""
_OBJECTS = re.compile(r"(opt\w*|optim\w*|scaler)(\[.*\])?$", re.I)
_SCALES = re.compile(r"(?<!logit_)scale", re.I)
"""A pattern for factors that may scale a loss; ``logit_scale`` is a parameter of the model."""
_KEEPING = ("mean", "sum", "to", "float", "squeeze", "view", "reshape", "cuda", "half", "double")
_ADDING = ("sum", "torch.stack", "torch.cat", "torch.mean", "torch.sum", "torch.add", "max", "min")

_NONE: Mapping[str, int] = {}
_EXITS = ("exit", "sys.exit", "quit", "os._exit")
_VISITED = (ast.Call, ast.NamedExpr)
_ENDS = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While


class Here(NamedTuple):
    scope: NameScope
    statement: ast.AST
    inside: Inside

    def within(self, *around: Around) -> Here:
        return self._replace(inside=(*self.inside, *around))


class Walk:
    """A visitor of the calls of a file or a function, and of the functions that it calls.

    The base class lists the calls in order. A subclass tracks states along the paths.

    Args:
        meaning: The meanings of the file's expressions.
        switches: The conditions that decide whether the loss is scaled.
    """

    def __init__(self, meaning: Meaning, switches: Mapping[str, int] = _NONE) -> None:
        self.meaning = meaning
        self._names = meaning.names
        self._left: dict[str, list[Path]] = {"return": [], "break": [], "continue": []}
        self._visits = 0
        self._switches = switches
        self._sites: dict[tuple[ast.Call, Inside], Site] = {}
        self._frames: dict[NameScope, str] = {}

    def run(self, root: ast.Module | Function, *states: Any) -> list[Any]:
        """Visit a root on every path from these states, and return the final states."""
        self._visits = 0
        paths = self._body(root, (), [Path(state) for state in states])
        return list(dict.fromkeys(path.state for path in paths))

    @property
    def sites(self) -> list[Site]:
        """The calls that were visited, in order."""
        return list(self._sites.values())

    # --- hooks for subclasses ---------------------------------------------------------------------

    def matters(self, node: ast.AST, scope: NameScope, ends: tuple[type, ...] = ()) -> bool:
        """Return whether anything inside a statement or function, or ``ends``, changes paths."""
        return True

    def after_call(self, site: Site, path: Path) -> Any:
        return path.state

    def after_assignment(self, key: str, state: Any) -> Any:
        return state

    def after_failure(self, state: Any) -> Any:
        return state

    # --- statements -------------------------------------------------------------------------------

    def _body(self, root: ast.Module | Function, inside: Inside, paths: list[Path]) -> list[Path]:
        scope = self._names.scopes[root]
        if not isinstance(root, ast.Module):
            for decorator in root.decorator_list:
                inside += tuple(self._entered(decorator, scope, is_decorator=True))
        outer, self._left = self._left, {"return": [], "break": [], "continue": []}
        paths = self._block(root.body, Here(scope, root, inside), paths)
        paths, self._left = merged([*paths, *self._left["return"]]), outer
        return paths

    def _block(self, block: list[ast.stmt], here: Here, paths: list[Path]) -> list[Path]:
        for statement in block:
            paths = self._statement(statement, here._replace(statement=statement), paths)
            # Statements after `if a: return` run in the other arm.
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                here = here.within(_arm(statement, 1))
        return paths

    def _statement(self, statement: ast.stmt, here: Here, paths: list[Path]) -> list[Path]:
        binds = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign)
        if not (binds or self.matters(statement, here.scope, _ENDS)):
            return paths
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return paths  # their bodies run when they are called
            case ast.If(test=test, body=body, orelse=orelse):
                paths = self._calls(test, here, paths)
                yes, no = forked(test, paths, self._switches)
                yes = self._block(body, here.within(_arm(statement, 0)), yes)
                no = self._block(orelse, here.within(_arm(statement, 1)), no)
                return merged([*yes, *no])
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement, here, paths)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    paths = self._calls(item.context_expr, here, paths)
                    here = here.within(*self._entered(item.context_expr, here.scope))
                return self._block(body, here, paths)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                done = self._block(body, here, paths)
                caught = self._cases("try", handlers, here, merged([*paths, *done]))
                caught = [replace(p, state=self.after_failure(p.state)) for p in caught]
                done = self._block(orelse, here, done)
                return self._block(final, here, merged([*done, *caught]))
            case ast.Match(subject=subject, cases=cases):
                paths = self._calls(subject, here, paths)
                return merged([*paths, *self._cases("match", cases, here, paths)])
        return self._simple(statement, here, paths)

    def _simple(self, statement: ast.stmt, here: Here, paths: list[Path]) -> list[Path]:
        if self.matters(statement, here.scope, _ENDS):
            paths = self._calls(statement, here, paths)
        for target, given in _bound(statement):
            paths = [self._bind(target, given, here.scope, path) for path in paths]
        paths = [
            replace(path, names=_without("call@", path.names)) if path.names else path
            for path in paths
        ]
        match statement:
            case ast.Return() | ast.Break() | ast.Continue():
                self._left[type(statement).__name__.lower()] += paths
                return []
            case ast.Raise():
                return []
            case ast.Expr(value=ast.Call(func=called)) if dotted(called) in _EXITS:
                return []
        return paths

    def _loop(self, loop: _Loop, here: Here, paths: list[Path]) -> list[Path]:
        """Visit a loop, twice if the first pass changed a state.

        Training loops are assumed to run at least once.
        """
        outer = self._left
        self._left = outer | {"break": [], "continue": []}
        paths = self._calls(loop.test if isinstance(loop, ast.While) else loop.iter, here, paths)
        after: list[Path] = []
        for _ in range(2):
            before = {path.state for path in paths}
            paths = [self._next_pass(loop, here.scope, path) for path in paths]
            paths = self._block(loop.body, here.within(Around("loop", loop)), paths)
            paths = merged([*paths, *self._left["continue"]])
            self._left["continue"] = []
            after = merged([*after, *paths])
            if {path.state for path in paths} <= before:
                break
        after = self._block(loop.orelse, here, after)
        after = merged([*after, *self._left["break"]])
        self._left = outer
        return after

    def _next_pass(self, loop: _Loop, scope: NameScope, path: Path) -> Path:
        facts = {test: arm for test, arm in path.facts.items() if "(" not in test}
        path = replace(path, facts=facts)
        if isinstance(loop, ast.While):
            return path
        return self._bind_element(loop.target, loop.iter, scope, path)

    def _cases(
        self,
        word: str,
        cases: Sequence[ast.ExceptHandler | ast.match_case],
        here: Here,
        paths: list[Path],
    ) -> list[Path]:
        after: list[Path] = []
        line = getattr(here.statement, "lineno", 0)
        for which, case in enumerate(cases, 1):  # 0: no handler runs
            arm = Around("arm", case, arm=(f"{word} {line}", which))
            after += self._block(case.body, here.within(arm), paths)
        return merged(after)

    def _entered(
        self, context: ast.expr, scope: NameScope, is_decorator: bool = False
    ) -> Iterator[Around]:
        if isinstance(context, ast.BoolOp):
            return  # it enters one of its operands, and which one is not known
        autocast = self.meaning.autocast(context, scope)
        if autocast is not None:
            yield Around("autocast", context, autocast, is_decorator=is_decorator)
        grad = self.meaning.switches_grad(context, scope)
        if grad is not None:
            yield Around("grad", context, grad=grad)

    # --- expressions ------------------------------------------------------------------------------

    def _calls(self, node: ast.AST, here: Here, paths: list[Path]) -> list[Path]:
        """Visit the calls in an expression in execution order, inner ones first."""
        match node:
            case ast.Lambda():
                return paths
            case ast.IfExp(test=test, body=body, orelse=orelse):
                paths = self._calls(test, here, paths)
                yes, no = forked(test, paths, self._switches)
                return merged([*self._calls(body, here, yes), *self._calls(orelse, here, no)])
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                here = here.within(Around("loop", node))
                for generator in node.generators:
                    paths = [
                        self._bind_element(generator.target, generator.iter, here.scope, p)
                        for p in paths
                    ]
        for child in self._parts(node):
            paths = self._calls(child, here, paths)
        if isinstance(node, ast.NamedExpr):
            paths = [self._bind(node.target, node.value, here.scope, path) for path in paths]
        return self._call(node, here, paths) if isinstance(node, ast.Call) else paths

    def _parts(self, node: ast.AST) -> list[ast.AST]:
        """Return the children that contain something to visit."""
        found = self._names.parts.get(node)
        if found is None:
            children = ast.iter_child_nodes(node)
            found = [
                child for child in children if isinstance(child, _VISITED) or self._parts(child)
            ]
            self._names.parts[node] = found
        return found

    def _call(self, node: ast.Call, here: Here, paths: list[Path]) -> list[Path]:
        self._visits += 1 + len(paths) // 4
        if self._visits > MOST_SITES:
            return paths
        site = self._sites.setdefault((node, here.inside), Site(node, *here))
        paths = [replace(path, state=self.after_call(site, path)) for path in paths]
        function = self.followed(site)
        return paths if function is None else self._followed(function, site, paths)

    def followed(self, site: Site) -> Function | None:
        """Return the function of this file that a call runs, None if the walk does not enter it."""
        function = self._names.called(site.call, site.scope)
        outer = [around.function for around in site.inside if around.kind == "call"]
        if function is None or function in outer or len(outer) >= MOST_NESTED_CALLS:
            return None
        return function if self.matters(function, self._names.scopes[function]) else None

    def _followed(self, function: Function, site: Site, paths: list[Path]) -> list[Path]:
        call, inner = site.call, self._names.scopes[function]
        frame = f"{function.name}@{call.lineno}/"
        self._frames[inner] = frame
        given = passed_to(function, call)
        for name, value in given.items() if paths else ():
            paths = [self._pass(frame + name, value, site.scope, path) for path in paths]
        around = Around("call", call, function=function)
        paths = self._body(function, (*site.inside, around), paths)
        del self._frames[inner]
        return [_returned(frame, call, path) for path in paths]

    # --- losses -----------------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: NameScope, names: Names) -> int:
        """Return how often a value was multiplied by a scale; -1 if uncertain."""

        def of(part: ast.expr) -> int:
            return self.value(part, scope, names)

        match node:
            case ast.Constant():
                return 0
            case ast.Name() | ast.Attribute():
                return self._named(node, scope, names)
            case ast.Subscript(value=part) | ast.Starred(value=part) | ast.NamedExpr(value=part):
                return of(part)
            case ast.Call():
                return self._returned(node, scope, names)
            case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
                return _added([of(left), of(right)])
            case ast.BinOp(left=left, right=right):
                if "scale" in ast.unparse(node).lower().replace("scaler.scale(", ""):
                    return UNKNOWN
                factors = [of(e) for e in (left, right) if not isinstance(e, ast.Constant)]
                # An unscaled loss times any factor is unscaled; an unknown loss may be scaled.
                return _added([0] if 0 in factors and max(factors) <= 0 else factors)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return _added([of(part) for part in parts])
            case ast.IfExp(body=body, orelse=orelse):
                either = {of(body), of(orelse)}
                return either.pop() if len(either) == 1 else UNKNOWN
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return UNKNOWN if any(of(child) > 0 for child in inner) else 0

    def _named(self, node: ast.Name | ast.Attribute, scope: NameScope, names: Names) -> int:
        key = self.key(node, scope, names)
        found = names.get(key)
        if isinstance(found, int):
            return found
        if "[*]" in key:
            return UNKNOWN
        if isinstance(node, ast.Attribute):
            is_of_other = isinstance(node.value, ast.Name) and node.value.id != "self"
            return self.value(node.value, scope, names) if is_of_other else UNKNOWN
        is_local = node.id in scope.bindings and node.id not in scope.parameters
        return 0 if is_local else UNKNOWN

    def _returned(self, call: ast.Call, scope: NameScope, names: Names) -> int:
        """Return :meth:`value` for the result of a call."""
        found = names.get(_call_key(call))
        if isinstance(found, int):
            return found
        given = arguments(call)
        values = [self.value(each, scope, names) for each in given]
        if isinstance(call.func, ast.Attribute):
            owner, method = call.func.value, call.func.attr
            key = self.key(owner, scope, names)
            if method == "scale" and self.meaning.is_scaler(owner, scope, key):
                return max([0, *values]) + self.meaning.may_be_on(owner, scope)
            if method in _KEEPING and not dotted(call.func).startswith("torch."):
                return self.value(owner, scope, names)
        name = dotted(call.func)
        if name in _ADDING:
            return _added(values)
        is_opaque = any(_SCALES.search(text) for text in (name, *map(dotted, given)))
        return UNKNOWN if is_opaque or any(value > 0 for value in values) else 0

    # --- names ------------------------------------------------------------------------------------

    def key(self, node: ast.expr, scope: NameScope, names: Names) -> str:
        """Return the key of the object that an expression refers to.

        Elements of a sequence that is indexed by a variable or looped over share a key that ends
        in ``[*]``.
        """
        match node:
            case ast.Name(id="self"):
                return "self"
            case ast.Name(id=name):
                key = self._frame(name, scope) + name
            case ast.Attribute(value=value, attr=attribute):
                key = f"{self.key(value, scope, names)}.{attribute}"
            case ast.Subscript(value=value, slice=ast.Constant(value=index)):
                key = f"{self.key(value, scope, names)}[{index!r}]"
            case ast.Subscript(value=value):
                key = f"{self.key(value, scope, names)}[*]"
            case _:
                return ast.unparse(node)
        found = names.get(key)
        return found if isinstance(found, str) else key

    def _frame(self, name: str, scope: NameScope) -> str:
        found = scope.where(name)
        return "" if found is None else self._frames.get(found, "")

    def _own_key(self, target: ast.expr, scope: NameScope, names: Names) -> str:
        """Return the key of the variable itself, not of the object that it refers to."""
        if isinstance(target, ast.Name):
            return self._frame(target.id, scope) + target.id
        if isinstance(target, ast.Attribute):
            return f"{self.key(target.value, scope, names)}.{target.attr}"
        return self.key(target, scope, {})

    def _bind(
        self,
        target: ast.expr,
        value: ast.expr | None,
        scope: NameScope,
        path: Path,
        element: str | int = "",
    ) -> Path:
        """Bind a target to a value, or to an element of the sequence with a key."""
        if isinstance(target, ast.Tuple | ast.List):
            parts: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                parts = value.elts
            elif value is not None:  # all parts of a scaled result count as scaled
                element = self.value(value, scope, path.names)
            for at, (part, of) in enumerate(zip(target.elts, parts, strict=True)):
                inner = f"{element}.{at}" if element and isinstance(element, str) else element
                path = self._bind(part, of, scope, path, inner)
            return path
        names = dict(path.names)
        own = self._own_key(target, scope, names)
        stands_for = element if value is None else self._meant(value, scope, names)
        names.pop(own, None)
        is_tracked = isinstance(stands_for, int) or is_object(stands_for)
        if stands_for and stands_for != own and is_tracked:
            names[own] = stands_for
        elif isinstance(target, ast.Attribute) and LOSSES.search(target.attr):
            names[own] = 0
        facts = _without_mentions(dotted(target), path.facts)
        return Path(self.after_assignment(own, path.state), facts, names)

    def _meant(self, value: ast.expr, scope: NameScope, names: Names) -> str | int:
        """Return the meaning of a name bound to ``value``: another name, or a number."""
        number = self.value(value, scope, names)
        if number > 0 or not isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
            return number
        key = self.key(value, scope, names)
        return key if is_object(key) else number

    def _bind_element(
        self, target: ast.expr, sequence: ast.expr, scope: NameScope, path: Path
    ) -> Path:
        match sequence, target:
            case ast.Call(func=ast.Name(id="zip"), args=args), ast.Tuple(elts=parts) if len(
                args
            ) == len(parts):
                for part, of in zip(parts, args, strict=True):
                    path = self._bind_element(part, of, scope, path)
                return path
            case ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]), ast.Tuple(elts=[at, part]):
                path = self._bind(at, None, scope, path)
                return self._bind_element(part, of, scope, path)
        element = f"{self.key(sequence, scope, path.names)}[*]"
        return self._bind(target, None, scope, path, element)

    def _pass(self, key: str, value: ast.expr, scope: NameScope, path: Path) -> Path:
        return replace(path, names={**path.names, key: self._meant(value, scope, path.names)})


def is_object(key: str) -> bool:
    """Return whether a key is named like an optimizer or a scaler."""
    return bool(_OBJECTS.search(key)) and "(" not in key


def _added(values: Sequence[int]) -> int:
    """Return how often a sum was scaled, given the numbers of its terms."""
    most = max([0, *values])
    return most if most or UNKNOWN not in values else UNKNOWN


def _call_key(call: ast.Call) -> str:
    """Return the name under which a path stores the result of a call."""
    return f"call@{call.lineno}:{call.col_offset}"


def _returned(frame: str, call: ast.Call, path: Path) -> Path:
    names = dict(_without(frame, path.names))
    returned = names.pop("return", 0)
    return replace(path, names=names | {_call_key(call): returned})


def _without(prefix: str, names: Names) -> Names:
    return {key: value for key, value in names.items() if not key.startswith(prefix)}


def _without_mentions(name: str, facts: Mapping[str, int]) -> Mapping[str, int]:
    if not facts or not name:
        return facts
    mentions = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    return {test: arm for test, arm in facts.items() if not mentions.search(test)}


def _bound(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets and values of a simple statement."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target=name, value=ast.expr() as value):
            return [(name, value)]
        case ast.AugAssign(target=name, op=op, value=value):
            return [(name, ast.BinOp(name, op, value))]
        case ast.Return(value=ast.expr() as value):
            return [(ast.Name("return"), value)]
    return []


def _arm(statement: ast.If, which: int) -> Around:
    """Return an arm, identified by its condition: equal conditions are decided together."""
    return Around("arm", statement, arm=condition_of(statement.test, which))


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
