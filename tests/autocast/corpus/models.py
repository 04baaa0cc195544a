"""Small models in the form of others', with a batch for each."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms by hand, rotary positions, a gated MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out, gate, up, down = self.linears
        angles = torch.arange(x.shape[1])[:, None] / torch.arange(1, 9)[None]
        cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))

        def norm(x: Tensor) -> Tensor:
            wide = x.float()
            return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)

        def turn(x: Tensor) -> Tensor:
            half = torch.cat([-x[..., 8:], x[..., :8]], -1)
            return x * cos.to(x.dtype) + half * sin.to(x.dtype)

        y = norm(x)
        x = x + out(F.scaled_dot_product_attention(turn(q(y)), turn(k(y)), v(y), is_causal=True))
        y = norm(x)
        result: Tensor = x + down(F.silu(gate(y)) * up(y))
        return result


TOKENS = torch.arange(8)[None]
MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "GPT": (
        nn.Sequential(nn.Embedding(8, 16), *(Block() for _ in range(3)), nn.Linear(16, 8)),
        TOKENS,
    ),
    "CNN": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8),
        ),
        torch.ones(2, 3, 12, 12),
    ),
    "Llama": (
        nn.Sequential(
            nn.Embedding(8, 16), *(LlamaBlock() for _ in range(3)), nn.Linear(16, 8, bias=False)
        ),
        TOKENS,
    ),
}  # fmt: skip
