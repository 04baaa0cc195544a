"""What a head and a router in float32 change, and what they cost: "lower", "fp32-out" and "fp32".

A head turns hidden states into logits; the loss is the mean of the log-probabilities of tokens that
were drawn from the model, as in reinforcement learning. All three rules in turn, in random order,
in one process.

"log p" is the error of the log-probabilities of these tokens, root mean square and largest, against
a head in float64 with the same hidden states and weights; "gradient" is that of the gradient of the
hidden states, relative to its norm. "time" is forward and backward, the median of the ratios to
"lower" within a round, with the quartiles; "saved" is what the forward pass keeps for the backward
pass. "routed" is the share of tokens that a router of 64 experts sends to other experts than in
float64. "grad" measures the backward pass of fp32-out against one that does not round the gradient
of the logits.

    python benchmarks/float32_head.py
    python benchmarks/float32_head.py --rounds 40 --dtype fp16 --weights lower
"""

import argparse
import random
import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep._autocast import autocast
from halfstep._common.machine import device_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ACTIONS = ("lower", "fp32-out", "fp32")
EXPERTS, EXPERTS_PER_TOKEN = 64, 8
SPREAD = 3.0
"""The standard deviation of the logits."""
SCALE = 2.0**16
"""That of a new GradScaler; in bfloat16 it changes nothing."""


class Head(NamedTuple):
    """Hidden states, the weight of a head, and the tokens that the model draws with them."""

    hidden: Tensor
    weight: Tensor
    tokens: Tensor


class Measured(NamedTuple):
    """One forward and backward pass; ``saved`` is in bytes, without the inputs."""

    seconds: float
    saved: int
    log_p: Tensor
    gradient: Tensor


def head_of(args: argparse.Namespace) -> Head:
    """Return a head with random weights."""
    dtype = DTYPES[args.dtype] if args.weights == "lower" else torch.float32
    hidden = torch.randn(args.tokens, args.width).to(dtype).requires_grad_()
    weight = torch.randn(args.vocab, args.width) * SPREAD / args.width**0.5
    weight = weight.to(dtype).requires_grad_()
    with torch.no_grad():
        logits = F.linear(hidden.double(), weight.double())
    tokens = torch.distributions.Categorical(logits=logits).sample()
    return Head(hidden, weight, tokens)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def measure(head: Head, action: str, dtype: torch.dtype) -> Measured:
    """Run forward and backward by a rule for linear."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    start = time.perf_counter()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast("cpu", dtype, policy=f"standard; linear:{action}"),
    ):
        log_p = log_probs(F.linear(head.hidden, head.weight), head.tokens)
        loss = -log_p.mean() * SCALE
    gradient, _ = torch.autograd.grad(loss, (head.hidden, head.weight))
    own = {each.untyped_storage().data_ptr() for each in head}
    kept = sum(size for where, size in saved.items() if where not in own)
    return Measured(time.perf_counter() - start, kept, log_p.detach(), gradient)


def exact(head: Head) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities, and the gradient of the hidden states, in float64."""
    hidden = head.hidden.detach().double().requires_grad_()
    log_p = log_probs(F.linear(hidden, head.weight.detach().double()), head.tokens)
    (gradient,) = torch.autograd.grad(-log_p.mean() * SCALE, hidden)
    return log_p.detach(), gradient


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def print_head(head: Head, args: argparse.Namespace) -> None:
    dtype, times = DTYPES[args.dtype], {action: list[float]() for action in ACTIONS}
    found: dict[str, Measured] = {}
    for round_ in range(-2, args.rounds):
        for action in random.sample(ACTIONS, len(ACTIONS)):
            found[action] = measure(head, action, dtype)
            if round_ >= 0:
                times[action].append(found[action].seconds)
    log_p, gradient = exact(head)
    names = f"{'':10} {'log p':>9} {'largest':>9} {'gradient':>9}"
    print(f"{names} {'time':>6} {'quartiles':>13}  saved, MB")
    for action in ACTIONS:
        one = found[action]
        ratios = [a / b for a, b in zip(times[action], times["lower"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        errors = one.log_p.double() - log_p
        print(
            f"{action:10} {errors.square().mean().sqrt():9.1e} {errors.abs().max():9.1e} "
            f"{relative(one.gradient, gradient):9.1e} {median:6.2f} "
            f"{f'{low:.2f} .. {high:.2f}':>13} {one.saved / 1e6:10.2f}"
        )


def print_router(head: Head, dtype: torch.dtype) -> None:
    """Print the share of tokens that are sent to other experts than in float64."""
    hidden, gate = head.hidden.detach(), head.weight.detach()[:EXPERTS]
    expected = chosen(F.linear(hidden.double(), gate.double()))
    shares = []
    for action in ACTIONS:
        with autocast("cpu", dtype, policy=f"standard; linear:{action}"):
            other = (chosen(F.linear(hidden, gate)) != expected).any(-1)
        shares.append(f"{action} {other.double().mean():.2%}")
    print(f"routed: {', '.join(shares)}")


def chosen(logits: Tensor) -> Tensor:
    """Return the experts of each token, in order of their numbers."""
    return logits.topk(EXPERTS_PER_TOKEN, dim=-1).indices.sort(-1).values


def print_gradients(head: Head, dtype: torch.dtype) -> None:
    """Print the error of the backward pass with the gradient of the logits rounded, and not."""
    low, weight = (each.detach().to(dtype) for each in (head.hidden, head.weight))
    logits = F.linear(low.double(), weight.double()).requires_grad_()
    (grad,) = torch.autograd.grad(-log_probs(logits, head.tokens).mean() * SCALE, logits)
    errors = []
    for rounded in (grad.to(dtype).float(), grad.float()):
        for product, expected in (
            (rounded @ weight.float(), grad @ weight.double()),
            (rounded.T @ low.float(), grad.T @ low.double()),
        ):
            errors.append(relative(product.to(dtype), expected))
    print("grad: rounded {:.2e} (hidden), {:.2e} (weight); not {:.2e}, {:.2e}".format(*errors))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--weights", choices=("float32", "lower"), default="float32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    print(f"{device_name('cpu')}, PyTorch {torch.__version__}, {args.dtype}")
    print(f"{args.tokens} tokens, width {args.width}, {args.vocab} words; weights: {args.weights}")
    head = head_of(args)
    print_head(head, args)
    print_router(head, DTYPES[args.dtype])
    print_gradients(head, DTYPES[args.dtype])


if __name__ == "__main__":
    main()
