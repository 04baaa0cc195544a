"""Alignment of the tensors of two runs: by token where batches, calls or padding differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_LABEL = -100
"""Stands in labels where nothing is trained, as in ``torch.nn.functional.cross_entropy``."""


class Tokens(NamedTuple):
    """Tokens of a batch.

    Attributes:
        ids: Whole numbers of shape [sequences, positions].
        is_token: A boolean of the same shape: False for padding.
        is_counted: The same: False for padding, and for tokens that are not trained on.
    """

    ids: Tensor
    is_token: Tensor
    is_counted: Tensor


def tokens_of(batch: Any) -> Tokens | None:
    """Return the tokens of a batch, None if it is not one of a language model.

    They are its ``input_ids``, or the first tensor, of whole numbers in two dimensions. Padding is
    where its ``attention_mask`` is 0; tokens that are not trained on have -100 in its ``labels``.
    """
    named = batch if isinstance(batch, Mapping) else {}
    ids = named.get("input_ids") if named else batch
    if isinstance(ids, (tuple, list)) and ids:
        ids = ids[0]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64):
        return None
    is_token = torch.ones_like(ids, dtype=torch.bool)
    mask, labels = named.get("attention_mask"), named.get("labels")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        is_token = mask.bool()
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        return Tokens(ids, is_token, is_token & (labels != NO_LABEL))
    return Tokens(ids, is_token, is_token)


Calls = Sequence[Sequence[Tensor]]
"""The tensors of each call of a module."""


def pairs(
    a: Calls, b: Calls, tokens_a: Tokens | None, tokens_b: Tokens | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of two modules that belong together, in the same order of entries.

    With tokens, these are rows for each token, whatever the padding is, and however many calls
    there were for them. Tensors that have no entry for each token are left out. Without tokens,
    calls and shapes must be the same.
    """
    for of_a, of_b in zip(_by_position(a), _by_position(b), strict=False):
        if tokens_a is not None and tokens_b is not None:
            rows_a, rows_b = _rows(of_a, tokens_a.is_token), _rows(of_b, tokens_b.is_token)
            if rows_a is not None and rows_b is not None and rows_a.shape == rows_b.shape:
                yield rows_a, rows_b
        elif [each.shape for each in of_a] == [each.shape for each in of_b]:
            yield from zip(of_a, of_b, strict=True)


def _by_position(calls: Calls) -> list[list[Tensor]]:
    """Return the tensors at each position that all calls have."""
    num = min(map(len, calls), default=0)
    return [[call[position] for call in calls] for position in range(num)]


def _rows(tensors: Sequence[Tensor], is_token: Tensor) -> Tensor | None:
    """Return the rows of a tensor that came in one or more calls, one for each token."""
    for joined in _joined(tensors):
        mask = is_token.to(joined.device)
        if joined.shape[:2] == mask.shape:
            return joined[mask]
        if joined.shape[:1] == (mask.numel(),):  # positions and sequences in one dimension
            return joined[mask.flatten()]
    return None


def _joined(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield what the calls of a module may be parts of: of the positions, or of the sequences."""
    if len(tensors) == 1:
        yield tensors[0]
        return
    for dim in (1, 0):
        others = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in tensors}
        if len(others) == 1 and all(each.ndim > dim for each in tensors):
            yield torch.cat(list(tensors), dim)
