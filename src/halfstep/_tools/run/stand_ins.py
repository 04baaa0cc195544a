"""Stand-ins for PyTorch's autocast and GradScaler, and their installation under all names.

The stand-ins are halfstep's classes with PyTorch's signatures. In some cases, such as CUDA on a
machine without it, PyTorch warns and disables the object while halfstep raises. The stand-ins warn
like PyTorch.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, partialmethod
from importlib import import_module
from types import ModuleType
from typing import Any, Self

import torch
from torch import distributed, nn
from torch.amp import autocast_mode

import halfstep
from halfstep import Dynamic, Policy, preset
from halfstep._autocast import HALVES, LOWER_PRECISIONS, Region, Rule, Settings, name_modules
from halfstep._autocast.access import settings_of, with_policy
from halfstep._common.machine import has_device
from halfstep._common.module_names import matching
from halfstep._common.text import warn
from halfstep._gradients.scalars import SMALLEST_SCALE
from halfstep._pytorch import amp, compiler
from halfstep._pytorch.imports import AroundImports, Execute
from halfstep._tools.patches import Patches, TopLevelCalls, not_compiled
from halfstep._tools.user_code import whole_model

_TorchAutocast = autocast_mode.autocast

# --- the policy -----------------------------------------------------------------------------------


class PolicyUse(TopLevelCalls):
    """A policy, whose rules for modules go to the first model that has modules of these names."""

    def __init__(self, policy: Policy, *, is_guarding: bool = False) -> None:
        super().__init__()
        self.policy = policy
        self.is_guarding = is_guarding  # whether the scale of a scaler moves as halfstep's
        self.has_autocast = False  # whether the script has made a torch.autocast that is on
        self.wrong_step: str | None = None  # why a step of its scaler, taken as in PyTorch, is
        self._missing = dict.fromkeys(
            policy.module_rules, "no model was called outside of a compiled function"
        )
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_on(self) -> bool:
        return bool(self._missing)

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if module not in self._seen:
            self._name(module)
        with self.inside():
            return original(module, *args, **kwargs)

    @not_compiled
    def _name(self, module: nn.Module) -> None:
        is_first = not self._seen
        self._seen.add(module)
        for rule in [*self._missing]:
            # Diagnoses name modules from the whole on, which a method such as training_step calls.
            for model in dict.fromkeys((module, whole_model(module))):
                try:
                    name_modules(model, Policy([rule]))
                except ValueError as error:
                    if is_first:
                        self._missing[rule] = str(error)
                else:
                    del self._missing[rule]
                    break

    def named_nowhere(self) -> str | None:
        """Return what is wrong with a rule for a module that no module alive has; None if unknown.

        Models that are called later may have it, so those are tried that have not been called.
        """
        if not self._missing or not self._seen:
            return None
        alive = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        for rule, why in self._missing.items():
            if not any(map(partial(_has_modules_of, rule), alive)):
                return why
        return None

    def problems(self) -> Iterator[str]:
        """Yield why the policy, or a rule of it, never acted on the script's own autocast."""
        if not self.has_autocast and self.policy != preset("torch"):
            yield (
                f"the policy {self.policy} never acted: the program used no torch.autocast. "
                "--amp fp16 or --amp bf16 adds one"
            )
            return
        for rule, why in self._missing.items():
            why = why.removeprefix(f"policy rule {rule}: ")
            yield f"the policy's rule {rule} never acted: {why}"


def _has_modules_of(rule: Rule, model: nn.Module) -> bool:
    try:
        return bool(matching(model, rule.module or "", ""))
    except ValueError:
        return False


# --- autocast -------------------------------------------------------------------------------------

_TORCH = preset("torch")
_use = PolicyUse(preset("standard"))
"""The policy of :class:`Autocast` where no surrounding context sets one, and its use."""


