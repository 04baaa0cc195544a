"""A small GPT with pre-norm blocks and one matrix for embedding and head.

The shared matrix gives every parameter a dense gradient: in fp32 almost no entry is exactly zero,
so a zero in fp16 was lost to the dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a :class:`GPT`."""

    vocab: int  # number of different tokens
    context: int  # maximum number of tokens in a sequence
    layers: int
    heads: int
    width: int  # length of a token's vector, a multiple of heads

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"GPTConfig: {name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig: width must be a multiple of heads, got {self.width} and {self.heads}"
            )

    @classmethod
    def of_size(cls, size: str, vocab: int) -> GPTConfig:
        """Return the configuration of a named size, one of :data:`SIZES`.

        Example:
            >>> GPTConfig.of_size("tiny", vocab=100).width
            32
        """
        if size not in SIZES:
            raise ValueError(f"no GPT size is called {size!r}; there are {', '.join(SIZES)}")
        return cls(vocab, *SIZES[size])


SIZES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (32, 2, 2, 32),  # 30 thousand parameters with 100 tokens: for tests
    "small": (64, 2, 4, 128),  # 0.4 M
    "medium": (256, 6, 6, 384),  # 11 M
    "43m": (256, 6, 12, 768),  # 43 M
}
"""Context, layers, heads and width of the named sizes."""


class Attention(nn.Module):
    """Causal self-attention, ``[batch, time, width]`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each token attend to itself and the tokens before it."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention and a feed-forward layer, each normed before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A decoder-only transformer language model.

    Example:
        >>> model = GPT(GPTConfig.of_size("tiny", vocab=100))
        >>> model(Tensor(2, 8).zero_().long()).shape
        torch.Size([2, 8, 100])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._init_weights()

    def _init_weights(self) -> None:
        """Draw weights with std 1 / sqrt(inputs), divided by sqrt(2 layers) at block outputs.

        The fixed 0.02 of GPT-2 is too small at width 128: the four precisions leave the first
        plateau at random steps, and the curves cannot be compared.
        """
        added_on = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                std = parameter.shape[1] ** -0.5
                ends_block = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=std * added_on if ends_block else std)

    def num_parameters(self) -> int:
        """Return the number of parameters; the matrix of embedding and head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token.

        Args:
            tokens: int64 ``[batch, time]``, time at most ``config.context``.

        Returns:
            Logits ``[batch, time, vocab]``, in the dtype the head ran in.
        """
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
