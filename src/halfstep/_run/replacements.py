"""The names under which scripts know autocast and GradScaler, and what they mean meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from halfstep import Policy
from halfstep._pytorch.compiler import MODULE_OF_CONTEXTS
from halfstep._run import stand_ins

NAMES: dict[tuple[str, str], object] = {
    ("torch", "autocast"): stand_ins.Autocast,
    ("torch.amp", "autocast"): stand_ins.Autocast,
    ("torch.amp.autocast_mode", "autocast"): stand_ins.AutocastInMode,
    ("torch.cuda.amp", "autocast"): stand_ins.CudaAutocast,
    ("torch.cuda.amp.autocast_mode", "autocast"): stand_ins.CudaAutocast,
    ("torch.cpu.amp", "autocast"): stand_ins.CpuAutocast,
    ("torch.cpu.amp.autocast_mode", "autocast"): stand_ins.CpuAutocast,
    ("torch", "GradScaler"): stand_ins.GradScaler,
    ("torch.amp", "GradScaler"): stand_ins.GradScaler,
    ("torch.amp.grad_scaler", "GradScaler"): stand_ins.GradScaler,
    ("torch.cuda.amp", "GradScaler"): stand_ins.CudaGradScaler,
    ("torch.cuda.amp.grad_scaler", "GradScaler"): stand_ins.CudaGradScaler,
    ("torch.cpu.amp", "GradScaler"): stand_ins.CpuGradScaler,
    ("torch.cpu.amp.grad_scaler", "GradScaler"): stand_ins.CpuGradScaler,
}
"""What ``import torch`` has loaded: module and name, and what stands in for it."""

_ORIGINALS = {key: getattr(import_module(key[0]), key[1]) for key in NAMES}

_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


@contextmanager
def replaced(policy: Policy) -> Iterator[None]:
    """Put halfstep in the place of PyTorch's autocast and GradScaler, under all their names.

    Args:
        policy: What ``torch.autocast`` means where the script gives no policy.
    """
    names = _Names()
    names.replace(NAMES)

    def when_loaded(module: str) -> None:
        if module == _SHARDED:
            names.replace({(_SHARDED, "ShardedGradScaler"): stand_ins.ShardedGradScaler})

    loader = _WithOriginals((_SHARDED, MODULE_OF_CONTEXTS), when_loaded)
    if _SHARDED in sys.modules:
        when_loaded(_SHARDED)
    sys.meta_path.insert(0, loader)
    policy_before = stand_ins.set_policy(policy)
    try:
        yield
    finally:
        stand_ins.set_policy(policy_before)
        sys.meta_path.remove(loader)
        names.restore()


class _Names:
    """Names that mean something else for a while."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], object] = {}

    def replace(self, meanings: Mapping[tuple[str, str], object]) -> None:
        for (module, name), meaning in meanings.items():
            self._before[module, name] = getattr(sys.modules[module], name)
            setattr(sys.modules[module], name, meaning)

    def restore(self) -> None:
        for (module, name), meaning in self._before.items():
            setattr(sys.modules[module], name, meaning)


class _WithOriginals:
    """Loads modules of PyTorch that keep, or derive from, what the names mean at that moment.

    Importing them beforehand would cost every script two seconds.
    """

    def __init__(self, modules: Sequence[str], when_loaded: Callable[[str], None]) -> None:
        self._modules = modules
        self._when_loaded = when_loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_with_originals(module: ModuleType) -> None:
                names = _Names()
                names.replace(_ORIGINALS)
                try:
                    execute(module)
                finally:
                    names.restore()
                self._when_loaded(name)

            spec.loader.exec_module = execute_with_originals  # type: ignore[method-assign]
        return spec
