"""The ways through a file or a function: its calls in order, and what is known on each way.

The walk is an abstract interpretation: each arm of a condition that is open makes a path of its
own, two conditions with one text are decided together, loops run twice, and paths in one state
are merged again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from halfstep._doctor.read_names import Function, NameScope, dotted, passed_to
from halfstep._doctor.read_sites import Around, Inside, Site
from halfstep._doctor.read_values import Meaning

MOST_NESTED_CALLS = 5
"""Calls of functions are followed to this depth."""
MOST_SITES = 5000
"""At most this many calls are visited for a root: nested functions may multiply them."""
MOST_PATHS = 16
"""At most this many paths are kept; leaving some out can only hide a finding."""

Names: TypeAlias = Mapping[str, "str | int"]
"""What names stand for on a path: another name, or a value that the follower computes."""
_EXITS = ("exit", "sys.exit", "quit", "os._exit")
_VISITED = (ast.Call, ast.NamedExpr)
_ENDS = (ast.Return, ast.Break, ast.Continue, ast.Raise)


@dataclass(frozen=True)
class Path:
    """One way through the code.

    Attributes:
        state: The state of the follower.
        facts: The conditions that hold (0) or do not hold (1), by their text.
        names: What names stand for.
    """

    state: Hashable
    facts: Mapping[str, int] = field(default_factory=dict)
    names: Names = field(default_factory=dict)


class Follower(Protocol):
    """Computes states along paths."""

    def may_matter(self, call: ast.Call) -> bool:
        """Return whether a call may be relevant, by its name and arguments."""

    def is_relevant(self, site: Site, walk: Walk) -> bool:
        """Return whether a call may change the state."""

    def is_object(self, key: str) -> bool:
        """Return whether the object with a key is one to follow."""

    def is_loss(self, key: str) -> bool:
        """Return whether a name is typical for a value whose number matters."""

    def after_call(self, site: Site, path: Path, walk: Walk) -> Hashable:
        """Return the state after a relevant call."""

    def after_assignment(self, key: str, value: ast.expr | None, state: Hashable) -> Hashable:
        """Return the state after a variable got a new value."""

    def after_failure(self, state: Hashable) -> Hashable:
        """Return the state after an exception was caught."""

    def value(self, node: ast.expr, scope: NameScope, names: Names, walk: Walk) -> int:
        """Return a number for a value; 0 for an ordinary one."""

    def condition(self, test: str) -> tuple[str, int]:
        """Return the name of a condition, and 1 if ``test`` is its opposite."""


class Walk:
    """Visits the calls of a file or a function, and of the functions that it calls, in order.

    Args:
        meaning: Recognizes expressions of the file.
        follower: Follows the paths; None to list the calls only.
    """

    def __init__(self, meaning: Meaning, follower: Follower | None = None) -> None:
        self._meaning = meaning
        self._names = meaning.values.names
        self._follower = follower
        self._frames: dict[NameScope, str] = {}
        self._left: dict[str, list[Path]] = {"return": [], "break": [], "continue": []}
        self._visits = 0
        self.ends: list[Hashable] = []  # the states in which the last root ended
        self._mattering: dict[ast.AST, bool] = {}
        self._conditions: dict[tuple[ast.expr, int], tuple[str, int]] = {}
        self._sites: dict[tuple[ast.Call, Inside], Site] = {}

    def sites(self, root: ast.Module | Function, *states: Hashable) -> list[Site]:
        """Return the calls of a root; the follower sees each on every path from these states."""
        paths = self._body(root, (), [Path(state) for state in states])
        self.ends = list(dict.fromkeys(path.state for path in paths))
        return list(self._sites.values())

    # --- names ------------------------------------------------------------------------------------

    def key(self, node: ast.expr, scope: NameScope, names: Names) -> str:
        """Return what identifies the object that an expression stands for.

        Elements of a sequence that is indexed by a variable or looped over have one key, that
        ends in ``[*]``.
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
        found: NameScope | None = scope
        while found is not None and name not in found.bindings:
            found = found.parent
        return "" if found is None else self._frames.get(found, "")

    def _bind(
        self,
        target: ast.expr,
        value: ast.expr | None,
        scope: NameScope,
        path: Path,
        element: str | int,
    ) -> Path:
        """Bind a target to a value, or to an element of the sequence with a key."""
        assert self._follower is not None
        if isinstance(target, ast.Tuple | ast.List):
            parts: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                parts = value.elts
            elif value is not None:  # all parts of a scaled result are taken for scaled
                element = self._follower.value(value, scope, path.names, self)
            for at, (part, of) in enumerate(zip(target.elts, parts, strict=True)):
                inner = f"{element}.{at}" if element and isinstance(element, str) else element
                path = self._bind(part, of, scope, path, inner)
            return path
        names = dict(path.names)
        own = self._own_key(target, scope, names)
        stands_for = element
        if value is not None:
            stands_for = self._follower.value(value, scope, names, self)
            key = self.key(value, scope, names)
            if stands_for <= 0 and self._follower.is_object(key):
                stands_for = key
        names.pop(own, None)
        is_object = isinstance(stands_for, int) or self._follower.is_object(stands_for)
        if stands_for and stands_for != own and is_object:
            names[own] = stands_for
        elif isinstance(target, ast.Attribute) and self._follower.is_loss(target.attr):
            names[own] = 0
        facts = path.facts
        if facts and dotted(target):
            mentions = re.compile(rf"(?<![\w.]){re.escape(dotted(target))}(?!\w)")
            facts = {test: arm for test, arm in facts.items() if not mentions.search(test)}
        return Path(self._follower.after_assignment(own, value, path.state), facts, names)

    def _own_key(self, target: ast.expr, scope: NameScope, names: dict[str, str | int]) -> str:
        """Return the key of the variable itself, not of what it stands for now."""
        if isinstance(target, ast.Name):
            return self._frame(target.id, scope) + target.id
        if isinstance(target, ast.Attribute):
            return f"{self.key(target.value, scope, names)}.{target.attr}"
        return self.key(target, scope, {})

    # --- statements -------------------------------------------------------------------------------

    def _body(self, root: ast.Module | Function, inside: Inside, paths: list[Path]) -> list[Path]:
        scope = self._names.scopes[root]
        if not isinstance(root, ast.Module):
            for decorator in root.decorator_list:
                inside += tuple(self._entered(decorator, scope, is_decorator=True))
        outer, self._left = self._left, {"return": [], "break": [], "continue": []}
        paths = self._block(root.body, scope, inside, paths)
        paths, self._left = merged([*paths, *self._left["return"]]), outer
        return paths

    def _block(
        self, block: list[ast.stmt], scope: NameScope, inside: Inside, paths: list[Path]
    ) -> list[Path]:
        for statement in block:
            paths = self._statement(statement, scope, inside, paths)
            # Statements after `if a: return` run in the other arm.
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                inside += (_arm(statement, 1),)
        return paths

    def _statement(
        self, statement: ast.stmt, scope: NameScope, inside: Inside, paths: list[Path]
    ) -> list[Path]:
        binds = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign)
        if self._follower is not None and not (binds or self._matters(statement, scope, _ENDS)):
            return paths
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return paths  # their bodies run when they are called
            case ast.If(test=test, body=body, orelse=orelse):
                paths = self._calls(test, statement, scope, inside, paths)
                arms = [
                    self._block(block, scope, (*inside, _arm(statement, which)), forked)
                    for which, (block, forked) in enumerate(
                        zip((body, orelse), self._forked(test, paths), strict=True)
                    )
                ]
                return merged([*arms[0], *arms[1]])
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(statement, scope, inside, paths)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    paths = self._calls(item.context_expr, statement, scope, inside, paths)
                    inside += tuple(self._entered(item.context_expr, scope))
                return self._block(body, scope, inside, paths)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                done = self._block(body, scope, inside, paths)
                failed = merged([*paths, *done])
                caught = self._cases("try", statement, handlers, scope, inside, failed)
                if self._follower is not None:
                    after = self._follower.after_failure
                    caught = [replace(path, state=after(path.state)) for path in caught]
                done = self._block(orelse, scope, inside, done)
                return self._block(final, scope, inside, merged([*done, *caught]))
            case ast.Match(subject=subject, cases=cases):
                paths = self._calls(subject, statement, scope, inside, paths)
                chosen = self._cases("match", statement, cases, scope, inside, paths)
                return merged([*paths, *chosen])
            case _:
                return self._simple(statement, scope, inside, paths)

    def _matters(self, node: ast.AST, scope: NameScope, ends: tuple[type, ...] = ()) -> bool:
        """Return whether something in a statement or a function can change a path."""
        found = self._mattering.get(node)
        if found is None:
            self._mattering[node] = False  # while functions that call each other are looked at
            found = any(self._is_part(each, scope, ends) for each in ast.walk(node))
            self._mattering[node] = found
        return found

    def _is_part(self, node: ast.AST, scope: NameScope, ends: tuple[type, ...]) -> bool:
        assert self._follower is not None
        if isinstance(node, ast.Name):
            is_known = self._follower.is_object(node.id) or self._follower.is_loss(node.id)
            return isinstance(node.ctx, ast.Store) and is_known
        if isinstance(node, ast.Call):
            function = self._names.called(node, scope)
            if function is not None:
                return self._matters(function, self._names.scopes[function])
            return self._follower.may_matter(node)
        return isinstance(node, ends)

    def _simple(
        self, statement: ast.stmt, scope: NameScope, inside: Inside, paths: list[Path]
    ) -> list[Path]:
        if self._follower is None or self._matters(statement, scope, _ENDS):
            paths = self._calls(statement, statement, scope, inside, paths)
        bound: list[tuple[ast.expr, ast.expr]]
        match statement:
            case ast.Assign(targets=targets, value=assigned):
                bound = [(target, assigned) for target in targets]
            case ast.AnnAssign(target=name, value=ast.expr() as assigned):
                bound = [(name, assigned)]
            case ast.AugAssign(target=name, op=op, value=added):
                bound = [(name, ast.BinOp(name, op, added))]
            case ast.Return(value=ast.expr() as returned):
                bound = [(ast.Name("return"), returned)]
            case _:
                bound = []
        for target, given in bound:
            paths = [self._bind(target, given, scope, path, "") for path in paths]
        paths = [
            replace(path, names=_without("call@", path.names)) if path.names else path
            for path in paths
        ]
        match statement:
            case ast.Return():
                self._left["return"] += paths
            case ast.Break():
                self._left["break"] += paths
            case ast.Continue():
                self._left["continue"] += paths
            case ast.Raise():
                pass
            case ast.Expr(value=ast.Call(func=called)) if dotted(called) in _EXITS:
                pass
            case _:
                return paths
        return []

    def _loop(
        self,
        loop: ast.For | ast.AsyncFor | ast.While,
        scope: NameScope,
        inside: Inside,
        paths: list[Path],
    ) -> list[Path]:
        """Visit a loop, twice if the first pass changed a state.

        Loops of trainings are taken to run at least once.
        """
        outer = self._left
        self._left = outer | {"break": [], "continue": []}
        head = loop.test if isinstance(loop, ast.While) else loop.iter
        within = (*inside, Around("loop", loop))
        paths = self._calls(head, loop, scope, inside, paths)
        after: list[Path] = []
        for _ in range(2):
            before = {path.state for path in paths}
            paths = [self._next_pass(loop, scope, path) for path in paths]
            paths = self._block(loop.body, scope, within, paths)
            paths = merged([*paths, *self._left["continue"]])
            self._left["continue"] = []
            after = merged([*after, *paths])
            if {path.state for path in paths} <= before:
                break
        after = self._block(loop.orelse, scope, inside, after)
        after = merged([*after, *self._left["break"]])
        self._left = outer
        return after

    def _next_pass(
        self, loop: ast.For | ast.AsyncFor | ast.While, scope: NameScope, path: Path
    ) -> Path:
        facts = {test: arm for test, arm in path.facts.items() if "(" not in test}
        path = replace(path, facts=facts)
        if isinstance(loop, ast.While):
            return path
        return self._bind_element(loop.target, loop.iter, scope, path)

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
                path = self._bind(at, None, scope, path, "")
                return self._bind_element(part, of, scope, path)
        element = f"{self.key(sequence, scope, path.names)}[*]"
        return self._bind(target, None, scope, path, element)

    def _cases(
        self,
        word: str,
        statement: ast.stmt,
        cases: Sequence[ast.ExceptHandler | ast.match_case],
        scope: NameScope,
        inside: Inside,
        paths: list[Path],
    ) -> list[Path]:
        after: list[Path] = []
        for which, case in enumerate(cases, 1):  # 0: no handler runs
            arm = Around("arm", case, arm=(f"{word} {statement.lineno}", which))
            after += self._block(case.body, scope, (*inside, arm), paths)
        return merged(after)

    def _entered(
        self, context: ast.expr, scope: NameScope, is_decorator: bool = False
    ) -> Iterator[Around]:
        autocast = self._meaning.autocast(context, scope)
        if autocast is not None:
            yield Around("autocast", context, autocast, is_decorator=is_decorator)
        grad = self._meaning.switches_grad(context, scope)
        if grad is not None:
            yield Around("grad", context, grad=grad)

    # --- conditions -------------------------------------------------------------------------------

    def _forked(self, test: ast.expr, paths: list[Path]) -> tuple[list[Path], list[Path]]:
        """Return the paths on which a condition holds, and those on which it does not."""
        forked = [
            [
                replace(p, facts=f)
                for p in paths
                if (f := self._assume(test, arm, p.facts)) is not None
            ]
            for arm in (0, 1)
        ]
        return forked[0], forked[1]

    def _assume(
        self, test: ast.expr, arm: int, facts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Return the facts with a condition decided; None if they say the opposite."""
        known_text = self._conditions.get((test, arm))
        if known_text is None:
            known_text = self._conditions[test, arm] = condition_of(test, arm)
        text, arm = known_text
        if text in ("True", "False"):
            return facts if (text == "False") == arm else None
        assert self._follower is not None
        name, is_opposite = self._follower.condition(text)
        key, which = name, arm ^ is_opposite
        if facts.get(key, which) != which:
            return None
        known: Mapping[str, int] | None = {**facts, key: which}
        decides_all = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == (arm == 0)
        for part in test.values if decides_all and isinstance(test, ast.BoolOp) else ():
            known = None if known is None else self._assume(part, arm, known)
        return known

    # --- expressions ------------------------------------------------------------------------------

    def _calls(
        self,
        node: ast.AST,
        statement: ast.stmt,
        scope: NameScope,
        inside: Inside,
        paths: list[Path],
    ) -> list[Path]:
        """Visit the calls in an expression, inner ones first, as they run."""
        match node:
            case ast.Lambda():
                return paths
            case ast.IfExp(test=test, body=body, orelse=orelse):
                paths = self._calls(test, statement, scope, inside, paths)
                forked = self._forked(test, paths)
                arms = [
                    self._calls(part, statement, scope, inside, forked[which])
                    for which, part in enumerate((body, orelse))
                ]
                return merged([*arms[0], *arms[1]])
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inside = (*inside, Around("loop", node))
                for each in node.generators:
                    paths = [self._bind_element(each.target, each.iter, scope, p) for p in paths]
        for child in self._parts(node):
            paths = self._calls(child, statement, scope, inside, paths)
        if isinstance(node, ast.NamedExpr):
            paths = [self._bind(node.target, node.value, scope, path, "") for path in paths]
        if isinstance(node, ast.Call):
            return self._call(node, statement, scope, inside, paths)
        return paths

    def _parts(self, node: ast.AST) -> list[ast.AST]:
        """Return the children that contain something to visit."""
        found = self._meaning.values.names.parts.get(node)
        if found is None:
            children = ast.iter_child_nodes(node)
            found = [each for each in children if isinstance(each, _VISITED) or self._parts(each)]
            self._meaning.values.names.parts[node] = found
        return found

    def _call(
        self,
        node: ast.Call,
        statement: ast.stmt,
        scope: NameScope,
        inside: Inside,
        paths: list[Path],
    ) -> list[Path]:
        self._visits += 1 + len(paths) // 4
        if self._visits > MOST_SITES:
            return paths
        site = self._sites.setdefault((node, inside), Site(node, scope, statement, inside))
        follower = self._follower
        if follower is not None and paths and follower.is_relevant(site, self):
            paths = [replace(p, state=follower.after_call(site, p, self)) for p in paths]
        function = self.followed(site)
        return paths if function is None else self._followed(function, site, paths)

    def followed(self, site: Site) -> Function | None:
        """Return the function of this file that a call runs, if it is followed."""
        function = self._names.called(site.call, site.scope)
        outer = [around.function for around in site.inside if around.kind == "call"]
        if function is None or function in outer or len(outer) >= MOST_NESTED_CALLS:
            return None
        is_listed = self._follower is None
        is_followed = is_listed or self._matters(function, self._names.scopes[function])
        return function if is_followed else None

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
        return [self._returned(frame, call, path) for path in paths]

    def _pass(self, key: str, value: ast.expr, scope: NameScope, path: Path) -> Path:
        assert self._follower is not None
        number = self._follower.value(value, scope, path.names, self)
        own = self.key(value, scope, path.names)
        is_object = number <= 0 and self._follower.is_object(own)
        return replace(path, names={**path.names, key: own if is_object else number})

    def _returned(self, frame: str, call: ast.Call, path: Path) -> Path:
        names = dict(_without(frame, path.names))
        returned = names.pop("return", 0)
        return replace(path, names=names | {call_key(call): returned})


def call_key(call: ast.Call) -> str:
    """Return the name under which a path has the value that a call returned."""
    return f"call@{call.lineno}:{call.col_offset}"


def _without(prefix: str, names: Names) -> Names:
    return {key: value for key, value in names.items() if not key.startswith(prefix)}


def merged(paths: Iterable[Path]) -> list[Path]:
    """Return one path for each state, with the facts that hold on all paths with that state."""
    found: dict[Any, Path] = {}
    for path in paths:
        key = path.state, frozenset(path.names.items())
        other = found.get(key)
        if other is not None:
            path = replace(path, facts=dict(path.facts.items() & other.facts.items()))
        found[key] = path
    return list(found.values())[:MOST_PATHS]


def condition_of(test: ast.expr, which: int) -> tuple[str, int]:
    """Return the text of a condition without its negation, and the arm in which it holds."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, which = test.operand, 1 - which
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=None)]):
            # For objects, `x is not None` and `x` are the same condition.
            test, which = left, which if isinstance(op, ast.IsNot | ast.NotEq) else 1 - which
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=compared):
            test, which = ast.Compare(left, [ast.Eq()], compared), 1 - which
    return ast.unparse(test), which


def _arm(statement: ast.If, which: int) -> Around:
    """Identify an arm by its condition: two ``if`` with the same condition depend on each other."""
    return Around("arm", statement, arm=condition_of(statement.test, which))


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
