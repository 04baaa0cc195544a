"""The errors of the package: all that reach a user are in one module."""

import ast
import importlib
import pkgutil
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import halfstep
from halfstep import errors

SOURCE = Path(halfstep.__file__).parent


def subclasses(cls: type) -> set[type]:
    found = set(cls.__subclasses__())
    return found.union(*map(subclasses, found))


def own_errors() -> set[type]:
    """Every exception and warning of the package, wherever it is defined."""
    for module in pkgutil.walk_packages([str(SOURCE)], "halfstep."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError:
            if not module.name.startswith("halfstep.integrations."):
                raise  # else its framework is not installed
    return {
        cls
        for cls in subclasses(BaseException)
        if cls.__module__.partition(".")[0] == "halfstep"
        and getattr(importlib.import_module(cls.__module__), cls.__name__, None) is cls
    }


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Return the nodes of each file of the package."""
    files = SOURCE.rglob("*.py")
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in files}


def name_of(node: ast.AST) -> str:
    """Return the name of a function or category, without that of its module."""
    return getattr(node, "id", None) or getattr(node, "attr", "")


def caught() -> set[str]:
    """The names in ``except`` clauses and ``suppress``, and in what asks for a class."""
    found = set()
    for node in chain(*nodes().values()):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            found |= {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)}
        if isinstance(node, ast.Call) and name_of(node.func) == "isinstance":
            found |= {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
        if isinstance(node, ast.Call) and name_of(node.func) == "suppress":
            found |= {each.id for each in node.args if isinstance(each, ast.Name)}
    return found


def warned() -> set[str]:
    """The names of the categories in all calls of ``warnings.warn``."""
    calls = (node for node in chain(*nodes().values()) if isinstance(node, ast.Call))
    given = ([*c.args, *(k.value for k in c.keywords)] for c in calls if name_of(c.func) == "warn")
    return {each.id for each in chain(*given) if isinstance(each, ast.Name)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of frameworks that are imported
def test_errors_that_reach_a_user_are_in_one_module() -> None:
    elsewhere = {cls for cls in own_errors() if cls.__module__ != "halfstep.errors"}
    assert {cls.__name__ for cls in elsewhere} & warned() == set()
    names = caught()
    for cls in elsewhere:
        assert any(base.__name__ in names for base in cls.__mro__ if base in elsewhere), cls
    assert not any(issubclass(cls, Warning) for cls in elsewhere)


def test_the_docstring_shows_the_tree_of_errors() -> None:
    parents = {"RuntimeError": 0, "ValueError": 0, "UserWarning": 0}
    own = [cls for cls in vars(errors).values() if isinstance(cls, type)]
    lines = (errors.__doc__ or "").splitlines()
    for cls in own:
        base = cls.__bases__[0]
        depth = parents.setdefault(cls.__name__, parents[base.__name__] + 1)
        assert any(line.startswith(f"{'  ' * depth}* :class:`{cls.__name__}`:") for line in lines)
    assert sum(":class:" in line for line in lines) == len(own)


def test_each_warning_has_a_category_of_ours() -> None:
    """So that a filter finds all of them. One function issues them, at the line of the user."""
    found = 0
    for path, here in nodes().items():
        imports = [node for node in here if isinstance(node, ast.ImportFrom)]
        ours = [i for i in imports if i.module == "halfstep._common.text"]
        is_ours = any(alias.name == "warn" for i in ours for alias in i.names)
        for call in (node for node in here if isinstance(node, ast.Call)):
            if name_of(call.func) == "warn" and not isinstance(call.func, ast.Name):
                is_warnings = ast.unparse(call.func) == "warnings.warn"
                assert not is_warnings or path.name == "text.py", f"{path}:{call.lineno}"
            elif name_of(call.func) == "warn" and is_ours:
                found += 1
                for given in call.args[1:]:
                    category = getattr(errors, ast.unparse(given))
                    assert issubclass(category, errors.HalfstepWarning), f"{path}:{call.lineno}"
    assert found > 5
