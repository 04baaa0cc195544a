"""Drift of the log-probabilities of tokens between two versions of a language model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep._common.numbers import number, things
from halfstep._tune.alignment import Tokens


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities that two versions give to the same tokens; differences are a - b.

    With ``a`` as the trainer and ``b`` as the rollout, ratios are the importance ratios of
    off-policy gradients.

    Attributes:
        num_tokens: The number of tokens that count; the first one of a sequence does not.
        mean: The mean difference.
        largest: The largest difference, without its sign.
        ratio: The importance ratio of a token, their geometric mean: ``exp(mean)``.
        sequence_ratios: The importance ratio of each sequence: the ``exp`` of the sum of its
            differences.
        effective_samples: The effective sample size of the sequences, ``sum(w)**2 / sum(w**2)`` of
            these ratios: as many sequences as there are if all ratios are equal.
        effective_tokens: The same of the ratios of single tokens.
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
    """Compare the outputs of two versions, None if they are not logits of tokens.

    Raises:
        ValueError: The batches have other tokens.

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
        ValueError: They do not.
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
    """Return the log-probabilities of the tokens of each sequence, but of the first ones."""
    logits = _logits(output)
    if logits is None or logits.shape[:2] != tokens.ids.shape:
        return None
    found = []
    for of_sequence, *of_tokens in zip(logits, *tokens, strict=True):
        ids, is_token, is_counted = (each.to(logits.device) for each in of_tokens)
        logs = of_sequence[is_token][:-1].float().log_softmax(-1)
        of_next = logs.gather(1, ids[is_token][1:, None].long())[:, 0]
        found.append(of_next[is_counted[is_token][1:]].double().cpu())
    return found


def _logits(output: Any) -> Tensor | None:
    """Return the ``logits`` of an output, or the output; in three dimensions."""
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
