"""A small GPT with places where a fault can be put, as in :mod:`models`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.diagnose.models import Again, Block, Place, Spot, through
from torch import Tensor, nn

CONTEXT = 6
MASKS = ("fill", "add", "alibi")


class Attention(nn.Module):
    """By hand; ``mask`` is "fill", "add" (a buffer of 0 and -inf), "alibi" or "times" (wrong)."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.place = Place()
        self.spot = Spot()
        self.heads = heads
        self.mask = "fill"
        future = torch.ones(CONTEXT, CONTEXT).triu(1).bool()
        penalty = torch.zeros(CONTEXT, CONTEXT).masked_fill(future, -math.inf)
        steps = torch.arange(CONTEXT)
        self.register_buffer("future", future)
        self.register_buffer("penalty", penalty)
        self.register_buffer("alibi", penalty - 0.25 * (steps[:, None] - steps).abs())
        self.padding: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))  # fault: Attention.q
        k = self.split(self.k(x))  # fault: Attention.k
        v = self.split(self.v(x))  # fault: Attention.v
        y = self.attend(q, k, self.place(v)).transpose(1, 2).flatten(2)
        return self.out(self.spot(y))  # fault: Attention.out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)  # fault: Attention.scores
        scores = self.masked(scores / math.sqrt(q.shape[-1]))
        return scores.softmax(-1) @ v  # fault: Attention.softmax

    def masked(self, scores: Tensor) -> Tensor:
        if self.padding is not None:
            scores = scores.masked_fill(self.padding[:, None, None, :], -math.inf)
        if self.mask in ("add", "alibi"):
            return scores + (self.penalty if self.mask == "add" else self.alibi)
        if self.mask == "times":
            return scores + self.future * -math.inf  # fault: Attention.times
        return scores.masked_fill(self.future, -math.inf)


class FusedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))  # fault: FusedAttention.q
        k = self.split(self.k(x))  # fault: FusedAttention.k
        v = self.split(self.v(x))  # fault: FusedAttention.v
        y = self.attend(q, k, self.place(v)).transpose(1, 2).flatten(2)
        return self.out(self.spot(y))  # fault: FusedAttention.out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mask in ("add", "alibi"):
            mask = self.penalty if self.mask == "add" else self.alibi
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention
        self.spot = Spot()
        self.mlp = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.spot(self.attention(self.norm(x)))  # fault: Layer.add
        return self.mlp(x)


class GPT(nn.Module):
    """The embedding is narrow and made wider by a product, so that the stream is float16."""

    attention: type[Attention] = Attention

    def __init__(self, width: int, depth: int, again: Again = "no") -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.register_buffer("positions", 0.1 * torch.randn(CONTEXT, 8))
        self.wide = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(self.attention(width), width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.spot = Spot()
        self.head = nn.Linear(width, 20)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.embed(x) + self.positions)  # fault: GPT.wide
        for layer in self.layers:
            x = through(layer, x, self.again)
        return self.head(self.norm(self.spot(x)))  # fault: GPT.head


class FusedGPT(GPT):
    attention = FusedAttention
