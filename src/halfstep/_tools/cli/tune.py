"""``halfstep tune``: a policy that keeps only the necessary modules in float32."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from halfstep._common.numbers import things
from halfstep._common.text import did_you_mean
from halfstep._tools.cli.exits import CommandError, reason
from halfstep._tools.cli.policy import read_policy

HELP = "find which modules must stay in fp32, and write a policy"
DESCRIPTION = (
    "Compares a model in lower precision with float32, module by module, and finds the smallest "
    "set of modules to keep in float32."
)
EPILOG = """\
TARGET is a function without arguments that returns (model, batches, loss_fn):

  def make():
      ...
      return model, batches, loss_fn   # loss_fn(model, batch) returns the loss

loss_fn may be None; the loss is then taken from the output of the model.

examples:
  halfstep tune train.py:make -o policy.toml
  halfstep tune mypackage.models:make --dtype bf16

Then use the policy in the script:
  autocast(..., policy=Policy.load("policy.toml"), module=model)
or, for a script without autocast:
  halfstep run --amp fp16 --policy policy.toml train.py

Exit code: 0 if the policy keeps the model within bounds, 1 if none does, 130
after Ctrl-C. More: docs/tune.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="file.py:function or package.module:function"
    )
    parser.add_argument(
        "--dtype", choices=("fp16", "bf16"), default="fp16", help="lower precision (default: fp16)"
    )
    parser.add_argument(
        "--error",
        type=_error,
        metavar="X",
        help="largest relative error of any module (default: depends on dtype and depth)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the policy to this TOML file"
    )
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        default="standard",
        help="policy to start from: a TOML file, a preset, or a text (default: standard)",
    )


def run(arguments: argparse.Namespace) -> int:
    policy = read_policy(arguments.policy)
    function = _function(arguments.target)
    path = arguments.output
    if path is not None and not path.absolute().parent.is_dir():
        raise CommandError(f"there is no folder {path.parent} to write {path.name} to")
    import torch

    from halfstep import tune

    model, batches, loss_fn = _made(arguments.target, function)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[arguments.dtype]
    tuned = tune(model, batches, loss_fn, dtype, arguments.error, policy)
    print(tuned)
    if path is not None:
        tuned.save(path)
        print(f"written to {path}")
    return 0 if tuned.is_met else 1


def _error(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 0.01") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite: write 0.01")
    return value


# --- the target -----------------------------------------------------------------------------------


def _function(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise CommandError(
            f"{target!r} names no function: write file.py:function or package.module:function"
        )
    if place.endswith(".py"):
        _require_function(Path(place), name)
        module = _file(Path(place))
    else:
        module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, each in vars(module).items()
            if callable(each) and getattr(each, "__module__", None) == module.__name__
        ]
        raise CommandError(_no_function(place, name, own))
    found: Callable[[], Any] = function
    return found


def _require_function(path: Path, name: str) -> None:
    """Raise an error if a file certainly has no such function; it is parsed, not run."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise CommandError(f"{path}: {reason(error, path)}") from None
    except SyntaxError as error:  # not Python, or not UTF-8
        raise CommandError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    nodes = list(ast.walk(tree))
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    own = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    if name not in {*words, *own} and not words & {"*", "globals", "setattr", "exec"}:
        functions = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
        raise CommandError(_no_function(str(path), name, functions))


def _no_function(place: str, name: str, functions: list[str]) -> str:
    there = f"; its functions are {', '.join(functions)}" if functions else ""
    return f"{place} has no function {name!r}{did_you_mean(name, functions) or there}"


def _file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.absolute().parent))  # as Python does for a script
    # Its own name may be that of another module.
    loader = SourceFileLoader("_halfstep_target", str(path))
    spec = ModuleSpec(loader.name, loader, origin=str(path))
    spec.has_location = True
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as python -m does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise CommandError(
                f"there is no module {error.name!r} here; for a file write {name}.py:function"
            ) from None
        raise  # an import inside the module failed


def _made(target: str, function: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Call the function, and return its model, batches and loss function after checking them."""
    from halfstep._tools.tune.passes import Task
    from halfstep._tools.tune.tuner import require_batches

    made = function()
    if not isinstance(made, tuple) or len(made) != 3:
        what = things(len(made), "value") if isinstance(made, tuple) else type(made).__name__
        raise CommandError(f"{target} returned {what}: return (model, batches, loss_fn)")
    model, batches, loss_fn = made
    try:
        Task(model, loss_fn)
        require_batches(batches)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{target}: {error}") from None
    return model, batches, loss_fn
