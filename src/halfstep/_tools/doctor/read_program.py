"""A parsed source file: its calls in execution order, and their contexts."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from halfstep._tools.doctor.read_names import Function, NameScope, arguments, dotted, words_of
from halfstep._tools.doctor.read_paths import Walk
from halfstep._tools.doctor.read_sites import Site, condition_of
from halfstep._tools.doctor.read_values import Meaning, SourceScaler, argument

_CLIP_OWNERS = (
    *("self", "optimizer", "optim"),
    *("accelerator", "fabric", "strategy", "engine", "trainer"),
)
_CLIPS = re.compile(r"(dispatch_)?clip_grad")
"""A pattern for functions that clip gradients; ``dispatch_clip_grad`` is timm's."""

_OF_MODELS = ("parameters", "named_parameters", "train", "eval")
_MODEL = re.compile(
    r"(^|[._])(model|net|unet|network|generator|discriminator)$|(^|\.)net[A-Z_]\w*$"
)
"""A pattern for names that are typical for a model."""
_MAKES = re.compile(r"(^|\.)(load|build|get|create|make|init|setup|prepare|train|test|save)_\w*$")
"""A pattern for functions that are named after a model."""
_TRAINER = re.compile(r"(transformers|trl)\.(\w+\.)*\w*Trainer")
_ADAPTERS = re.compile("peft|lora", re.I)
_AMP_WORDS = re.compile(r"amp|fp16|float16|half|mixed|scaler|precision|autocast|scaling", re.I)


@dataclass(frozen=True)
class Root:
    """A file or a function, with all calls that it leads to, in order."""

    node: ast.Module | Function
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Built:
    """An optimizer created from the parameters of a model."""

    root: Root
    site: Site
    model: str
    name: str


