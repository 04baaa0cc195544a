"""Modules that run under their own rules, and the names that select them.

Such a module gets a subclass of its class, with the same name, whose ``forward`` looks up how to
run. (A ``forward`` on the instance would be shared by replicas and copies and run the original.
Hooks run after the module's own hooks, and break ``torch.compile``.)
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from halfstep._autocast import scopes
from halfstep._autocast.islands import InDtype, active, find_tensors, in_the_same_dtype
from halfstep._autocast.policy import Policy
from halfstep._autocast.region import ModuleRegion, settings_within
from halfstep._autocast.scopes import Settings
from halfstep._common.module_names import matching, without_wrappers
from halfstep._common.nested import map_tensors, tensors_in
from halfstep._common.numbers import things
from halfstep._pytorch import autograd, distributed


def keep(
    model: nn.Module, *patterns: str, dtype: torch.dtype = torch.float32, cast_back: bool = False
) -> Kept:
    """Run modules in one dtype even under autocast, permanently or during a block.

    Their floating-point inputs are cast to ``dtype`` and autocast is off inside them, including
    their submodules. Parameters of another dtype are cast where they are used; a gradient has the
    dtype of its parameter. Buffers are not cast, except running statistics and those of
    parametrizations, such as ``spectral_norm``. Parameters, ``state_dict`` and ``isinstance``
    checks are unaffected. Works inside ``torch.compile`` (not with parametrizations in another
    dtype) and activation checkpointing, in copies of the model and in threads.

    Args:
        model: The model whose module names the patterns match.
        *patterns: Globs over the names of ``model.named_modules()``: ``"head"``, ``"*.norm"``; a
            ``*`` also matches dots.
        dtype: A floating dtype, the one to compute in.
        cast_back: Whether to cast outputs of ``dtype`` to the dtype of the first floating-point
            input.

    Returns:
        An object that undoes it: ``keep(...).remove()`` or ``with keep(...):``.

    Raises:
        TypeError: ``model`` is not a module, a pattern is not a name, or ``dtype`` is not a
            floating dtype.
        ValueError: A pattern matches no module (the message lists similar names), or a module is
            lazy or runs TorchScript. When it runs: fully_shard gathers its parameters in another
            dtype than they have.
        RuntimeError: When it runs: the module writes to a view of a parameter of another dtype.

    Sync: none.

    Example:
        >>> import halfstep
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> with halfstep.autocast("cpu", torch.bfloat16), keep(model, "1"):
        ...     model(torch.ones(1, 4)).dtype
        torch.float32
        >>> with halfstep.autocast("cpu", torch.bfloat16):
        ...     model(torch.ones(1, 4)).dtype
        torch.bfloat16
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"keep({type(model).__name__}): pass the model and patterns of its names")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"keep(dtype={dtype!r}): pass a floating dtype, such as torch.float32")
    if not patterns:
        raise ValueError("keep(model): say which modules to keep, such as keep(model, '*.norm')")
    modules: dict[str, nn.Module] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(_no_pattern(model, pattern))
        modules |= matching(model, pattern, "keep()")
    return Kept(list(modules.values()), Island(dtype, cast_back))


def _no_pattern(model: nn.Module, given: object) -> str:
    """Return what to say of a pattern that is not a name, such as the module itself."""
    own = model.named_modules()
    name = next((without_wrappers(name) for name, each in own if each is given), "") or "*.norm"
    return (
        f"keep({type(model).__name__}, {type(given).__name__}): pass the names of modules, or "
        f"globs over them: keep(model, {name!r})"
    )


class Kept:
    """Modules that are kept in one dtype until :meth:`remove`, or until the block ends."""

    def __init__(self, modules: list[nn.Module], island: Island) -> None:
        self._modules = modules
        self._island = island
        for module in modules:
            _set(module, _islands=(*wrap(module)._islands, island))

    def remove(self) -> None:
        """Return the modules to autocast's rules."""
        for module in map(wrap, self._modules):
            _set(module, _islands=tuple(i for i in module._islands if i is not self._island))
            unwrap(module)
        self._modules = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{things(len(self._modules), 'module')} kept in {self._island.dtype}>"


# --- rules of a policy ----------------------------------------------------------------------------


