"""How many ops in a row have made a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Depths:
    """Counts the ops on the longest way from the beginning to a tensor, as autograd knows them.

    Ops that no gradient goes through are not counted.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> Depths().of((x * 2).exp() + x)
        3
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {None: 0}

    def of(self, tensor: Tensor) -> int:
        """Return the number for a tensor; what earlier calls found is not looked for again."""
        pending = [tensor.grad_fn]
        while pending:
            node = pending[-1]
            if node in self._known:
                pending.pop()
                continue
            before = [each for each, _ in node.next_functions] if node is not None else []
            unknown = [each for each in before if each not in self._known]
            if unknown:
                pending += unknown
                continue
            # A leaf, whose node has none before it, is no op.
            self._known[node] = 1 + max(self._known[each] for each in before) if before else 0
            pending.pop()
        return self._known[tensor.grad_fn]
