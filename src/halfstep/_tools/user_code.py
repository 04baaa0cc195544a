"""User code: the current line, its names for tensors, and objects reachable from a function."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.nested import tensors_in
from halfstep._pytorch import autograd, modules, storages
from halfstep._tools.line import Line

_TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[1]}/"  # how the names of halfstep's files begin
_SCALER = (f"{OURS}_scaler/", f"{OURS}_gradients/")
_NOT_USERS = (_TORCH, OURS, "<frozen ", "<eval_with_key>")
_LIBRARY = f"{Path(os.__file__).parent}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")

CALLED_AGAIN: set[CodeType] = set()
"""The code of functions that repeat a call of the user; their local ``at`` is its place."""


class Spot(NamedTuple):
    """Expression of a call in the user's code, with names in its function."""

    line: Line
    span: tuple[int, int, int, int] | None = None  # first, last line and column, if Python has them
    modules: frozenset[str] = frozenset({"torch", "F", "nn", "functional", "math"})  # and classes
    numbers: frozenset[str] = frozenset()


class Place(NamedTuple):
    """Instruction in the user's code, and the globals of its function."""

    code: CodeType
    instruction: int
    names: dict[str, Any]

    @property
    def line(self) -> Line:
        code, number = self.code, span_of(self.code, self.instruction)[0]
        number = code.co_firstlineno if number is None else number
        text = linecache.getline(code.co_filename, number).strip()
        return Line(code.co_filename, number, code.co_name, text)

    @property
    def node(self) -> ast.expr | ast.stmt | None:
        """Its code; None if the file has none of its extent."""
        return tree_of(self.code.co_filename).at.get(span_of(self.code, self.instruction))

    @property
    def statement(self) -> ast.stmt | None:
        """The innermost statement of its code."""
        node = self.node
        return None if node is None else tree_of(self.code.co_filename).statement(node)

    def is_at(self, other: Place) -> bool:
        """Return whether both are the same instruction, even if the code was compiled again."""
        one, two = self.code, other.code
        is_same = one is two or (one.co_filename == two.co_filename and one == two)
        return is_same and self.instruction == other.instruction


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Tree(NamedTuple):
    """Syntax tree of a file; that of one that cannot be parsed is empty."""

    root: ast.Module
    parents: dict[ast.AST, ast.AST]
    at: dict[tuple[int | None, ...], ast.expr | ast.stmt]  # not of most statements; by span

    def around(self, node: ast.AST | None) -> Iterator[ast.AST]:
        """Yield the nodes around a node, innermost first, up to its function."""
        while node in self.parents and not isinstance(node, FUNCTIONS):
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that is a node, or has it in it."""
        return next(each for each in (node, *self.around(node)) if isinstance(each, ast.stmt))


def tree_of(file: str) -> Tree:
    return tree_in("".join(linecache.getlines(file)))


@functools.lru_cache(64)
def tree_in(text: str) -> Tree:
    root = ast.Module([], [])
    with suppress(SyntaxError, ValueError):
        root = ast.parse(text)
    nodes = [*ast.walk(root)]
    spans: dict[tuple[int | None, ...], ast.expr | ast.stmt] = {
        (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset): n
        for n in reversed(nodes)
        if isinstance(n, (ast.expr, ast.Raise, ast.AugAssign))
    }
    return Tree(root, {c: n for n in nodes for c in ast.iter_child_nodes(n)}, spans)


@functools.lru_cache(4096)
def span_of(code: CodeType, instruction: int) -> tuple[int | None, ...]:
    """Return the first and last line, and the first and last column, of an instruction's code."""
    return next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)


def user_line() -> Line | None:
    """Return the innermost running line outside PyTorch, the standard library and halfstep.

    None inside a backward pass, unless it runs code of the user, such as a hook.
    """
    place = user_place()
    return None if place is None else place.line


def user_place() -> Place | None:
    """Return the instruction at :func:`user_line`."""
    frame = _user_frame()
    if frame is None:
        return None
    if frame.f_code in CALLED_AGAIN:
        at: Place | None = frame.f_locals["at"]
        return at
    return Place(frame.f_code, frame.f_lasti, frame.f_globals)