class Autocast(halfstep.autocast):
    """Stand-in for ``torch.autocast``."""

    @compiler.do_not_compile_alone
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        Region.__init__(self, _settings(device_type, dtype, enabled, cache_enabled))

    @compiler.do_not_compile_alone
    def __enter__(self) -> Self:
        # The program that torch.export makes knows PyTorch's autocast only.
        is_traced = torch.compiler.is_dynamo_compiling()  # strict=True: see _export
        if is_traced or not compiler.is_exporting() or _use.policy != _TORCH:
            return super().__enter__()
        self._traced.append(amp.enter_autocast(*self._settings.switches))
        return self

    @compiler.do_not_compile_alone
    def __exit__(self, *error: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not compiler.is_exporting() or not self._traced:
            return super().__exit__(*error)
        amp.exit_autocast(self._traced.pop())
        return None


def _autocast_on(device: str, default: torch.dtype) -> type[Autocast]:
    """Return the stand-in for ``torch.cuda.amp.autocast`` or ``torch.cpu.amp.autocast``."""

    class DeviceAutocast(Autocast):
        @compiler.do_not_compile_alone
        def __init__(
            self, enabled: bool = True, dtype: torch.dtype = default, cache_enabled: bool = True
        ) -> None:
            Region.__init__(self, _settings(device, dtype, enabled, cache_enabled))

    return DeviceAutocast


CudaAutocast = _autocast_on("cuda", torch.float16)
CpuAutocast = _autocast_on("cpu", torch.bfloat16)


@compiler.run_while_tracing
def _settings(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> Settings:
    if isinstance(device_type, str) and not torch.amp.is_autocast_available(device_type):
        raise RuntimeError(f"PyTorch has no autocast for {device_type!r}")
    if enabled:
        problem = _autocast_problem(device_type, dtype)
        if problem is not None:
            warn(f"{problem}: autocast is off in this block")
            enabled = False
    if dtype not in LOWER_PRECISIONS:
        dtype = None  # autocast is off, or the default dtype is meant
    _use.has_autocast |= bool(enabled)
    # Rules for modules need a model, and get one at its first call.
    policy = None if _use.policy.module_rules else _use.policy
    ours = halfstep.autocast(device_type, dtype, bool(enabled), cache_enabled, policy=policy)
    settings = settings_of(ours)
    if policy is None and settings.policy is not None:
        settings = with_policy(settings, _use.policy)
    # A surrounding halfstep context of the script takes precedence.
    return settings._replace(inherit=True)


def _autocast_problem(device_type: str, dtype: torch.dtype | None) -> str | None:
    """Return why ``torch.autocast`` would disable itself, or None if it would not."""
    if not has_device(device_type):
        return f"autocast({device_type!r}), but PyTorch sees no {device_type.upper()} device here"
    possible = LOWER_PRECISIONS if device_type == "cuda" else HALVES
    if dtype is None or dtype in possible:
        return None
    return f"autocast({device_type!r}) lowers to float16 or bfloat16, not to {dtype}"


class _PlaceInMode(type):
    """Metaclass that makes torch.compile treat only PyTorch's own autocast as its autocast.

    torch.compile compares classes with ``torch.amp.autocast_mode.autocast`` and has a special path
    for equal classes and their instances. That path knows no policies.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Autocast:
        return Autocast(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _TorchAutocast

    __hash__ = type.__hash__

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchAutocast)


class AutocastInMode(Autocast, metaclass=_PlaceInMode):
    """Stand-in for ``torch.amp.autocast_mode.autocast``; a call returns an :class:`Autocast`."""


# --- the scaler -----------------------------------------------------------------------------------


class GradScaler(halfstep.GradScaler):
    """Stand-in for ``torch.amp.GradScaler``, whose scale moves as that one's does without --guard.

    It only stays in the range in which it can be divided by, and where PyTorch silently trains
    wrongly, this one warns and does the same.
    """

    _ranks: distributed.ProcessGroup | None = None  # that step together

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warn("GradScaler for 'cuda', but PyTorch sees no CUDA device here: it is switched off")
            enabled = False
        if enabled:
            # PyTorch's scaler also ignores its device argument; the first loss decides.
            guards = _use.is_guarding
            super().__init__(
                None,
                init_scale,
                schedule=Dynamic(growth_factor, backoff_factor, growth_interval, trials=guards),
                min_scale=None if guards else min(SMALLEST_SCALE, init_scale),
                process_group=self._ranks,
            )
        else:
            super().__init__(enabled=False)  # like PyTorch, without validating the numbers
        self._device = device

    def _refuse(self, problem: str, *, is_lasting: bool = False) -> None:
        if is_lasting:
            _use.wrong_step = _use.wrong_step or problem.replace("\n", " ")
        else:
            warn(problem)


class CudaGradScaler(GradScaler):
    """Stand-in for ``torch.cuda.amp.GradScaler``, which takes no device."""

    __init__ = partialmethod(GradScaler.__init__, "cuda")


class CpuGradScaler(GradScaler):
    """Stand-in for ``torch.cpu.amp.GradScaler``, which takes no device."""

    __init__ = partialmethod(GradScaler.__init__, "cpu")


class ShardedGradScaler(GradScaler):
    """Stand-in for ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        if process_group is None and distributed.is_initialized():
            process_group = distributed.group.WORLD  # as in PyTorch: all ranks step together
        self._ranks = process_group
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        del self._ranks  # which a file cannot hold


# --- the names ------------------------------------------------------------------------------------


NAMES: dict[tuple[str, str], object] = {
    ("torch", "autocast"): Autocast,
    ("torch.amp", "autocast"): Autocast,
    ("torch.amp.autocast_mode", "autocast"): AutocastInMode,
    ("torch.cuda.amp", "autocast"): CudaAutocast,
    ("torch.cuda.amp.autocast_mode", "autocast"): CudaAutocast,
    ("torch.cpu.amp", "autocast"): CpuAutocast,
    ("torch.cpu.amp.autocast_mode", "autocast"): CpuAutocast,
    ("torch", "GradScaler"): GradScaler,
    ("torch.amp", "GradScaler"): GradScaler,
    ("torch.amp.grad_scaler", "GradScaler"): GradScaler,
    ("torch.cuda.amp", "GradScaler"): CudaGradScaler,
    ("torch.cuda.amp.grad_scaler", "GradScaler"): CudaGradScaler,
    ("torch.cpu.amp", "GradScaler"): CpuGradScaler,
    ("torch.cpu.amp.grad_scaler", "GradScaler"): CpuGradScaler,
}
"""The stand-ins, keyed by the module and name that ``import torch`` defines."""

_ORIGINALS = {key: getattr(import_module(key[0]), key[1]) for key in NAMES}

_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


@contextmanager
def replaced(policy: Policy, *, is_guarding: bool = False) -> Iterator[PolicyUse]:
    """Replace PyTorch's autocast and GradScaler under all their names inside the block."""
    with _in_place(NAMES) as patches:
        patches.wrap(torch.export, "export", _export)
        patches.put(sys.modules[__name__], "_use", PolicyUse(policy, is_guarding=is_guarding))
        if policy.module_rules:
            _use.install(patches)

        def load(module: ModuleType, execute: Execute) -> None:
            with _in_place(_ORIGINALS):  # which these modules store or subclass
                execute(module)
            if module.__name__ == _SHARDED:
                patches.put(module, "ShardedGradScaler", ShardedGradScaler)

        if _SHARDED in sys.modules:
            patches.put(sys.modules[_SHARDED], "ShardedGradScaler", ShardedGradScaler)
        finder = AroundImports((_SHARDED, compiler.MODULE_OF_CONTEXTS), load)
        sys.meta_path.insert(0, finder)
        patches.callback(sys.meta_path.remove, finder)
        yield _use


def _export(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Export with PyTorch's own names in place, if the policy is PyTorch's too."""
    with _in_place(_ORIGINALS if _use.policy == _TORCH else {}):
        return original(*args, **kwargs)


@contextmanager
def _in_place(meanings: Mapping[tuple[str, str], object]) -> Iterator[Patches]:
    with Patches() as patches:
        for (module, name), meaning in meanings.items():
            patches.put(sys.modules[module], name, meaning)
        yield patches
