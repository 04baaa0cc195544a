"""Switches of PyTorch that change the results or the speed of mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from halfstep._doctor.finding import Finding

_BACKENDS: Any = torch.backends  # its attributes are made on access


@dataclass(frozen=True)
class Flag:
    """One switch."""

    name: str  # the expression that reads it
    value: str  # what it is now, as text
    meaning: str

    @property
    def device(self) -> str:
        """The device type that it affects; empty for all."""
        if ".cuda." in self.name or ".cudnn." in self.name or '"cuda"' in self.name:
            return "cuda"
        return "cpu" if any(of in self.name for of in ("mkldnn", "denormal", '"cpu"')) else ""


_FP16_SUMS = "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
_BF16_SUMS = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
_CUDA_FP32 = "torch.backends.cuda.matmul.fp32_precision"
_ONEDNN = "torch.backends.mkldnn.enabled"

_MEANINGS = {
    _FP16_SUMS: "fp16 products on CUDA may add partial sums in fp16: faster, and sums above 65504 "
    "are inf",
    _BF16_SUMS: "the same in bf16: no overflow, fewer digits",
    "torch.backends.cuda.matmul.allow_fp16_accumulation": "fp16 products on CUDA add up everything "
    "in fp16",
    _CUDA_FP32: "tf32: fp32 products on CUDA keep 10 bits of the fraction, several times faster",
    "torch.backends.cudnn.conv.fp32_precision": "the same for convolutions",
    "torch.get_float32_matmul_precision()": "high or medium allow TF32 or bf16 inside fp32 "
    "products",
    _ONEDNN: "oneDNN: what runs bf16 and fp16 on the matrix units of a CPU",
    "torch.backends.mkldnn.matmul.fp32_precision": "bf16 or tf32: oneDNN computes fp32 products "
    "with fewer digits",
    "torch.backends.mkldnn.conv.fp32_precision": "the same for convolutions",
    "torch.set_flush_denormal": "CPU: fp32 below 1.2e-38 becomes zero; measured, as PyTorch does "
    "not report it",
    "torch.backends.cudnn.benchmark": "CUDA tries out algorithms for each shape: the first steps "
    "are slow, and runs differ",
    "torch.are_deterministic_algorithms_enabled()": "the same results each time, slower",
    'torch.get_autocast_dtype("cpu")': "what autocast lowers to on the CPU without dtype=",
    'torch.get_autocast_dtype("cuda")': "what autocast lowers to on CUDA without dtype=",
}

_CALLS: dict[str, Callable[[], object]] = {
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    _ONEDNN: lambda: _BACKENDS.mkldnn.is_available() and _BACKENDS.mkldnn.enabled,
    "torch.set_flush_denormal": lambda: is_flushing(),
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    'torch.get_autocast_dtype("cpu")': partial(torch.get_autocast_dtype, "cpu"),
    'torch.get_autocast_dtype("cuda")': partial(torch.get_autocast_dtype, "cuda"),
}
"""How to read the switches that are not plain attributes."""


def read_flags() -> list[Flag]:
    """Read all switches. Sync: none."""
    return [Flag(name, _value(name), meaning) for name, meaning in _MEANINGS.items()]


def _value(name: str) -> str:
    try:
        if name in _CALLS:
            return str(_CALLS[name]())
        return str(attrgetter(name.removeprefix("torch."))(torch))
    except RuntimeError:
        # PyTorch refuses to answer if both its older and its newer calls were used.
        return "mixed"


def is_flushing() -> bool:
    """Return whether the CPU flushes subnormal results to zero in this thread."""
    smallest = torch.full((16,), torch.finfo(torch.float32).smallest_normal)
    return not bool((smallest * 0.5).any())


def findings(
    device_type: str, dtype: torch.dtype | None, capability: tuple[int, int] = (0, 0)
) -> Iterator[Finding]:
    """Yield findings about the switches, for a training on a device.

    ``dtype`` is the lower precision, None if it is not known; ``capability`` that of a CUDA device.
    """
    values = {flag.name: flag.value for flag in read_flags()}
    sums = {torch.float16: _FP16_SUMS, torch.bfloat16: _BF16_SUMS}.get(dtype) if dtype else None
    if device_type == "cuda" and sums is not None and values[sums] == "True":
        yield Finding(
            "reduced-precision-sums",
            f"{sums} is True, PyTorch's default: long sums inside products may be rounded, and "
            "in fp16 overflow, before they are complete",
            "switch it off if results differ from fp32 more than you like; it costs some speed",
            f"{sums} = False",
            (sums,),
        )
    has_tf32 = device_type == "cuda" and capability >= (8, 0)
    if has_tf32 and values[_CUDA_FP32] in ("ieee", "none"):
        yield Finding(
            "tf32-off",
            f"{_CUDA_FP32} is {values[_CUDA_FP32]}: what autocast leaves in fp32 does not use "
            "the matrix units of this GPU",
            "allow TF32 where ten bits of the fraction are enough",
            f'{_CUDA_FP32} = "tf32"',
            (_CUDA_FP32,),
        )
    if device_type == "cpu" and dtype is not None and values[_ONEDNN] == "False":
        yield Finding(
            "onednn-off",
            f"{_ONEDNN} is False: products in lower precision run without the matrix units of the "
            "CPU, slower than fp32",
            "switch oneDNN on",
            f"{_ONEDNN} = True",
            (_ONEDNN,),
        )