def user_spot() -> Spot | None:
    """Return the current expression of the user's code."""
    place, names = user_place(), names_here()
    if place is None:
        return None
    span = span_of(place.code, place.instruction)
    if None in span:
        return Spot(place.line)
    modules = (n for n in place.code.co_names if isinstance(names.get(n), (ModuleType, type)))
    numbers = {name for name, value in names.items() if isinstance(value, (int, float))}
    for node in ast.walk(tree_of(place.code.co_filename).at.get(span, ast.Module([], []))):
        if isinstance(node, ast.Attribute) and isinstance(_value_of(node, names), (int, float)):
            numbers.add(ast.unparse(node))
    return Spot(place.line, span, frozenset(modules), frozenset(numbers))  # type: ignore[arg-type]


def names_here() -> dict[str, Any]:
    """Return the values of the names at :func:`user_line`; of a repeated call, the globals."""
    frame, place = _user_frame(), user_place()
    if frame is None or place is None:
        return {}
    return place.names if frame.f_code in CALLED_AGAIN else {**place.names, **frame.f_locals}


def _value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a name or an attribute without running code; else None."""
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(_value_of(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _user_frame() -> FrameType | None:
    for frame in autograd.frames():
        code = frame.f_code
        if code is autograd.ENGINE_CODE:
            return None
        if code in CALLED_AGAIN or is_users(code.co_filename):
            return frame
    return None


def is_called_by_a_scaler() -> bool:
    """Return whether a scaler called the PyTorch function that a function mode is handling."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_SCALER)


def whole_model(module: nn.Module) -> nn.Module:
    """Return the outermost module that contains ``module`` and whose method is calling it.

    ``training_step`` is such a method. Return ``module`` if there is none.
    """
    whole = module
    for frame in autograd.frames():
        owner = _self_of(frame) if is_users(frame.f_code.co_filename) else None
        if isinstance(owner, nn.Module) and any(whole is part for part in owner.modules()):
            whole = owner
    return whole


def _self_of(frame: FrameType) -> Any:
    """Return ``self`` of a frame without keeping its other locals alive.

    Before Python 3.13, a frame caches the dictionary of ``f_locals``, here with a step's tensors.
    """
    code = frame.f_code
    if "self" not in code.co_varnames:
        return None
    names = frame.f_locals
    owner = names.get("self")
    is_copy = type(names) is dict and code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and "locals" not in code.co_names:  # code that calls locals() may use it too
        names.clear()
    return owner


def torch_modules() -> list[str]:
    """Return the class names of the modules on the stack up to the user's code, innermost first."""
    return [type(owner).__name__ for owner in _owners()]


def path_in_module() -> str:
    """Return the name of the innermost of these modules in the outermost one."""
    owners = _owners()
    names = owners[-1].named_modules() if owners else ()
    return next((name for name, each in names if each is owners[0]), "")


def _owners() -> list[nn.Module]:
    owners: list[nn.Module] = []
    for frame in takewhile(_is_below_user, autograd.frames()):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and all(owner is not each for each in owners):
            owners.append(owner)
    return owners


def is_given_to_module(value: Any) -> bool:
    """Return whether the user's code passed a value to the PyTorch module that is running."""
    given: list[Any] = []
    for frame in takewhile(_is_below_user, autograd.frames()):
        if frame.f_code is modules.CALL_CODE:  # the outermost call wins
            given = [*frame.f_locals["args"], *frame.f_locals["kwargs"].values()]
    return any(value is each for each in given)


def _is_below_user(frame: FrameType) -> bool:
    return not (is_users(frame.f_code.co_filename) or frame.f_code is autograd.ENGINE_CODE)


def called_by_user(tensor: Tensor) -> str | None:
    """Return the name of a tensor in the outermost user function that has one, and its location.

    Of a call that is repeated, that is the argument in which it was given. Else the tensor itself
    is preferred to others in the same memory, a direct name to an item in nested containers, and a
    parameter of a module to a name that a loop may have assigned.
    """
    for text, value, place in _repeated_arguments():
        if isinstance(value, Tensor) and is_part_of(tensor, value) and len(text) <= _LONGEST:
            at = place.line
            return f"{text} in {at.function} ({Path(at.file).name}:{at.number})"
    for is_it, depth in ((is_same_view, 0), (is_part_of, 0), (is_same_view, 2)):
        found = None
        for code, line, names in _known_names():
            ordered = sorted(names.items(), key=lambda each: isinstance(each[1], nn.Module))
            for name, value in ordered:
                path = path_to(partial(is_it, tensor), name, value, depth)
                if path is not None:
                    where = f" ({Path(code.co_filename).name}:{line})" if line else ""
                    found = f"{path} in {code.co_name}{where}"
        if found is not None:
            return found
    return None


