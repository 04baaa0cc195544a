"""The ways through a file or a function: its calls in order, and what is known on each way.

The walk is an abstract interpretation: each arm of a condition that is open makes a path of its
own, two conditions with one text are decided together, loops run twice, and paths in one state
are merged again.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from halfstep._doctor.read_bindings import Bindings, Follower, without
from halfstep._doctor.read_conditions import Conditions, Path, condition_of, merged
from halfstep._doctor.read_names import Function, NameScope, dotted, passed_to
from halfstep._doctor.read_sites import Around, Inside, Site
from halfstep._doctor.read_values import Meaning

MOST_NESTED_CALLS = 5
"""Calls of functions are followed to this depth."""
MOST_SITES = 5000
"""At most this many calls are visited for a root: nested functions may multiply them."""

_EXITS = ("exit", "sys.exit", "quit", "os._exit")
_VISITED = (ast.Call, ast.NamedExpr)
_ENDS = (ast.Return, ast.Break, ast.Continue, ast.Raise)


class Walk(Bindings):
    """Visits the calls of a file or a function, and of the functions that it calls, in order.

    Args:
        meaning: Recognizes expressions of the file.
        follower: Follows the paths; None to list the calls only.
    """

    def __init__(self, meaning: Meaning, follower: Follower | None = None) -> None:
        self._meaning = meaning
        super().__init__(meaning.values.names, follower)
        self._left: dict[str, list[Path]] = {"return": [], "break": [], "continue": []}
        self._visits = 0
        self.ends: list[Hashable] = []  # the states in which the last root ended
        self._mattering: dict[ast.AST, bool] = {}
        self._conditions = Conditions(follower.condition) if follower else None
        self._sites: dict[tuple[ast.Call, Inside], Site] = {}

    def sites(self, root: ast.Module | Function, *states: Hashable) -> list[Site]:
        """Return the calls of a root; the follower sees each on every path from these states."""
        paths = self._body(root, (), [Path(state) for state in states])
        self.ends = list(dict.fromkeys(path.state for path in paths))
        return list(self._sites.values())

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
            replace(path, names=without("call@", path.names)) if path.names else path
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

    def _forked(self, test: ast.expr, paths: list[Path]) -> tuple[list[Path], list[Path]]:
        return self._conditions.forked(test, paths) if self._conditions else ([], [])

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


def _arm(statement: ast.If, which: int) -> Around:
    """Identify an arm by its condition: two ``if`` with the same condition depend on each other."""
    return Around("arm", statement, arm=condition_of(statement.test, which))


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