def name_modules(model: nn.Module | None, policy: Policy) -> None:
    """Make the modules of ``model`` that have rules in ``policy`` look these up when they run.

    Raises:
        ValueError: There is no model, a rule matches none of its modules, or a module cannot look
            up rules.
        TypeError: ``model`` is not a module.
    """
    if model is None:
        rules = "; ".join(map(str, policy.module_rules))
        raise ValueError(
            f"the policy has rules for modules ({rules}): pass the model that has them, "
            "autocast(..., module=model)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"autocast(module={type(model).__name__}): pass the model")
    for rule in policy.module_rules:
        for name, module in matching(model, rule.module or "", f"policy rule {rule}").items():
            _set(wrap(module), _path=name)


# --- wrapped modules ------------------------------------------------------------------------------


class Island(NamedTuple):
    """The settings of an island.

    Attributes:
        dtype: The dtype of its floating-point inputs.
        cast_back: Whether to cast outputs of that dtype to the original input dtype.
    """

    dtype: torch.dtype
    cast_back: bool


class Wrapped:
    """The mixin class that precedes the original class of a wrapped module."""

    _islands: tuple[Island, ...] = ()  # the islands from keep(); the last one applies
    _path = ""  # its name in the model, if a policy has rules for it
    _dtypes: frozenset[torch.dtype] = frozenset()
    """Those of its parameters and buffers when it was wrapped."""
    _own_forward: Callable[..., Any] | None = None
    """The one on the instance, as accelerate's hooks put it there, which would run instead."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward`` under its rules."""
        run = self._own_forward or super().forward  # type: ignore[misc]
        if self._islands:
            return _run_on_island(self, self._islands[-1], run, args, kwargs)
        device = _device_of(self, args, kwargs) if self._path else None
        if device is None or not torch.is_autocast_enabled(device):
            return run(*args, **kwargs)
        settings = settings_within(self._path, device)
        if settings is None:
            return run(*args, **kwargs)
        if not settings.switches.enabled:
            island = Island(torch.float32, cast_back=False)
            return _run_on_island(self, island, run, args, kwargs)
        with ModuleRegion(settings):
            return run(*args, **kwargs)

    def __init_subclass__(cls, **_: object) -> None:
        """Do not call the module's own, which may require arguments, or register classes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class cannot be imported by name, so it is recreated on load.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        args = tuple(_base(self) if arg is type(self) else arg for arg in args)
        return _remake, (_settings(self), make, args), *rest


class _Inserting(type):
    """A metaclass that puts :class:`Wrapped` before the base of a class.

    As a base it could change the memory layout, and then no module could get the class.
    """

    def mro(cls) -> list[type]:
        order = super().mro()
        return order if Wrapped in order else [order[0], Wrapped, *order[1:]]


def wrap(module: nn.Module) -> Any:
    """Make ``module`` look up how to run.

    Raises:
        ValueError: It is a lazy module, which will change its own class, or a script.
    """
    if isinstance(module, LazyModuleMixin):
        raise ValueError(
            f"{type(module).__name__} becomes another module with its first batch: run the model "
            "on one before its modules are kept or have rules"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(module).__name__} runs TorchScript, which cannot look up rules: keep, or give "
            "rules to, the Python module that calls it"
        )
    if not isinstance(module, Wrapped):
        _swap(module, _dtypes=find_tensors(module).dtypes)
    if "forward" in vars(module):
        _set(module, _own_forward=vars(module).pop("forward"))
    return module


def unwrap(module: Any) -> None:
    """Restore the class of ``module`` if nothing needs to be looked up."""
    if not module._islands and not module._path and type(module) is _wrapped(_base(module)):
        object.__setattr__(module, "__class__", _base(module))
        own = vars(module)
        if "_own_forward" in own:
            own.setdefault("forward", own.pop("_own_forward"))
        for name in _SETTINGS:
            own.pop(name, None)


_SETTINGS = ("_islands", "_path", "_dtypes")


def _settings(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in _SETTINGS}


def _set(module: nn.Module, **settings: Any) -> None:
    vars(module).update(settings)  # the class may override __setattr__


def _swap(module: nn.Module, **settings: Any) -> None:
    cls: Any = type(module)
    object.__setattr__(module, "__class__", _wrapped(cls))
    _set(module, **settings)


def _base(module: Any) -> Any:
    """Return the original class of a wrapped module."""
    order = type(module).__mro__
    return order[order.index(Wrapped) + 1]


@cache
def _wrapped(cls: Any) -> Any:
    # The same name, for repr(model) and messages.
    namespace = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    if hasattr(cls, "__deepcopy__"):  # which need not copy our settings
        namespace["__deepcopy__"] = _deepcopy
    # Metaclasses may require arguments, or register classes, except for ABCMeta.
    create: Any = ABCMeta.__new__ if isinstance(cls, ABCMeta) else type.__new__
    meta: Any = type(cls)
    return create(_inserting(meta), cls.__name__, (cls,), namespace | {"__slots__": ()})


@cache
def _inserting(meta: Any) -> Any:
    return type.__new__(type, meta.__name__, (_Inserting, meta), {})


def _deepcopy(module: Any, memo: Any) -> Any:
    copied = _base(module).__deepcopy__(module, memo)
    if not isinstance(copied, Wrapped):
        _swap(copied)
    _set(copied, **_settings(module))
    return copied


def _remake(settings: dict[str, Any], make: Any, args: Any) -> Any:
    module = make(*args)
    _swap(module, **settings)
    return module


def _device_of(module: Any, args: Any, kwargs: Any) -> str | None:
    """Return the device type on which a call computes."""
    tensors = chain(tensors_in((args, kwargs)), module.parameters(), module.buffers())
    return next((tensor.device.type for tensor in tensors), None)


def _run_on_island(module: Any, island: Island, run: Any, args: Any, kwargs: Any) -> Any:
    with ExitStack() as stack:
        for outer in active():
            stack.enter_context(outer.suspended())
        return _run_alone(module, island, run, args, kwargs)


def _run_alone(module: Any, island: Island, run: Any, args: Any, kwargs: Any) -> Any:
    dtype, cast_back = island
    dtypes, stand_ins = find_tensors(module)
    others = dtypes - {dtype}
    if not torch.compiler.is_compiling():
        if distributed.has_process_group():
            _require_gathered(module, dtype)
        if others:
            autograd.wrap_recomputed(in_the_same_dtype)
    given = next((each for each in tensors_in((args, kwargs)) if each.is_floating_point()), None)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    args, kwargs = map_tensors(cast, (args, kwargs))
    device = _device_of(module, args, kwargs)
    with ExitStack() as stack:
        if device is not None and torch.is_autocast_enabled(device):
            off = scopes.switches(device)._replace(enabled=False)
            stack.enter_context(ModuleRegion(Settings(off, policy=None, inherit=False)))
        mode = InDtype(dtype, others, stand_ins) if others else None
        if mode is not None:
            stack.enter_context(mode)
        result = run(*args, **kwargs)
    if mode is not None:
        mode.require_unwritten()
        result = map_tensors(mode.cast, result)
    if cast_back and given is not None and given.dtype is not dtype:
        before = given.dtype
        result = map_tensors(lambda t: t.to(before) if t.dtype is dtype else t, result)
    return result


def _require_gathered(island: Any, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if fully_shard gathers parameters of an island in another dtype.

    An island may have parameters of any dtype, but these would be rounded.
    """
    for name, module in island.named_modules():
        # A module that is sharded by itself has not gathered its parameters yet.
        gathered = distributed.gathered_dtype(module)
        dtypes = {param.dtype for param in module.parameters(recurse=False)} | {gathered}
        known = (dtype, *island._dtypes)
        wrong = [each for each in dtypes if each is not None and each not in known]
        wrong = [each for each in wrong if each.is_floating_point]
        if wrong:
            inner = f" (in {name})" if name else ""
            policy = f"MixedPrecisionPolicy(param_dtype={dtype})"
            raise ValueError(
                f"{type(island).__name__}{inner} is an island in {dtype}, but runs with parameters "
                f"in {wrong[0]}, as fully_shard gathers them. Shard the island by itself, before "
                f"the modules around it: fully_shard(island, mp_policy={policy}). If you converted "
                "the model, do so before its modules are kept or have rules"
            )
