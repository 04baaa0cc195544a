"""One page about halfstep on this GPU: times beside torch.amp's, what is counted, and the tests.

Ten questions, in some five minutes, and then the tests for CUDA: a training step in bfloat16, in
float16 with the scaler, and of a CNN; one token; 64 tokens in one context, which uses its weights
again; torch.autocast after halfstep's; single calls on the host; the scaler's iteration with 12 and
with 4,096 gradients; and ops, calls, launches and Python kernels of a step. torch.amp runs in a
process of its own (``baseline.py``).

The page is docs/gpu.md, ready to be committed. Without a GPU nothing is run or written. With
``--device cpu`` the page is printed instead, to see its form: it says nothing about a GPU.

    make gpu
    python benchmarks/gpu.py [--quick] [--device cpu]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import halfstep
from halfstep._common.machine import device_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"

RATIO = re.compile(r"(\S.*?)\s+\d+\.\d+\s.*?(\d+\.\d{3} \(\d+\.\d{3}-\d+\.\d{3}\))")
"""A row of a benchmark: its name, times, and the ratio to torch.amp before any other."""

MOST_LINES = 60
"""Number of lines shown of what a failed command printed."""


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        title: Its title.
        command: The arguments of Python.
        has_ratios: Whether its rows have ratios to torch.amp.
    """

    title: str
    command: tuple[str, ...]
    has_ratios: bool = True


@dataclass(frozen=True)
class Done:
    """A part that has run: its exit code, and what it printed."""

    part: Part
    code: int
    output: str

    @property
    def ratios(self) -> list[tuple[str, str]]:
        """The rows with a ratio to torch.amp: name and ratio."""
        found = map(RATIO.match, self.output.splitlines()) if self.part.has_ratios else ()
        return [(re.sub(r"\s+", " ", row[1]), row[2]) for row in found if row]


def parts(device: str, *, quick: bool) -> list[Part]:
    """Return what is run on a device."""
    on, rounds = ("--device", device), ("--rounds", "4" if quick else "40")
    step = ("benchmarks/step_time.py", *on, *rounds)
    size = ("--size", "small") if quick else ()
    casts = ("benchmarks/cache_time.py", *on)
    again = "small: 5" if quick else "64 tokens"
    gradients = ("benchmarks/gradient_time.py", *on, "--gradients", "4096x256", *rounds)
    tests = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
    return [
        Part("A training step, bfloat16", (*step, *size)),
        Part("A training step, float16", (*step, *size, "--dtype", "float16")),
        Part("A training step of a CNN", (*step, "--size", "cnn", "--batch", "8")),
        Part("One token", (*casts, *rounds, "--only", "small: 20" if quick else "one token")),
        Part("64 tokens in one context", (*casts, "--rounds", "8", "--only", again)),
        Part("Single calls on the host", ("benchmarks/host_time.py", *on)),
        Part("The scaler, 12 gradients", ("benchmarks/step_calls.py", "--time", *on)),
        Part("The scaler, 4,096 gradients", (*gradients, "--dtype", "float32")),
        Part("Tests", tests, has_ratios=False),
    ]


def run(part: Part) -> Done:
    """Run a part in a process of its own."""
    print(f"{part.title}: python {' '.join(part.command)}", file=sys.stderr, flush=True)
    command, out = [sys.executable, *part.command], subprocess.PIPE
    done = subprocess.run(
        command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True, check=False
    )
    return Done(part, done.returncode, done.stdout.strip())


def versions(device: str) -> dict[str, str]:
    """Return the device, the driver and the versions."""
    runtime = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    found = {
        "device": device_name(device),
        "driver": driver(),
        "PyTorch": torch.__version__,
        **{name: version for name, version in runtime.items() if version},
        "cuDNN or MIOpen": str(cudnn or ""),
        "halfstep": f"{halfstep.__version__}, commit {output_of('git', 'rev-parse', 'HEAD')}",
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return {name: value for name, value in found.items() if value}


def driver() -> str:
    """Return the version of the GPU's driver, empty if no tool tells it."""
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output_of(*smi).split("\n")[0] or output_of("rocm-smi", "--showdriverversion")


def output_of(*command: str) -> str:
    """Return what a command prints, empty if there is none or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip()


HEAD = """\
---
orphan: true
---

# {title}

Written by `make gpu` on the machine below. Nothing was added by hand.

| | |
|---|---|
{about}

{summary}

## Beside torch.amp

Time divided by the time of torch.amp or torch.autocast in the same rounds: the median and, in
brackets, the quartiles. Below 1 is faster.

| | | ratio |
|---|---|---|
{ratios}
"""


def page(title: str, about: dict[str, str], done: list[Done]) -> str:
    """Return the page as Markdown."""
    failed = [each.part.title for each in done if each.code]
    ratios = [(each.part.title, *row) for each in done for row in each.ratios]
    head = HEAD.format(
        title=title,
        about="\n".join(f"| {name} | {value} |" for name, value in about.items()),
        summary=f"**Failed**: {', '.join(failed)}." if failed else "All commands succeeded.",
        ratios="\n".join(f"| {' | '.join(row)} |" for row in ratios),
    )
    return head + "".join(map(section, done))


def section(done: Done) -> str:
    """Return what a command printed; its last lines if it failed."""
    lines = [line.rstrip() for line in done.output.splitlines()]
    shown = "\n".join(lines[-MOST_LINES if done.code else 0 :])
    status = f" failed with exit code {done.code}" if done.code else ""
    command = f"`python {' '.join(done.part.command)}`{status}"
    return f"\n## {done.part.title}\n\n{command}\n\n```text\n{shown}\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", help="its type; by default that of this machine's GPU")
    parser.add_argument("--quick", action="store_true", help="few rounds of small models")
    args = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = args.device or (accelerator.type if accelerator is not None else None)
    if device is None or (device != "cpu" and accelerator is None):
        print(
            f"PyTorch {torch.__version__} sees no GPU here, so there is nothing to say about one. "
            "With --device cpu the page is printed, to see its form.",
            file=sys.stderr,
        )
        return 1
    done, about = [], versions(device)
    for part in parts(device, quick=args.quick):
        done.append(run(part))
        if device != "cpu":  # after each part: nothing is lost if a later one is stopped
            PAGE.write_text(page(f"On a GPU: {about['device']}", about, done), encoding="utf-8")
    if device == "cpu":
        print(page("No GPU: the form of the page, filled in on a CPU", about, done))
    else:
        print(f"wrote {PAGE}", file=sys.stderr)
    return int(any(each.code for each in done))


if __name__ == "__main__":
    sys.exit(main())
