"""Memory and time of trainings whose parameters are bfloat16, beside float32 and torch.autocast.

Times: what torch alone can do runs in a process of its own (``baseline.py``), in turn with the
others; the median of the ratios within a round counts. Peaks: each variant takes two steps in a
process of its own, which on the CPU is asked for its largest resident memory. The exchange is that
of all parameters for their float32 weights and back, to reading and writing its bytes once: two
copies of a float32 tensor of their size. The loss is that of the last step: all variants take the
same ones, of random tokens, from the same seed. With them are AdamW of optimi (torch-optimi, Kahan
sums) and of torchao (stochastic rounding) where they are installed, both with state in bfloat16;
and torchao's with state in 8 bits, without and with master weights.

    python benchmarks/half_parameters.py
    python benchmarks/half_parameters.py --size small --length 128 --rounds 30
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, SIZES, GPTConfig

import halfstep
from baseline import measure, ratio, seconds, synchronize
from halfstep._common.machine import device_name
from halfstep._common.nested import tensors_reached
from halfstep._master_weights.exchange import STORES, Exchange, Scratch, chunks_of

FLOAT32, PLAIN = "torch.autocast of float32", "no masters"
EIGHT_BITS, EIGHT_BITS_SPLIT = "torchao, 8 bits", "split, torchao, 8 bits"
OTHERS = {
    "optimi, Kahan": "optimi",
    **dict.fromkeys(("torchao, stochastic", EIGHT_BITS, EIGHT_BITS_SPLIT), "torchao"),
}
VARIANTS = [
    *(FLOAT32, PLAIN, *STORES, "split, float32 gradients"),
    *(name for name, package in OTHERS.items() if find_spec(package)),
]


class Training:
    """A GPT, a batch of random tokens and an AdamW, fused if it is PyTorch's."""

    loss: torch.Tensor

    def __init__(self, variant: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = GPTConfig.of_size(args.size, vocab=256)
        self.device, self._has_autocast = args.device, variant == FLOAT32
        self.model = GPT(config).to(self.device)
        if not self._has_autocast:
            self.model.to(torch.bfloat16)
        self.optimizer = adamw(variant, self.model)
        store, _, gradients = variant.partition(", ")
        if variant == EIGHT_BITS_SPLIT:
            halfstep.master_weights(self.optimizer)
        elif store in STORES:
            halfstep.master_weights(self.optimizer, store, "float32" if gradients else None)
        shape = (args.batch, min(args.length, config.context) + 1)
        self.tokens = torch.randint(config.vocab, shape, device=self.device)

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.loss = self.forward()
        self.loss.backward()
        self.optimizer.step()

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        context: AbstractContextManager[object] = nullcontext()
        if self._has_autocast:
            context = torch.autocast(self.device, torch.bfloat16)
        with context:
            logits = self.model(self.tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())

    def saved(self) -> float:
        """Return the bytes a parameter that autograd keeps for the backward pass beside weights."""
        params = list(self.model.parameters())
        found: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.forward()
        for param in params:
            found.pop(param.untyped_storage().data_ptr(), None)
        return sum(map(len, found.values())) / sum(param.numel() for param in params)


def bytes_per_parameter(training: Training) -> float:
    """Return the bytes of weights, gradients and state."""
    params = list(training.model.parameters())
    held = [*params, *(param.grad for param in params), training.optimizer.state]
    total = sum(tensor.nbytes for each in held for tensor in tensors_reached(each))
    return total / sum(param.numel() for param in params)


def adamw(variant: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    params, options = model.parameters(), {"lr": 1e-4, "weight_decay": 0.01}
    if variant not in OTHERS:
        return torch.optim.AdamW(params, fused=True, **options)
    made: torch.optim.Optimizer
    if OTHERS[variant] == "optimi":
        from optimi import AdamW

        made = AdamW(params, betas=(0.9, 0.999), eps=1e-8, kahan_sum=True, **options)
    elif variant in (EIGHT_BITS, EIGHT_BITS_SPLIT):
        from torchao.optim import AdamW8bit

        made = AdamW8bit(params, **options)
    else:
        from torchao.optim import _AdamW

        made = _AdamW(params, bf16_stochastic_round=True, **options)
    return made


def timed(library: Any, args: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return what trains a step and returns its seconds and its loss, by variant."""
    by_torch = {FLOAT32, PLAIN}
    names = [name for name in VARIANTS if (name in by_torch) == (library is torch.amp)]

    def run(training: Training) -> tuple[float, float]:
        return seconds(training.step, args.device), training.loss.item()

    return {name: partial(run, Training(name, args)) for name in names}


def resident() -> float:
    """Return the largest resident memory of this process so far, in bytes; Linux alone tells it."""
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(status.partition("VmHWM:")[2].split()[0])


def memory(variant: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes that two steps of a variant take at most, and those of a parameter.

    In a process of its own.
    """
    GPT(GPTConfig.of_size("tiny", vocab=256))(torch.zeros(1, 8, dtype=torch.long))
    before = resident()
    training = Training(variant, args)
    training.step()
    training.step()
    is_cuda = args.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if is_cuda else resident() - before
    return peak, bytes_per_parameter(training)


def exchange_ratio(store: str, args: argparse.Namespace) -> float:
    """Return the time of the exchange and back, to that of copying a float32 tensor twice."""
    training = Training(store, args)
    training.step()
    params = list(training.model.parameters())
    chunks = [chunk for (chunk,) in chunks_of([params])]
    for param in params:
        param.grad = None  # their conversion is not the store's
    some, other = (torch.zeros(sum(p.numel() for p in params), device=args.device) for _ in "ab")
    ratios = []
    for _ in range(args.rounds):
        synchronize(args.device)
        start = time.perf_counter()
        scratch = Scratch()
        for chunk in chunks:
            Exchange(training.optimizer, STORES[store], chunk, scratch).around(lambda: None)
        synchronize(args.device)
        middle = time.perf_counter()
        some.copy_(other)
        other.copy_(some)
        synchronize(args.device)
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="43m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(*memory(args.peak, args))
        return

    steps = measure(timed, args, rounds=args.rounds, warm_up=2, has_again=False)
    times = {name: [passed for passed, _ in each] for name, each in steps.items()}
    trainings = {name: Training(name, args) for name in (FLOAT32, PLAIN)}
    num_params = sum(param.numel() for param in trainings[PLAIN].model.parameters())
    saved = {name: training.saved() for name, training in trainings.items()}
    print(
        f"{num_params / 1e6:.1f} M parameters, {args.batch} x {args.length} "
        f"tokens; {device_name(args.device)}, PyTorch {torch.__version__}"
    )
    trainings.clear()
    command = [sys.executable, __file__, *sys.argv[1:], "--peak"]
    sizes = {}
    for name in VARIANTS:
        printed = subprocess.check_output([*command, name], text=True)
        sizes[name] = [float(number) for number in printed.split()]
    print(
        f"{'':26}{'bytes':>7}{'peak':>7}{'loss':>8}{'ms':>9}   {'to the first':^21}{'exchange':>9}"
    )
    for name in VARIANTS:
        # autocast casts every weight that it uses.
        peak, total = sizes[name]
        total += 2.0 if name == FLOAT32 else 0.0
        exchange = f"{exchange_ratio(name, args):9.2f}" if name in STORES else ""
        print(
            f"{name:26}{total:7.2f}{peak / sizes[FLOAT32][0]:7.2f}{steps[name][-1][1]:8.4f}"
            f"{statistics.median(times[name]) * 1e3:9.1f}   "
            f"{ratio(times[name], times[FLOAT32])}{exchange}"
        )
    print(
        "bytes of weights, casts, gradients and state for each parameter; the peak to the first's"
    )
    print("saved for the backward pass: " + ", ".join(f"{n} {b:.2f}" for n, b in saved.items()))


if __name__ == "__main__":
    main()
