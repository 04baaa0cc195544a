"""A private name of PyTorch stands in ``src/halfstep/_pytorch/``, and nowhere else in ``src``.

Elsewhere it is one of the names below, with the reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import halfstep

SRC = Path(halfstep.__file__).parent

OF_OUR_SCALER = "of halfstep's own scaler, which has the methods of PyTorch's"

ALLOWED = {
    "_check_inf_per_device": OF_OUR_SCALER,
    "_check_scale_growth_tracker": OF_OUR_SCALER,
    "_get_scale_async": OF_OUR_SCALER,
    "_lazy_init_scale_growth_tracker": OF_OUR_SCALER,
    "_maybe_opt_step": OF_OUR_SCALER,
    "_optimizers": "of an Accelerator, which tells in no other way what it has prepared",
    "_per_optimizer_states": OF_OUR_SCALER,
    "_skip_backward": "of a loop of Lightning, whose own callbacks set it",
    "_unscale_grads_": OF_OUR_SCALER,
    "_version": "steps read it of many tensors, and a call of a function would cost more than it",
}

NAMED_TUPLE = {"_asdict", "_fields", "_field_defaults", "_make", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def names_of_pytorch() -> frozenset[str]:
    """Return the private attributes of what halfstep is given by PyTorch or by its users."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    values = (
        *(torch, torch._C, torch.Tensor, torch.UntypedStorage, torch.Generator),
        *(torch.nn.Module(), torch.nn.parallel.DistributedDataParallel),
        *(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        *(torch.amp.GradScaler("cpu"), torch.autocast("cpu"), torch.autograd, torch.autograd.graph),
        *((weight * 2).grad_fn, torch.autograd.Function, torch.autograd.function.FunctionCtx),
        *(torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.library.Library),
        *(torch.utils.checkpoint, torch.distributed, torch.distributed.ProcessGroup),
    )
    return frozenset(name for value in values for name in dir(value) if is_private(name))


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(SRC.rglob("*.py"))
    return {path.relative_to(SRC).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def names_of_halfstep() -> frozenset[str]:
    """Return what halfstep calls its own functions, classes, attributes and values of modules."""
    return frozenset(name for tree in trees().values() for name in defined(tree))


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private name of PyTorch."""
    standard = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in sys.stdlib_module_names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Name(id=module)) if module in standard:
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(value=value, attr=name):
                if ast.unparse(value).startswith("torch.ops."):  # the name of an op
                    continue
                found = [name]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                found = [name]
            case ast.Call(
                func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]
            ) if not name.startswith("torch."):
                found = [name]
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                found = [name]
            case ast.Constant(value=str(name)) if name.startswith("torch.") and " " not in name:
                yield from ((node.lineno, name) for part in name.split(".") if is_private(part))
                continue
            case ast.ImportFrom(module=str(module), names=aliases) if is_torch(module):
                parts = [*module.split("."), *(alias.name for alias in aliases)]
                yield from ((node.lineno, part) for part in parts if is_private(part))
                continue
            case ast.Import(names=aliases):
                parts = [p for each in aliases if is_torch(each.name) for p in each.name.split(".")]
                yield from ((node.lineno, part) for part in parts if is_private(part))
                continue
            case _:
                continue
        for name in found:
            if is_private(name) and is_of_pytorch(name):
                yield node.lineno, name


def is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def is_of_pytorch(name: str) -> bool:
    if name in NAMED_TUPLE or name.startswith("_halfstep"):
        return False
    return name in names_of_pytorch() or name not in names_of_halfstep()


def test_private_names_of_pytorch_stand_in_one_folder() -> None:
    found = [
        f"src/halfstep/{file}:{line}: {name}"
        for file, tree in trees().items()
        if not file.startswith("_pytorch/")
        for line, name in private_names(tree)
        if name not in ALLOWED
    ]
    assert not found, "these go into src/halfstep/_pytorch/: " + ", ".join(found)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch._foreach_norm(tensors)", "_foreach_norm"),
        ("op._schema.arguments", "_schema"),
        ("import torch._dynamo", "_dynamo"),
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("from torch.distributed.tensor import _api", "_api"),
        ("getattr(module, '_orig_mod', None)", "_orig_mod"),
        ("vars(module)['_buffers']", "_buffers"),
        ("vars(module).get('_modules', {})", "_modules"),
        ("'torch._dynamo' in sys.modules", "torch._dynamo"),
        ("self._values", None),
        ("settings._replace(dtype=dtype)", None),
        ("import sys; sys._getframe(1)", None),
        ("torch.ops.aten._to_copy.default", None),
    ],
)
def test_what_counts_as_private(line: str, name: str | None) -> None:
    assert [found for _, found in private_names(ast.parse(line))] == [name] * (name is not None)


def test_what_is_allowed_is_used() -> None:
    used = {
        name
        for file, tree in trees().items()
        if not file.startswith("_pytorch/")
        for _, name in private_names(tree)
    }
    assert used >= ALLOWED.keys()
