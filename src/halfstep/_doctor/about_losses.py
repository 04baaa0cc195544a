"""Checks of losses: sums where a mean would stay in range."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import NameScope, argument
from halfstep._doctor.read_program import Program, Root, Site


def findings(program: Program) -> Iterator[Finding]:
    """Yield losses in float16 training that are sums without a division."""
    for root in program.roots:
        if not any(site.autocast and site.autocast.dtype == "float16" for site in root.sites):
            continue
        reaching = _reaching(program, root)
        for site in root.sites:
            if site.has_grad and _is_sum(program, site) and _is_loss(site, reaching):
                yield Finding(
                    "sum-loss",
                    f"`{_short(site.call)}` sums over all entries of the batch and is not divided: "
                    "gradients grow with the batch, and float16 ends at 65504",
                    "take the mean, or divide by the number of entries, and raise the learning "
                    "rate by as much",
                    names=(_short(site.call),),
                    line=site.line,
                )


def _is_sum(program: Program, site: Site) -> bool:
    if site.method == "sum" and not site.call.args and not site.call.keywords:
        return True
    calls = [(site.call, site.scope)]
    for written in program.values.candidates(site.call.func, site.scope):
        if written is not None and isinstance(written[0], ast.Call):
            calls.append((written[0], written[1]))  # criterion = nn.MSELoss(reduction="sum")
    return any(_reduces_by_sum(program, call, scope) for call, scope in calls)


def _reduces_by_sum(program: Program, call: ast.Call, scope: NameScope) -> bool:
    reduction = argument(call, "reduction", -1)
    name = program.values.qualified(call.func, scope)
    is_sum = reduction is not None and program.values.constant(reduction, scope) == "sum"
    return is_sum and name.startswith("torch.nn.")


def _is_loss(site: Site, reaching: dict[str, bool]) -> bool:
    """Return whether a backward pass starts from this value, or from a sum with it."""
    path = _path(site.statement, site.call)
    if any(_may_shrink(node) for node in path):
        return False
    inner = [node for node in path if isinstance(node, ast.Call) and node is not site.call]
    if isinstance(site.statement, ast.Expr):  # .sum().backward(), scale(... .sum()).backward()
        methods = [n.func.attr for n in inner if isinstance(n.func, ast.Attribute)]
        return "backward" in methods and set(methods) <= {"backward", "scale"}
    return not inner and any(reaching.get(name, False) for name in _targets(site.statement))


def _path(statement: ast.stmt, call: ast.Call) -> list[ast.AST]:
    """Return the nodes from a statement down to a call."""

    def down(node: ast.AST) -> list[ast.AST] | None:
        if node is call:
            return [node]
        for child in ast.iter_child_nodes(node):
            below = down(child)
            if below is not None:
                return [node, *below]
        return None

    return down(statement) or []


def _reaching(program: Program, root: Root) -> dict[str, bool]:
    """Return the variables that backward passes start from; False for those that may be divided."""
    shrunk, reaching = set[str](), set[str]()
    for site in root.sites:
        if program.is_backward(site) and site.has_grad:
            reaching |= _added(site.owner)
    scopes = {site.scope for site in root.sites}
    nodes = [node for scope in scopes for node in ast.walk(scope.node)]
    for node in nodes:
        if _may_shrink(node):
            shrunk |= _names(node.target if isinstance(node, ast.AugAssign) else node)
    assignments = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    for _ in assignments:  # until no new name is found
        found = {
            name
            for node in assignments
            if reaching & set(_targets(node)) and node.value is not None
            for name in _added(node.value)
        }
        if found <= reaching:
            break
        reaching |= found
    return {name: name not in shrunk for name in reaching}


def _may_shrink(node: ast.AST) -> bool:
    """Return whether a node divides, or multiplies by an unknown value."""
    match node:
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
            return True
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return not isinstance(left, ast.Constant) and not isinstance(right, ast.Constant)
        case ast.AugAssign(op=ast.Mult(), value=value):
            return not isinstance(value, ast.Constant)
    return False


def _added(node: ast.expr) -> set[str]:
    """Return the names whose sum a value is; the result of a function is a new value."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.BinOp(left=left, right=right):
            return _added(left) | _added(right)
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled, *_]):
            return _added(scaled)
    return set()


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _targets(statement: ast.AST) -> Iterator[str]:
    match statement:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from _names(target)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            yield from _names(target)


def _short(call: ast.Call) -> str:
    text = ast.unparse(call)
    return text if len(text) <= 60 else f"{text[:57]}..."
