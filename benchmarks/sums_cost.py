"""What sums in float32 cost: time and saved bytes of an op, to those under the rule "leave".

Forward and backward, both kinds in turn in one process. "time" is the median of the ratios within a
round, with the quartiles; "saved" is what the forward pass keeps for the backward pass, in MB.
Convolutions are compared with those under the policy "torch".

    python benchmarks/sums_cost.py
    python benchmarks/sums_cost.py --rounds 100 --dtype fp16
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep._autocast import autocast
from halfstep._common.machine import device_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EDGES = torch.randint(4096, (32768,))
TOKENS, TARGETS = torch.randint(8192, (4096,)), torch.randint(8192, (1024,))
WEIGHTS = {n: torch.randn(n, n, 3, 3).requires_grad_() for n in (16, 32, 64)}
ZEROS = torch.zeros(4096, 64)
BILINEAR = torch.randn(64, 64, 64).requires_grad_()

# The op that the rule "leave" names, a call, and the shape of its input.
CASES: dict[str, tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "h[index]": ("index", lambda h: h[EDGES], (4096, 64)),
    "index_select": ("index_select", lambda h: h.index_select(0, EDGES), (4096, 64)),
    "embedding": ("embedding", lambda h: F.embedding(TOKENS, h), (8192, 128)),
    "index_add": ("index_add", lambda h: ZEROS.to(h.dtype).index_add(0, EDGES, h), (32768, 64)),
    "index_select, 1": (
        "index_select",
        lambda h: h.index_select(1, EDGES[:4096]),
        (8, 4096, 64),
    ),
    "index_add, 1": (
        "index_add",
        lambda h: torch.zeros_like(h).index_add(1, EDGES[:4096], h),
        (8, 4096, 64),
    ),
    "bilinear": ("bilinear", lambda h: F.bilinear(h, h, BILINEAR.to(h.dtype)), (256, 64)),
    "logcumsumexp": ("logcumsumexp", lambda h: h.logcumsumexp(-1), (512, 512)),
    "fractional, 2d": (
        "fractional_max_pool2d",
        lambda h: F.fractional_max_pool2d(h, 2, output_size=33),
        (16, 64, 56, 56),
    ),
    "pad, replicate": (
        "replication_pad2d",
        lambda h: F.pad(h, (1, 1, 1, 1), mode="replicate"),
        (16, 64, 56, 56),
    ),
    "avg_pool2d, 3, 2": ("avg_pool2d", lambda h: F.avg_pool2d(h, 3, 2), (16, 64, 56, 56)),
    "max_pool2d, 3, 2": (
        "max_pool2d_with_indices",
        lambda h: F.max_pool2d(h, 3, 2),
        (16, 64, 56, 56),
    ),
    "cross_entropy": (
        "cross_entropy_loss",
        lambda h: F.cross_entropy(h, TARGETS),
        (1024, 8192),
    ),
    "conv2d, 32 ch.": ("", lambda h: F.conv2d(h, WEIGHTS[32]), (8, 32, 28, 28)),
    "conv2d, 64 ch.": ("", lambda h: F.conv2d(h, WEIGHTS[64]), (8, 64, 28, 28)),
    "conv2d, batch 64": ("", lambda h: F.conv2d(h, WEIGHTS[16]), (64, 16, 14, 14)),
}


def measure(
    call: Callable[[Tensor], Tensor], x: Tensor, policy: str, dtype: torch.dtype
) -> tuple[float, int]:
    """Return the seconds of a forward and backward pass, and the bytes saved between."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    start = time.perf_counter()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast("cpu", dtype, policy=policy),
    ):
        result = call(x)
    torch.autograd.grad(result, x, torch.ones_like(result))
    return time.perf_counter() - start, sum(saved.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]
    print(f"{device_name('cpu')}, PyTorch {torch.__version__}, {args.dtype}")
    print(f"{'':18} {'time':>6} {'quartiles':>13} {'saved, MB':>11} {'leave':>7}")
    for name, (op, call, shape) in CASES.items():
        x = torch.randn(shape).to(dtype).requires_grad_()
        policies = ("standard", f"standard; {op}:leave" if op else "torch")
        ratios = []
        for _ in range(args.rounds + 2):
            (ours, saved), (theirs, saved_theirs) = (measure(call, x, p, dtype) for p in policies)
            ratios.append(ours / theirs)
        low, median, high = statistics.quantiles(ratios[2:], n=4)
        quartiles = f"{low:.2f} .. {high:.2f}"
        print(
            f"{name:18} {median:6.2f} {quartiles:>13} {saved / 1e6:11.2f} {saved_theirs / 1e6:7.2f}"
        )


if __name__ == "__main__":
    main()
