"""Alignment of the tokens of two runs, and the drift of their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._common.numbers import number, things

NO_LABEL = -100
"""The label of untrained positions, as in ``torch.nn.functional.cross_entropy``."""


class Tokens(NamedTuple):
    """The tokens of a batch.

    Attributes:
        ids: Integer ids of shape [sequences, positions].
        is_token: A boolean mask of the same shape, False for padding.
        is_counted: A boolean mask, False for padding and for tokens that are not trained on.
    """

    ids: Tensor
    is_token: Tensor
    is_counted: Tensor


def tokens_of(batch: Any) -> Tokens | None:
    """Return the tokens of a batch, None if it is not one of a language model.

    The ids are its ``input_ids``, its first element or the batch itself, and must be integers in
    two dimensions. Padding has 0 in ``attention_mask``; untrained tokens have -100 in ``labels``.
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
    """Yield corresponding tensors of two modules, with their entries in the same order.

    With tokens, the tensors have one row for each token, independent of padding and of the number
    of calls. Tensors without an entry for each token are left out. Without tokens, tensors whose
    calls or shapes differ are left out.
    """
    for of_a, of_b in zip(_by_position(a), _by_position(b), strict=False):
        if tokens_a is not None and tokens_b is not None:
            rows_a, rows_b = _rows(of_a, tokens_a.is_token), _rows(of_b, tokens_b.is_token)
            if rows_a is not None and rows_b is not None and rows_a.shape == rows_b.shape:
                yield rows_a, rows_b
        elif [each.shape for each in of_a] == [each.shape for each in of_b]:
            yield from zip(of_a, of_b, strict=True)


def _by_position(calls: Calls) -> list[list[Tensor]]:
    """Return the tensors of all calls, for each position that occurs in all of them."""
    num = min(map(len, calls), default=0)
    return [[call[position] for call in calls] for position in range(num)]


def _rows(tensors: Sequence[Tensor], is_token: Tensor) -> Tensor | None:
    """Return one row for each token from the tensors of all calls, None if there are none."""
    for joined in _joined(tensors):
        mask = is_token.to(joined.device)
        if joined.shape[:2] == mask.shape:
            return joined[mask]
        if joined.shape[:1] == (mask.numel(),):  # positions and sequences in one dimension
            return joined[mask.flatten()]
    return None


def _joined(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the possible concatenations of calls: along positions, then along sequences."""
    if len(tensors) == 1:
        yield tensors[0]
        return
    for dim in (1, 0):
        others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
        if len(others) == 1 and all(tensor.ndim > dim for tensor in tensors):
            yield torch.cat(list(tensors), dim)


@dataclass(frozen=True)
class LogProbs:
    """The log-probabilities of the same tokens in two versions; differences are a - b.

    With ``a`` as the trainer and ``b`` as the rollout, ratios are the importance ratios of
    off-policy gradients.

    Attributes:
        num_tokens: The number of counted tokens, without the first token of each sequence.
        mean: The mean difference.
        largest: The largest absolute difference.
        ratio: The geometric mean of the importance ratios of tokens: ``exp(mean)``.
        sequence_ratios: The importance ratio of each sequence: ``exp`` of the sum of its
            differences.
        effective_samples: The effective sample size of the sequences, ``sum(w)**2 / sum(w**2)``
            over these ratios. It is the number of sequences if all ratios are equal.
        effective_tokens: The effective sample size of single tokens, from their ratios.
    """

    num_tokens: int
    mean: float
    largest: float
    ratio: float
    sequence_ratios: tuple[float, ...]
    effective_samples: float
    effective_tokens: float

    def __str__(self) -> str:
        tokens, sequences = things(self.num_tokens, "token"), len(self.sequence_ratios)
        low, high = min(self.sequence_ratios), max(self.sequence_ratios)
        return (
            f"log-probabilities of {tokens}, a - b: mean {self.mean:.2g}, largest "
            f"{self.largest:.2g}; importance ratio {self.ratio:.6g} a token, {low:.4g} to "
            f"{high:.4g} a sequence; effective sample size {number(self.effective_samples)} of "
            f"{things(sequences, 'sequence')}, {number(self.effective_tokens)} of {tokens}"
        )


def log_probs(a: Any, b: Any, tokens_a: Tokens | None, tokens_b: Tokens | None) -> LogProbs | None:
    """Compare the logits of two versions with the same tokens; None if there are no such logits.

    Sync: a few.
    """
    if tokens_a is None or tokens_b is None:
        return None
    of_a, of_b = _of_tokens(a, tokens_a), _of_tokens(b, tokens_b)
    if of_a is None or of_b is None:
        return None
    differences = [x - y for x, y in zip(of_a, of_b, strict=True)]
    each = torch.cat(differences)
    if not each.numel():
        return None
    sums = torch.stack([of_sequence.sum() for of_sequence in differences])
    return LogProbs(
        num_tokens=each.numel(),
        mean=float(each.mean()),
        largest=float(each.abs().max()),
        ratio=math.exp(float(each.mean())),
        sequence_ratios=tuple(sums.exp().tolist()),
        effective_samples=_effective_size(sums),
        effective_tokens=_effective_size(each),
    )


def require_same_tokens(a: Tokens | None, b: Tokens | None) -> None:
    """Check that two batches have the same tokens, apart from padding.

    Raises:
        ValueError: The tokens differ.
    """
    if a is None or b is None:
        return
    if _told(a) != _told(b):
        raise ValueError(
            "compare: the two batches do not have the same tokens: input_ids may differ in padding "
            "only, and attention_mask must be 0 there"
        )


def _told(tokens: Tokens) -> list[list[list[int]]]:
    """Return the tokens of each sequence, and which of them count."""
    return [
        [ids[is_token].tolist(), is_counted[is_token].tolist()]
        for ids, is_token, is_counted in zip(*tokens, strict=True)
    ]


@torch.no_grad()
def _of_tokens(output: Any, tokens: Tokens) -> list[Tensor] | None:
    """Return the log-probabilities of the counted tokens of each sequence, without its first."""
    logits = _logits(output)
    if logits is None or logits.shape[:2] != tokens.ids.shape:
        return None
    found = []
    for of_sequence, *of_tokens in zip(logits, *tokens, strict=True):
        ids, is_token, is_counted = (token.to(logits.device) for token in of_tokens)
        logs = of_sequence[is_token][:-1].float().log_softmax(-1)
        of_next = logs.gather(1, ids[is_token][1:, None].long())[:, 0]
        found.append(of_next[is_counted[is_token][1:]].cpu().double())
    return found


def _logits(output: Any) -> Tensor | None:
    """Return the ``logits`` of an output or the output itself, None unless it has three dims."""
    found = output.get("logits") if isinstance(output, Mapping) else output
    found = getattr(found, "logits", found)
    is_logits = isinstance(found, Tensor) and found.ndim == 3 and found.is_floating_point()
    return found if is_logits else None


def _effective_size(logs: Tensor) -> float:
    """Return ``sum(w)**2 / sum(w**2)`` for the logarithms of weights.

    Example:
        >>> round(_effective_size(torch.tensor([0.0, 0.0, -100.0])), 6)
        2.0
    """
    return float((2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)).exp())
