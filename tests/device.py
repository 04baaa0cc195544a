"""The device of the tests: the CPU, or that of ``--device cuda``, or ``--device sim:PROFILE``.

Tensors are made there without being told (``torch.set_default_device``); a test that must name the
device, as in ``autocast(DEVICE)``, names this one.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from halfstep._pytorch import devices

DEVICE = "cpu"
PROFILE = ""

Case = TypeVar("Case")

_HAS_ALL = devices.Facts(
    unscales=devices.FACTS["cpu"].unscales, has_arrivals=True, reads_at_once=True
)
FACTS_OF = {
    "all": _HAS_ALL,
    "slow": _HAS_ALL,
    # The kernels behind the device are the CPU's, which add up otherwise.
    "cuda": replace(
        devices.FACTS["cuda"],
        adds_in_float32=devices.FACTS["cpu"].adds_in_float32,
        adds_rows_in_float32=devices.FACTS["cpu"].adds_rows_in_float32,
    ),
    "mps": devices.FACTS["mps"],
    "xpu_arc": replace(_HAS_ALL, has_float64=False, moves_scale=False),
}
"""What halfstep is told about the device; "plain" is a device that it does not know."""

_ASKING = re.compile(r"/halfstep/(?!_pytorch/listeners)|/torch/optim/")


def choose(option: str) -> None:
    """Take the device of ``--device``, before tests are imported."""
    global DEVICE, PROFILE
    DEVICE, _, PROFILE = option.partition(":")
    if DEVICE == "cpu":
        return
    if PROFILE:
        # Imported here: what is installed stays in the process.
        from tests.simulated import device
        from tests.simulated.profiles import PROFILES

        device.install()
        device.use(PROFILES[PROFILE])
        if PROFILE in FACTS_OF:
            devices.FACTS[DEVICE] = FACTS_OF[PROFILE]
    torch.set_default_device(DEVICE)


def share(cases: Iterable[Case], one_in: int) -> list[Case]:
    """Return some cases on a simulated device, where each op is a call of Python, and else all."""
    return list(cases)[:: one_in if PROFILE else 1]


def seeded(seed: int) -> torch.Generator:
    """Return a generator for tensors of the device: the CPU's for those of a simulated one."""
    return torch.Generator("cpu" if PROFILE else DEVICE).manual_seed(seed)


@contextmanager
def no_waits() -> Iterator[None]:
    """Let a wait for CUDA raise RuntimeError."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it does not see all of them, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def num_ops() -> int:
    """Return how many ops the simulated device counts."""
    if not PROFILE:
        return 0
    from tests.simulated import device

    return device.ops.total()


def is_lack_of_the_test(error: BaseException) -> bool:
    """Return whether the device lacks what raised ``error``, and halfstep did not ask for it.

    What an optimizer asks for, when halfstep lets it step, is asked for by who made it fused; and
    a listener only hands a call of the test on.
    """
    lacks_kernel = DEVICE == "cuda" and re.match(r"\"\w+\" not impl|`fused=True` req", str(error))
    if not (lacks_kernel or getattr(error, "is_lack", False)):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    asking = [file for file in files if _ASKING.search(file)]
    return not asking or "/torch/optim/" in asking[-1]