def whole_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which :func:`called_by_user` names a view, or the tensor itself."""
    values = [v for _, _, names in _known_names() for v in names.values() if isinstance(v, Tensor)]
    if any(is_same_view(tensor, value) for value in values):
        return tensor
    wholes = (v for v in values if v.numel() > tensor.numel() and is_part_of(tensor, v))
    return next(wholes, tensor)


_LONGEST = 40  # the number of characters of the longest expression that serves as a name


def _repeated_arguments() -> Iterator[tuple[str, Any, Place]]:
    """Yield the arguments of the call that is repeated: expressions, values and the place."""
    again = next((f for f in autograd.frames() if f.f_code in CALLED_AGAIN), None)
    place: Place | None = None if again is None else again.f_locals["at"]
    if again is None or place is None or "args" not in again.f_locals:
        return
    first, last, start, end = span_of(place.code, place.instruction)
    lines = linecache.getlines(place.code.co_filename)[(first or 1) - 1 : last]
    # Of a file that has changed, or numbers that are not known.
    with suppress(SyntaxError, TypeError, IndexError, ValueError):
        lines[-1] = lines[-1].encode()[:end].decode()
        lines[0] = lines[0].encode()[start:].decode()
        args, kwargs = [*again.f_locals["args"]], again.f_locals["kwargs"]
        match ast.parse(f"({''.join(lines)})", mode="eval").body:
            case ast.Call(func, given, named):
                if len(args) == len(given) + 1 and isinstance(func, ast.Attribute):
                    given = [func.value, *given]
                of_names = [(each.value, kwargs.get(each.arg)) for each in named]
                pairs = [*zip(given, args, strict=False), *of_names]
            case ast.BinOp(left, _, right):
                around = [names for code, _, names in _known_names() if code is place.code]
                known = {name: value for names in around for name, value in names.items()}
                given = [node for node in (left, right) if not _is_number(node, known)]
                # PyTorch is given the tensor first, also of `2 * x`.
                args = [value for value in args if isinstance(value, Tensor)]
                pairs = [*zip(given, args, strict=True)]
            case _:
                pairs = []
        for node, value in pairs:
            yield ast.unparse(node), value, place


def _is_number(node: ast.expr, names: dict[str, Any]) -> bool:
    value = node.value if isinstance(node, ast.Constant) else _value_of(node, names)
    return isinstance(value, int | float)


def _known_names() -> Iterator[tuple[CodeType, int, dict[str, Any]]]:
    """Yield the running functions of the user, each with its line, 0 if unknown, and its names.

    A function whose call is repeated may have returned, so only its globals are known. The loop
    that runs at that time has gone on to another line.
    """
    is_again = False
    for frame in autograd.frames():
        code, line, around, own = frame.f_code, frame.f_lineno, frame.f_globals, frame.f_locals
        line = 0 if is_again else line
        if code in CALLED_AGAIN and own["at"] is not None:
            at: Place = own["at"]
            code, line, around, own, is_again = at.code, at.line.number, at.names, {}, True
        if is_users(code.co_filename):
            yield code, line, {n: around[n] for n in code.co_names if n in around} | own


def variable_of(value: object, default: str = "optimizer") -> str:
    """Return the name of the variable, or of the attribute of ``self``, that is an object."""
    for _, _, names in _known_names():
        own = getattr(names.get("self"), "__dict__", {})
        for name, each in {**names, **{f"self.{name}": each for name, each in own.items()}}.items():
            if each is value:
                return name
    return default


def model_of(weights: Iterable[Tensor]) -> str:
    """Return the name of the variable that is the smallest module with all weights, or "model"."""
    wanted, found = set(map(id, weights)), list[tuple[int, str]]()
    for _, _, names in _known_names():
        for name, value in names.items():
            if isinstance(value, nn.Module) and name != "self":
                held = set(map(id, value.parameters()))
                found += [(len(held), name)] * (wanted <= held)
    return min(found, default=(0, "model"))[1]


def is_of_batch(tensor: Tensor) -> bool:
    """Return whether a tensor is passed to a module or a loss of PyTorch, with rows as the input.

    A weight of classes or a carried state has others.
    """
    for frame in autograd.frames():
        is_loss = frame.f_code.co_name.endswith(("_loss", "cross_entropy", "_with_logits"))
        if is_loss and frame.f_code.co_filename == torch.nn.functional.__file__:
            given: Any = list(frame.f_locals.values())
        elif frame.f_code is modules.CALL_CODE:
            given = (frame.f_locals["args"], frame.f_locals["kwargs"])
        else:
            continue
        tensors = [*tensors_in([given])]
        part = next((each for each in tensors if is_part_of(tensor, each)), None)
        if part is not None:
            return part.shape[:1] == tensors[0].shape[:1] and not isinstance(tensor, nn.Parameter)
    return False


def may_be_rows(tensor: Tensor) -> bool:
    """Return whether a tensor has as many rows as the input of the running module, if one runs."""
    for frame in autograd.frames():
        if frame.f_code is modules.CALL_CODE:
            first = next(tensors_in([frame.f_locals["args"], frame.f_locals["kwargs"]]), tensor)
            return first.shape[:1] == tensor.shape[:1]
    return True


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a file belongs to the user's program or to a package that it uses."""
    if file.startswith(_NOT_USERS):
        return False
    return is_of_package(file) or not file.startswith(_LIBRARY)