class Program:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.meaning = Meaning(tree)

    @cached_property
    def roots(self) -> list[Root]:
        """The parts of the file to check; called functions belong to the part that calls them."""
        names, found = self.meaning.names, list[Root]()
        called = {*names.calls.values()}
        functions = sorted((scope.node for scope in names.scopes.values()), key=called.__contains__)
        seen: set[ast.AST] = set()
        for node in functions:
            if node not in seen:
                walk = Walk(self.meaning)
                walk.run(node)
                found.append(Root(node, tuple(walk.sites)))
                seen |= {site.scope.node for site in found[-1].sites}
        return found

    @property
    def sites(self) -> Iterator[Site]:
        """The calls of all roots; a call reached from several roots appears several times."""
        for root in self.roots:
            yield from root.sites

    @cached_property
    def words(self) -> set[str]:
        """All names, attributes and keywords in the file."""
        return set(words_of(self.tree))

    @property
    def imported(self) -> set[str]:
        return set(self.meaning.names.imports.values())

    @cached_property
    def models(self) -> set[str]:
        """The names of objects used as models, by calls such as ``parameters()`` or ``eval()``."""
        names = {dotted(site.owner) for site in self.sites if site.method in _OF_MODELS}
        return names - {"", "self"}

    def is_model(self, node: ast.expr) -> bool:
        """Return whether an expression is a model, by its name or its use."""
        name = dotted(node).removesuffix(".module")
        is_defined = bool(name) and name.partition(".")[0] in self.meaning.names.imports
        is_named = bool(_MODEL.search(name)) and not _MAKES.search(name)
        return name in self.models or (is_named and not is_defined)

    @cached_property
    def switches(self) -> Mapping[str, int]:
        """The conditions with a scaler in one arm and plain calls in the other."""
        found: dict[str, int] = {}
        for node in ast.walk(self.tree):
            match node:
                case ast.If(test=test, body=body, orelse=orelse):
                    arms = [_calls_in(body), _calls_in(orelse)]
                case ast.IfExp(test=test, body=yes, orelse=no):
                    arms = [_calls_in([yes]), _calls_in([no])]
                case _:
                    continue
            scales = ["scaler" in arm for arm in arms]
            plain = [not scaled and bool(arm) for scaled, arm in zip(scales, arms, strict=True)]
            text, which = condition_of(test, 0)
            is_named = bool(_AMP_WORDS.search(text)) and not arms[1] and scales[0]
            if (scales[0] and plain[1]) or (is_named and not isinstance(test, ast.BoolOp)):
                found[text] = which
            elif scales[1] and plain[0]:
                found[text] = 1 - which
        return found

    # --- kinds of calls ---------------------------------------------------------------------------

    def is_backward(self, site: Site) -> bool:
        if site.method != "backward":
            return False
        is_inherited = isinstance(site.owner, ast.Call) and dotted(site.owner.func) == "super"
        is_of_function = any(dotted(each) in ("ctx", "context") for each in site.call.args[:1])
        return not (is_of_function or is_inherited)

    def scaled_by(self, site: Site) -> str:
        """Return the scaler that scales the loss of a backward pass; empty if none does."""
        if not self.is_backward(site):
            return ""
        for written in self.meaning.candidates(site.owner, site.scope):
            if written is None or not isinstance(written[0], ast.Call):
                continue
            function, scope = written[0].func, written[1]
            if not isinstance(function, ast.Attribute) or function.attr != "scale":
                continue
            if self.meaning.is_scaler(function.value, scope):
                is_on = self.meaning.may_be_on(function.value, scope)
                return dotted(function.value) if is_on else ""
        return ""

    def is_scaler_step(self, site: Site) -> bool:
        """Return whether a call steps an optimizer through a scaler that may be on."""
        is_step = site.method == "step" and bool(site.call.args or site.call.keywords)
        given = site.owner, site.scope
        return is_step and self.meaning.is_scaler(*given) and self.meaning.may_be_on(*given)

    def is_optimizer_step(self, site: Site) -> bool:
        """Return whether a call steps an optimizer without a scaler."""
        return site.method == "step" and self.meaning.is_optimizer(site.owner, site.scope)

    @cached_property
    def built(self) -> list[Built]:
        """The optimizers that are created from the parameters of models."""
        return [
            Built(root, site, model, site.target_name or "the optimizer")
            for root in self.roots
            for site in root.sites
            if self.meaning.makes_optimizer(site.call, site.scope)
            for node in arguments(site.call)
            for model in self._models(node, site.scope)
        ]

    @cached_property
    def trainers(self) -> list[Built]:
        """The trainers of transformers that train, and create the optimizer of their model.

        There are none in a file with adapters, whose parameters are others.
        """
        has_adapters = any(map(_ADAPTERS.search, self.words | self.imported))
        return [
            Built(root, site, ast.unparse(model), f"{name or 'trainer'}.create_optimizer()")
            for root in self.roots
            for site in root.sites
            if not has_adapters
            for name in [site.target_name or None]
            for train in (s.owner for s in root.sites if s.method == "train")
            if train is site.call or dotted(train) == name
            if _TRAINER.fullmatch(self.meaning.qualified(site.call.func, site.scope))
            if (model := argument(site.call, "model", 0)) is not None
        ]

    def _models(self, node: ast.expr, scope: NameScope) -> Iterator[str]:
        """Yield the models whose parameters, not copies of them, an expression contains."""
        for written in self.meaning.candidates(node, scope):
            methods = [
                inner.func
                for inner in (ast.walk(written[0]) if written else ())
                if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
            ]
            if not any(method.attr in ("clone", "float", "detach") for method in methods):
                for method in methods:
                    if method.attr in ("parameters", "named_parameters"):
                        yield ast.unparse(method.value)

    def is_clip(self, site: Site) -> bool:
        """Return whether a call clips gradients without unscaling them."""
        if site.method in ("clamp_", "clip_"):
            return re.search(r"\bgrad\b", ast.unparse(site.owner)) is not None
        name = self.meaning.qualified(site.call.func, site.scope).rpartition(".")[2]
        if not _CLIPS.match(name or site.method or dotted(site.call.func)):
            return False
        owner = dotted(site.owner).rpartition(".")[2].lower()
        return not owner.endswith(_CLIP_OWNERS) and not self.meaning.is_scaler(
            site.owner, site.scope
        )

    @cached_property
    def scalers(self) -> dict[str, SourceScaler]:
        """The scalers that are created in the file, by name."""
        found: dict[str, SourceScaler] = {}
        for site in self.sites:
            scaler = self.meaning.scaler(site.owner, site.scope) if site.method else None
            if scaler is not None:
                found.setdefault(dotted(site.owner), scaler)
        return found

    def arm_of(self, site: Site, switches: Collection[str]) -> int | None:
        """Return in which arm of a switch a call is, None if in none."""
        arms = site.arms.items()
        return next((n for s, n in arms if self.meaning.switch(s, site.scope) in switches), None)

    def updates(self, scaler: str) -> bool:
        return any(s.method == "update" and dotted(s.owner) == scaler for s in self.sites)


def _calls_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the training calls below nodes; ``"scaler"`` stands for calls of a scaler."""
    found: set[str] = set()
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = dotted(node.func.value).lower()
            if owner.endswith("scaler"):
                found.add("scaler")
            elif node.func.attr in ("backward", "step"):
                found.add(node.func.attr)
    return found
