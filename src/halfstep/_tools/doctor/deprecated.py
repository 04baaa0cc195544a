"""Deprecated names of ``torch.cuda.amp`` and ``torch.cpu.amp``, and source without them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfstep._tools.doctor.finding import Finding, finding
from halfstep._tools.doctor.read_names import dotted
from halfstep._tools.doctor.read_program import Program

Target: TypeAlias = Literal["torch", "halfstep"]
"""The package whose names replace the deprecated ones."""

_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_OLD = re.compile(r"torch\.(cuda|cpu)\.amp(\.autocast_mode|\.grad_scaler)?")
_NEW = re.compile(r"torch(\.amp(\.autocast_mode|\.grad_scaler)?)?")
_OTHER_ORDER = {"autocast": ("enabled", "dtype", "cache_enabled")}
"""The positional parameters that stand in another order in ``torch.amp``."""


@dataclass(frozen=True)
class Rewritten:
    """Source without deprecated names."""

    text: str  # source
    names: tuple[tuple[str, int], ...]  # names that it had, each with its line
    left: tuple[tuple[int, str], ...]  # lines that were left as they are, each with the reason


def rewritten(text: str, to: Target = "torch", tree: ast.Module | None = None) -> Rewritten:
    """Return source that uses ``torch.amp`` in place of deprecated names, or halfstep.

    For halfstep, the names of ``torch.amp`` are replaced too. Layout and comments stay. What is not
    understood stays too, with its import.

    Raises:
        SyntaxError: The text is not valid Python.
    """
    return _Rewriter(text, tree or ast.parse(text), to).result()


def findings(program: Program, text: str) -> Iterator[Finding]:
    """Yield a finding if a file uses deprecated names."""
    names = rewritten(text, tree=program.tree).names if ".amp" in text else ()
    if names:
        unique = tuple(dict.fromkeys(name for name, _ in names))
        shown = ", ".join(f"`{name}`" for name in unique)
        yield finding("deprecated-amp", names[0][1], unique, deprecated=shown)


class _Rewriter:
    def __init__(self, text: str, tree: ast.Module, to: Target) -> None:
        self._bytes, self._to = text.encode(), to  # columns of a syntax tree count bytes
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._nodes = [*ast.walk(tree)]
        self._parents = {c: node for node in self._nodes for c in ast.iter_child_nodes(node)}
        self._tree = tree
        self._edits: dict[tuple[int, int], str] = {}
        self._done: set[ast.expr] = set()
        self._names: list[tuple[str, int]] = []
        self._left: dict[int, str] = {}
        self._needs_import = False

    def result(self) -> Rewritten:
        for node in self._nodes:
            match node:
                case ast.ImportFrom(module="torch.cuda" | "torch.cpu" | "torch" as module):
                    for alias in node.names:
                        if alias.name == "amp":
                            self._import_module(node, alias, f"{module}.amp")
                        elif module == "torch" and alias.name == "autocast":
                            self._import_names(node, module)
                case ast.ImportFrom(module=str(module)):
                    if self._is_old(module):
                        self._import_names(node, module)
                case ast.Import():
                    for alias in node.names:
                        if alias.asname and alias.name != "torch" and self._is_old(alias.name):
                            self._import_module(node, alias, alias.name)
                case ast.Attribute(attr=name, value=value) if name in _NAMES:
                    if self._is_old(dotted(value), name):
                        self._whole(node, name, dotted(value))
        imports = [node for node in self._tree.body if isinstance(node, ast.Import)]
        is_there = any(alias.name == "halfstep" for node in imports for alias in node.names)
        if self._needs_import and not is_there:
            first = next((n for n in imports if "torch" in ast.unparse(n)), self._tree.body[0])
            self._insert(self._span(first)[0], "import halfstep\n")
        result = self._bytes
        for (start, end), new in sorted(self._edits.items(), reverse=True):
            result = result[:start] + new.encode() + result[end:]
        names = sorted(dict.fromkeys(self._names), key=lambda each: each[1])
        return Rewritten(result.decode(), tuple(names), tuple(sorted(self._left.items())))

    def _is_old(self, module: str, name: str = "") -> bool:
        """Return whether a module is left behind; of ``torch`` itself, only its ``autocast``."""
        if _OLD.fullmatch(module):
            return True
        if self._to == "torch" or name.startswith("custom") or not _NEW.fullmatch(module):
            return False
        return module != "torch" or name in ("", "autocast")

    def _module(self, name: str) -> str:
        is_ours = self._to == "halfstep" and not name.startswith("custom")
        return "halfstep" if is_ours else "torch.amp"

    # --- imports ----------------------------------------------------------------------------------

    def _import_names(self, node: ast.ImportFrom, module: str) -> None:
        """Change the module of imported names whose uses are all understood."""
        moved: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            where, bound = module, alias.asname or alias.name
            if alias.name in _NAMES and self._is_old(module, alias.name):
                self._names.append((f"{module}.{alias.name}", node.lineno))
                uses = self._uses(bound)
                if self._understands(uses, alias.name, bound, module, node.lineno):
                    where = self._module(alias.name)
                    for use in uses:
                        self._change(use, alias.name, module)
            elif alias.name == "*":
                self._left[node.lineno] = f"the names of `from {module} import *` are not known"
            moved.setdefault(where, []).append(alias)
        start, end = self._span(node)
        if len(moved) == 1 and module not in moved:
            old = self._bytes[start:end].decode()
            new = rf"\g<1>{next(iter(moved))}"
            self._edits[start, end] = re.sub(r"(from\s+)[\w.]+", new, old, count=1)
        elif len(moved) > 1:
            before = self._bytes[self._starts[node.lineno - 1] : start].decode()
            between = "; " if before.strip() else f"\n{before}"
            parts = (ast.unparse(ast.ImportFrom(name, of, 0)) for name, of in moved.items())
            self._edits[start, end] = between.join(parts)

    def _import_module(
        self, node: ast.Import | ast.ImportFrom, alias: ast.alias, module: str
    ) -> None:
        """Change the import of a module, or what is used of it."""
        bound = alias.asname or alias.name
        around = [self._parents[use] for use in self._uses(bound)]
        uses = [each for each in around if isinstance(each, ast.Attribute)]
        used = [use for use in uses if self._is_old(module, use.attr) and use.attr in _NAMES]
        self._names += [(f"{module}.{use.attr}", use.lineno) for use in used]
        is_alone = len(used) == len(around) and len(node.names) == 1
        known = [self._understands([u], u.attr, bound, module, node.lineno) for u in used]
        if self._to == "halfstep":
            for use, is_known in zip(used, known, strict=True):
                if is_known and not use.attr.startswith("custom"):
                    self._change(use, use.attr, module, is_whole=True)
        elif used and all(known) and is_alone:
            for use in used:
                self._change(use, use.attr, module)
            suffix = "" if bound == "amp" else f" as {bound}"
            self._edits[self._span(node)] = f"from torch import amp{suffix}"
        elif used and all(known):
            self._left[node.lineno] = f"`{bound}` is not only used for names that have moved"

    # --- uses -------------------------------------------------------------------------------------

    def _whole(self, use: ast.Attribute, name: str, module: str) -> None:
        """Replace a name that is written with its module."""
        self._names.append((f"{module}.{name}", use.lineno))
        if self._understands([use], name, f"{module}.{name}", module, use.lineno):
            self._change(use, name, module, is_whole=True)

    def _uses(self, name: str) -> list[ast.expr]:
        return [
            node
            for node in self._nodes
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        ]

    def _understands(
        self, uses: list[ast.expr], name: str, bound: str, module: str, line: int
    ) -> bool:
        """Return whether all uses of an imported name can be changed; note why not."""
        if any(_binds(node, bound, module) for node in self._nodes):
            self._left[line] = f"`{bound}` has another meaning in another place"
            return False
        strange = [use for use in uses if not self._is_known(use, name)]
        for use in strange:
            self._left[use.lineno] = f"`{bound}` is used in another way than a call"
        return not strange

    def _is_known(self, use: ast.expr, name: str) -> bool:
        parent = self._parents.get(use)
        if isinstance(parent, ast.Call) and parent.func is use:
            return not any(isinstance(arg, ast.Starred) for arg in parent.args)
        if name == "GradScaler":  # as in an annotation; a subclass calls its __init__
            return not isinstance(parent, ast.ClassDef)
        return name != "autocast" and use in getattr(parent, "decorator_list", ())

    def _change(self, use: ast.expr, name: str, module: str, *, is_whole: bool = False) -> None:
        """Add the device type to a use; replace its module if it is written with one."""
        if use in self._done:
            return
        self._done.add(use)
        parent, old = self._parents.get(use), _OLD.fullmatch(module)
        if is_whole:
            self._edits[self._span(use)] = f"{self._module(name)}.{name}"
            self._needs_import |= self._module(name) == "halfstep"
        if old is None:
            return
        if isinstance(parent, ast.Call) and parent.func is use:
            self._add_device(parent, name, old[1])
        elif name.startswith("custom"):
            self._insert(self._span(use)[1], f'(device_type="{old[1]}")')

    def _add_device(self, call: ast.Call, name: str, device: str) -> None:
        is_keyword = name.startswith("custom")
        text = f'device_type="{device}"' if is_keyword else f'"{device}"'
        parts: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        given = sorted(map(self._span, parts))
        if is_keyword and call.args:
            self._insert(self._span(call.args[-1])[1], f", {text}")
        elif given:
            self._insert(given[0][0], f"{text}, ")
        else:
            self._insert(self._bytes.index(b"(", self._span(call.func)[1]) + 1, text)
        for parameter, argument in zip(_OTHER_ORDER.get(name, ()), call.args, strict=False):
            self._insert(self._span(argument)[0], f"{parameter}=")

    # --- text -------------------------------------------------------------------------------------

    def _span(self, node: ast.stmt | ast.expr | ast.keyword) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        end_line = node.end_lineno or node.lineno
        return start, self._starts[end_line - 1] + (node.end_col_offset or 0)

    def _insert(self, at: int, text: str) -> None:
        self._edits[at, at] = self._edits.get((at, at), "") + text


def _binds(node: ast.AST, name: str, module: str) -> bool:
    """Return whether a node gives a name another meaning than the import from a module."""
    match node:
        case ast.Name(id=bound, ctx=ast.Store() | ast.Del()) | ast.arg(arg=bound):
            return bound == name
        case ast.FunctionDef(name=bound) | ast.ClassDef(name=bound):
            return bound == name
        case ast.ImportFrom(module=other, names=names):
            is_same = module in (other, f"{other}.amp")
            return not is_same and any((each.asname or each.name) == name for each in names)
    return False
