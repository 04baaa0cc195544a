"""A file that has been read: what all rules ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from halfstep._doctor.reading.meaning import Meaning, Scaler
from halfstep._doctor.reading.scopes import Function, dotted, words_of
from halfstep._doctor.reading.sites import Site, Walk
from halfstep._doctor.reading.values import Values

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_grad_norm")
_CLIP_OWNERS = ("accelerator", "fabric", "strategy", "engine", "trainer")


@dataclass(frozen=True)
class Root:
    """A file's own statements or a function, and the calls that run with it.

    Attributes:
        node: The file or the function.
        sites: The calls, in order.
    """

    node: ast.Module | Function
    sites: tuple[Site, ...]


class Program:
    """A file that has been read.

    Args:
        tree: The file.
        known: Objects that names are known to stand for.
        function: Only this function is looked at, and what it calls; all of the file if None.
    """

    def __init__(
        self,
        tree: ast.Module,
        known: Mapping[str, object],
        function: Function | None = None,
    ) -> None:
        self.tree = tree
        self.values = Values(tree, known)
        self.meaning = Meaning(self.values)
        self.known = known
        self._function = function

    @cached_property
    def roots(self) -> list[Root]:
        """What is looked at."""
        walk = Walk(self.meaning)
        scopes = self.values.names.scopes
        nodes = [scope.node for scope in scopes.values()]
        chosen = nodes if self._function is None else [self._function]
        return [Root(node, tuple(walk.of(node))) for node in chosen]

    @property
    def sites(self) -> Iterator[Site]:
        """The calls of all roots; one that is reached from several comes several times."""
        for root in self.roots:
            yield from root.sites

    @cached_property
    def words(self) -> set[str]:
        """All names, attributes and keywords that are used in what is looked at."""
        if self._function is None:
            return set(words_of(self.tree))
        functions = {self._function, *(site.scope.node for site in self.sites)}
        return {word for function in functions for word in words_of(function)}

    @property
    def imported(self) -> set[str]:
        """The full names of what the file imports."""
        return set(self.values.names.imports.values())

    # --- what a call does -------------------------------------------------------------------------

    def is_backward(self, site: Site) -> bool:
        """Say whether a call runs a backward pass."""
        if site.method != "backward":
            return False
        first = dotted(site.call.args[0]) if site.call.args else ""
        is_inherited = isinstance(site.owner, ast.Call) and dotted(site.owner.func) == "super"
        return first not in ("ctx", "context") and not is_inherited

    def scaled_by(self, site: Site) -> str:
        """Return the scaler that scales the loss of a backward pass; empty if none does."""
        if not self.is_backward(site):
            return ""
        for written in self.values.candidates(site.owner, site.scope):
            if written is None or not isinstance(written[0], ast.Call):
                continue
            function, scope = written[0].func, written[1]
            if not isinstance(function, ast.Attribute) or function.attr != "scale":
                continue
            if self.meaning.is_scaler(function.value, scope):
                scaler = self.meaning.scaler(function.value, scope)
                is_on = scaler is None or scaler.enabled is not False
                return dotted(function.value) if is_on else ""
        return ""

    def is_scaler_step(self, site: Site) -> bool:
        """Say whether a call steps an optimizer through a scaler that may be on."""
        is_step = site.method == "step" and bool(site.call.args or site.call.keywords)
        if not is_step or not self.meaning.is_scaler(site.owner, site.scope):
            return False
        scaler = self.meaning.scaler(site.owner, site.scope)
        return scaler is None or scaler.enabled is not False

    def is_optimizer_step(self, site: Site) -> bool:
        """Say whether a call steps an optimizer without a scaler."""
        return site.method == "step" and self.meaning.is_optimizer(site.owner, site.scope)

    def is_clip(self, site: Site) -> bool:
        """Say whether a call clips gradients as they are."""
        name = self.values.qualified(site.call.func, site.scope).rpartition(".")[2]
        if (name or site.method or dotted(site.call.func)) not in _CLIPS:
            return False
        owner = dotted(site.owner).rpartition(".")[2].lower()
        return not owner.endswith(_CLIP_OWNERS) and not self.meaning.is_scaler(
            site.owner, site.scope
        )

    # --- what there is in the file ----------------------------------------------------------------

    @cached_property
    def scalers(self) -> dict[str, Scaler]:
        """The scalers that are made in the file, or known, by the names that they are used by."""
        found: dict[str, Scaler] = {}
        for site in self.sites:
            scaler = self.meaning.scaler(site.owner, site.scope) if site.method else None
            if scaler is not None:
                found.setdefault(dotted(site.owner), scaler)
        return found
