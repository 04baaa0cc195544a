"""One training in four precisions: fp32, bf16, fp16 without a scaler, fp16 with one.

Task: train a small GPT to continue the text that comes with Python, and compare the runs.

Rules to remember:
- bf16 needs no scaler. fp16 does, as soon as a step means over many tokens: gradients become 0.
- Compare losses on text that no run has seen, computed in float32 for all of them.
- A record costs one line, and `halfstep report` reads it: what was skipped, and what underflowed.

Run: python examples/train_text.py
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"

PRECISIONS = {  # the dtype of autocast, and whether the loss is scaled
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "fp16-unscaled": (torch.float16, False),
    "fp16": (torch.float16, True),
}
SIZES = {  # context, layers, heads, width
    "tiny": (32, 2, 2, 32),
    "small": (64, 2, 4, 128),
    "medium": (256, 6, 6, 384),
    "43m": (256, 6, 12, 768),
}
MEAN_OVER = 2**19  # tokens in a step, of which a batch is a share: as in GPT-2 and small GPT-3


# --- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`: vocab, context, layers, heads; width is a multiple of heads."""

    vocab: int
    context: int
    layers: int
    heads: int
    width: int

    @classmethod
    def of_size(cls, size: str, vocab: int) -> "GPTConfig":
        """Return the configuration of a named size, one of `SIZES`."""
        return cls(vocab, *SIZES[size])


class Attention(nn.Module):
    """Causal self-attention, [batch, time, width] to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


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
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model: tokens, int64 [batch, time], to logits [batch, time, vocab].

    Embedding and head share one matrix, so every parameter has a dense gradient: in fp32 almost no
    entry is exactly zero, and a zero in fp16 was lost to the dtype.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        # The fixed 0.02 of GPT-2 is too small for these widths: all precisions would leave the
        # first plateau at random steps, and the curves could not be compared.
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                ends_block = name.endswith(("attention.out.weight", "down.weight"))
                std = parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std * (2 * config.layers) ** (-0.5 * ends_block))

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


# --- the text -------------------------------------------------------------------------------------


class Corpus:
    """A text as character numbers; every tenth of a hundred blocks is held out.

    The default is Python's `help()` topics, some 460 thousand characters of English.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            from pydoc_data.topics import topics

            text = "\n".join(topics[name] for name in sorted(topics))
        else:
            text = path.read_text(encoding="utf-8-sig")
        codes = torch.tensor([ord(character) for character in text])
        characters, tokens = torch.unique(codes, return_inverse=True)
        is_held_out = (torch.arange(len(tokens)) // max(1, len(tokens) // 100)) % 10 == 9
        self.vocab = len(characters)
        self.train, self.held_out = tokens[~is_held_out], tokens[is_held_out]


def draw_batches(
    tokens: Tensor, steps: int, batch: int, context: int, seed: int, device: str = device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, [batch, context], of windows that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(context + 1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        drawn = tokens[starts + window].to(device)
        yield drawn[:, :-1], drawn[:, 1:]


def held_out_windows(
    tokens: Tensor, context: int, at_most: int = 256
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, [up to 32, context], of windows spread over a text."""
    windows = tokens[: len(tokens) // (context + 1) * (context + 1)].view(-1, context + 1)
    for part in windows[:: max(1, len(windows) // at_most)][:at_most].split(32):
        yield part[:, :-1], part[:, 1:]


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor) -> float:
    """Return the mean loss for a token of a text, computed in float32."""
    total, count = 0.0, 0
    for inputs, targets in held_out_windows(tokens, model.config.context):
        logits = model(inputs.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten().to(device), reduction="sum").item()
        count += targets.numel()
    return total / count


# --- the training ---------------------------------------------------------------------------------


@dataclass
class Run:
    """What one training was."""

    losses: list[float] = field(default_factory=list)  # of each step, in nats per character
    seconds: list[float] = field(default_factory=list)
    skipped: int = 0
    scale: float = 1.0  # after the last step
    zeros: float = math.nan  # share of all gradient entries, mean of some 20 steps
    held_out: float = math.nan  # loss


def train(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    learning_rate: float,
    mean_over: int,
    dtype: torch.dtype,
    scaling: bool,
) -> Iterator[tuple[Tensor, GradScaler]]:
    """Train on the batches, in mixed precision unless dtype is float32; yield after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    # growth_interval: the default, 2000, suits longer runs.
    scaler = GradScaler(device, growth_interval=12, enabled=scaling)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten())
        share = torch.tensor(targets.numel() / mean_over, device=device)
        scaler.scale(loss).backward(share)  # as a part of a larger batch
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach(), scaler


def run_in(name: str, corpus: Corpus, options: argparse.Namespace) -> Run:
    """Train in one precision, with a record in its folder."""
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig.of_size(options.size, corpus.vocab)).to(device)
    batch = 8 if options.size in ("tiny", "small") else 32
    batches = draw_batches(corpus.train, options.steps, batch, model.config.context, options.seed)
    rate = 0.256 / model.config.width
    run, zeros = Run(), []
    folder, every = options.output / name, max(1, options.steps // 20)
    (folder / "rank0.jsonl").unlink(missing_ok=True)  # the record of an earlier run
    with halfstep.record(folder, model=model, every=every) as record:
        started = time.perf_counter()
        for loss, scaler in train(model, batches, rate, options.mean_over, *PRECISIONS[name]):
            run.losses.append(loss.item())
            run.seconds.append(time.perf_counter() - started)
            run.scale = scaler.get_scale()
            if len(run.losses) % every == 0:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                num_zeros = sum(int((grad == 0).sum()) for grad in grads)
                zeros.append(num_zeros / sum(grad.numel() for grad in grads))
            if len(run.losses) % max(1, options.steps // 5) == 0:
                print(f"{name}: step {len(run.losses)}  loss {run.losses[-1]:.3f}", flush=True)
            started = time.perf_counter()
    run.skipped, run.zeros = record.num_skipped, statistics.fmean(zeros)
    run.held_out = evaluate(model, corpus.held_out)
    return run


def table(runs: dict[str, Run]) -> str:
    """Return the runs side by side. The training loss is the mean of the last 20 steps."""
    base = next(iter(runs.values()))
    lines = [
        f"{'':14}{'train loss':>11}{'held-out':>10}{'to first':>10}{'ms a step':>11}{'skipped':>9}"
        f"{'scale':>9}{'zero gradients':>16}"
    ]
    for name, run in runs.items():
        scale = f"2^{math.log2(run.scale):.0f}" if PRECISIONS[name][1] else "-"
        lines.append(
            f"{name:14}{statistics.fmean(run.losses[-20:]):11.4f}{run.held_out:10.4f}"
            f"{run.held_out - base.held_out:+10.4f}{statistics.median(run.seconds) * 1e3:11.1f}"
            f"{run.skipped:9}{scale:>9}{run.zeros:16.3%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--text", type=Path, help="UTF-8 text (default: Python's help topics)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-over", type=int, default=MEAN_OVER, help="tokens in a step")
    parser.add_argument("-o", "--output", type=Path, default=Path("demo-out"))
    options = parser.parse_args()

    corpus = Corpus(options.text)
    runs: dict[str, Run] = {}
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: what there is so far
        for name in options.precision:
            runs[name] = run_in(name, corpus, options)
    if not runs:
        return
    print(f"\n{table(runs)}\n")
    first, *others = (options.output / name for name in runs)
    against = "".join(f" --against {other}" for other in others)
    print(f"Curves, skips and underflow side by side: halfstep report {first}{against}")


if __name__ == "__main__":
    main()