def is_of_package(file: str) -> bool:
    return any(part in file for part in _PACKAGES)


def path_to(is_it: Callable[[Tensor], bool], name: str, value: Any, depth: int) -> str | None:
    """Return the expression of a tensor in a value, such as ``batch['x']``; None if not found.

    Containers are searched up to ``depth`` levels below the outermost one.
    """
    if isinstance(value, Tensor):
        return name if is_it(value) else None
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)) and len(value) <= 64:
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    elif isinstance(value, nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        parts = [(f"{name}.{path}", part) for path, part in named]
    elif type(value).__module__ in sys.modules and hasattr(value, "__dict__"):
        is_plain = not isinstance(value, (type, ModuleType, FunctionType))
        parts = [(f"{name}.{key}", part) for key, part in vars(value).items()] if is_plain else []
    else:
        return None
    for path, part in parts:
        is_inner = depth > 0 and isinstance(part, (dict, list, tuple))
        if isinstance(part, Tensor) or is_inner:
            found = path_to(is_it, path, part, depth - 1)
            if found is not None:
                return found
    return None


def is_same_view(tensor: Tensor, other: Tensor) -> bool:
    if tensor is other:
        return True
    if tensor.shape != other.shape or not is_part_of(tensor, other):
        return False
    is_plain = tensor.layout is torch.strided and other.layout is torch.strided
    return not is_plain or tensor.storage_offset() == other.storage_offset()


def is_part_of(tensor: Tensor, whole: Tensor) -> bool:
    """Return whether two tensors share memory."""
    if tensor is whole:
        return True
    one, other = storages.memory_of(tensor), storages.memory_of(whole)
    return one is not None and other is not None and one.cdata == other.cdata


# --- reachable objects ----------------------------------------------------------------------------

_DEPTH = 3
"""The depth of calls to search: ``lambda: train.step(batch)`` calls a method that calls another."""


def owners_in(function: Any) -> list[nn.Module | Optimizer]:
    """Return the modules and optimizers in a function's closure, globals and bound object.

    Functions that it refers to are searched too. Nothing is called.
    """
    reachable = _reachable(function, _DEPTH)
    found = {id(value): value for value in reachable if isinstance(value, (nn.Module, Optimizer))}
    return [*found.values()]


def _reachable(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (nn.Module, Optimizer)):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _reachable(part, depth)
    elif isinstance(value, MethodType):
        yield from _reachable(value.__func__, depth)
        yield from _reachable(value.__self__, depth)
    elif isinstance(value, FunctionType):
        for part in _named_in(value):
            yield from _reachable(part, depth - 1)
    elif isinstance(value, (list, tuple)):
        for part in value[:16]:
            yield from _reachable(part, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for part in list(vars(value).values()):
            if isinstance(part, (nn.Module, Optimizer, list, tuple)):
                yield from _reachable(part, depth - 1)


def _named_in(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not set yet
            yield cell.cell_contents
    for name in (name for each in _codes(function.__code__) for name in each.co_names):
        if name in function.__globals__:
            yield function.__globals__[name]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
