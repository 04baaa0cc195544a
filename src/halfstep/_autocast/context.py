"""The contexts that users enter, and decorators for ``torch.autograd.Function``."""

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Self, TypeVar, overload

import torch
from torch import nn

from halfstep._autocast import kernels, native, scopes, weight_cache
from halfstep._autocast.casts import is_eligible
from halfstep._autocast.modules import name_modules
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.region import Region, current_settings, in_graph, outside_of
from halfstep._autocast.rule import DTYPE_NAMES, LOWER_PRECISIONS
from halfstep._autocast.scopes import Settings
from halfstep._common.machine import has_device
from halfstep._common.nested import like
from halfstep._common.text import did_you_mean, shown
from halfstep._pytorch import amp, compiler
from halfstep.errors import CallOrderError

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _view(read: Callable[["autocast"], Any]) -> property:
    """Return a read-only property for an attribute that ``torch.autocast`` also has."""

    def refuse(context: "autocast", value: object) -> None:
        raise AttributeError(
            f"{context!r} cannot be changed (to {value!r}): make another one, autocast(device_type,"
            " dtype, enabled, cache_enabled), or nest it inside this one"
        )

    return property(read, refuse)


class autocast(Region):
    """Run each op of a block in the dtype that a policy assigns to it.

    Works like ``torch.autocast``: as a context manager or a decorator, nested, per thread, inside
    and around ``torch.compile``. PyTorch's own switches are on inside, so code that calls
    ``torch.is_autocast_enabled()`` or ``torch.get_autocast_dtype()`` sees it.

    A plain ``torch.autocast`` inside the block changes the dtype or disables casting, as usual; the
    policy stays. Outside the block and in other threads, plain autocast is unaffected.

    The attributes of ``torch.autocast`` exist, read-only: ``device``, ``custom_backend_name``,
    ``fast_dtype``, ``_enabled``, ``_cache_enabled``; and, while the context is entered, the values
    outside of it: ``prev``, ``prev_fastdtype``, ``prev_cache_enabled``.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ...; the index of ``"cuda:0"`` is ignored. None for the
            accelerator of this machine, or the CPU if it has none.
        dtype: the lower precision: ``torch.float16`` or ``torch.bfloat16`` (``torch.float32``
            lowers nothing); None for PyTorch's default for the device. Any dtype is accepted if
            ``enabled`` is False.
        enabled: False runs the block with autocast off.
        cache_enabled: whether casts of weights are kept until the context ends; None for the
            setting outside of the context.
        policy: a :class:`Policy` or its text: a preset (``"standard"``, ``"torch"``, ...) and
            rules, ``"standard; softmax:lower"``. None for ``"standard"``, or, inside another
            context for the device, for that context's policy.
        module: the model, if the policy has rules for modules (``"standard; @head:fp32"``), which
            select modules by name. Modules with rules permanently get a subclass of their class,
            with the same name; outside of this policy they run as before.

    Raises:
        ValueError: the device is not available; the dtype or the policy is invalid; or the policy
            has rules for modules and the model is missing or has no matching modules.
        TypeError: an argument has the wrong type.
        RuntimeError: it is entered while ops are recorded for a program that would lose the policy:
            by ``torch.export`` or ``make_fx(pre_dispatch=True)``.
        CallOrderError: it is exited in another thread, or before another context that was entered
            inside it and has a different effect: asyncio tasks alternated, or a generator is
            suspended inside.

    Sync: none.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     y = model(torch.randn(2, 8))
        ...     p = torch.softmax(y, dim=-1)
        >>> y.dtype, p.dtype
        (torch.bfloat16, torch.float32)
    """

    @compiler.do_not_compile_alone
    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
        module: nn.Module | None = None,
    ) -> None:
        # super().__init__() would take a tenth of the time of a context.
        self._settings = _settle(device_type, dtype, enabled, cache_enabled, policy, module)
        self._traced = []

    device = _view(lambda context: context._settings.switches.device)
    custom_backend_name = _view(lambda context: amp.custom_backend_name())
    fast_dtype = _view(lambda context: context._settings.switches.dtype)
    _enabled = _view(lambda context: context._settings.switches.enabled)
    _cache_enabled = _view(lambda context: context._settings.switches.cache)
    prev = _view(lambda context: outside_of(context).enabled)
    prev_fastdtype = _view(lambda context: outside_of(context).dtype)
    prev_cache_enabled = _view(lambda context: outside_of(context).cache)

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Return ``function`` with its calls run under this autocast."""
        if not callable(function):
            raise TypeError(
                f"autocast(...)(function) decorates a function, got {type(function).__name__}; "
                "to run a block: with autocast(...):"
            )
        settings = self._settings

        @functools.wraps(function)
        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with Region(settings):  # created here: torch.compile must trace its creation
                return function(*args, **kwargs)

        return under_autocast

    def __reduce__(self) -> tuple[object, ...]:
        # The number of a policy is only valid in this process.
        switches, number, inherit = self._settings
        policy = None if inherit or number is None else kernels.prepared(number).policy
        return functools.partial(autocast, policy=policy), tuple(switches)


# --- validation of arguments ----------------------------------------------------------------------


@compiler.run_while_tracing
def _settle(
    device_type: str | None,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: Policy | str | None,
    module: nn.Module | None,
) -> Settings:
    # Most contexts are created repeatedly with a few combinations of arguments.
    key = None
    if enabled is True and cache_enabled is None and module is None and dtype is not None:
        # weight_cache.is_on(), without the call.
        keeps = weight_cache.used.is_on or torch.is_autocast_cache_enabled()
        key = device_type, dtype, keeps, policy
        try:
            return _settled[key]
        except (KeyError, TypeError):  # TypeError: unhashable, and rejected below
            pass
    device = _device(device_type, enabled)
    lower = _lower_precision(dtype, device, enabled)
    if cache_enabled is None:
        cache_enabled = weight_cache.is_on()
    for name, value in (("enabled", enabled), ("cache_enabled", cache_enabled)):
        if not isinstance(value, int):  # a bool is one
            raise TypeError(f"autocast: {name} is True or False, got {value!r}")
    number = None
    if enabled:
        _check_device(device, lower)
        settled = settled_policy(policy)
        if settled.module_rules:
            name_modules(module, settled)
        number = kernels.prepare(settled, device)
    switches = amp.Switches(device, lower, bool(enabled), bool(cache_enabled))
    settings = Settings(switches, number, inherit=policy is None)
    if key is not None:
        _settled[key] = settings
    return settings


_settled: dict[tuple[object, ...], Settings] = {}


def _lower_precision(dtype: torch.dtype | None, device: str, enabled: bool) -> torch.dtype:
    """Return the dtype of a context, which matters if it is enabled."""
    is_unused = not enabled and isinstance(dtype, torch.dtype) and dtype not in LOWER_PRECISIONS
    if dtype is None or is_unused:
        dtype = torch.get_autocast_dtype(device)
    if dtype in LOWER_PRECISIONS:
        return dtype
    word = str(dtype).removeprefix("torch.")
    meant = DTYPE_NAMES.get(word, getattr(torch, word, None))
    cure = "to run a block without autocast: autocast(enabled=False)"
    if meant in LOWER_PRECISIONS:
        cure = f"write dtype={meant}"
    raise ValueError(
        f"autocast lowers to torch.float16 or torch.bfloat16, got dtype={dtype!r}; {cure}"
    )


def _device(device_type: str | None, enabled: bool) -> str:
    if device_type is None:
        return default_device()
    if not isinstance(device_type, str):
        raise TypeError(
            f"autocast takes a device type such as 'cuda' or 'cpu', got {shown(device_type)}"
            + ("; pass device.type" if isinstance(device_type, torch.device) else "")
        )
    known = amp.autocast_devices()
    if device_type in known:
        return device_type
    without_index = re.sub(r":\d+$", "", device_type)
    # Switching off needs no kernels. PyTorch does so for every device in compiled backward passes.
    if without_index not in (known if enabled else amp.switch_devices()):
        near, here = did_you_mean(without_index, known), ", ".join(filter(has_device, known))
        raise ValueError(
            f"halfstep has no autocast for {device_type!r}; of the devices here, it has for "
            f"{here}{near}"
        )
    return without_index


def default_device() -> str:
    """Return the type of this machine's accelerator if autocast supports it, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        return accelerator.type
    return "cpu"


def _check_device(device: str, dtype: torch.dtype) -> None:
    if not has_device(device):
        raise ValueError(
            f"autocast({device!r}), but PyTorch sees no {device.upper()} device here; leave "
            "device_type out to use what this machine has, or pass enabled=False"
        )
    if device == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ValueError(
            f"{torch.cuda.get_device_name()} does not compute in bfloat16; "
            "use dtype=torch.float16 with a GradScaler"
        )


def settled_policy(policy: Policy | str | None) -> Policy:
    """Return the policy for a user's argument; None means the standard one."""
    match policy:
        case None:
            return preset("standard")
        case str():
            return Policy.parse(policy)
        case Policy():
            return policy
        case _:
            raise TypeError(f"policy is a Policy or its text, such as 'standard', got {policy!r}")


# --- for contexts in other people's code ----------------------------------------------------------


class use_policy:
    """Apply a policy to every autocast context in a block, without enabling autocast.

    Frameworks enter ``torch.autocast`` internally and offer no way to pass a policy. In this block
    such contexts use this policy, on the CPU and on this machine's accelerator, and so does
    :class:`halfstep.autocast` without a policy of its own. Ops outside of any autocast are
    unaffected. It is a context manager and a decorator; blocks nest, and the innermost wins.

    It applies to this thread, to checkpoints recomputed in other threads, and during the block to
    all threads without a policy of their own, such as those of ``DataParallel``. ``torch.compile``
    compiles code for the policy; if another thread calls that code, enter ``use_policy`` there too.

    Args:
        policy: A :class:`Policy` or its text: a preset and rules, ``"torch; softmax:lower"``.
        module: The model, if the policy has rules for modules (``"standard; @head:fp32"``).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The policy is invalid, or it has rules for modules and the model is missing or
            has no matching modules.
        CallOrderError: It is exited in another thread, or before a context that was entered inside
            it.

    Sync: none.

    Example:
        >>> import torch
        >>> linear = nn.Linear(4, 2)
        >>> with use_policy("standard; linear:fp32"):
        ...     with torch.autocast("cpu", torch.bfloat16):  # in a framework
        ...         y = linear(torch.ones(1, 4))
        >>> y.dtype
        torch.float32
    """

    def __init__(self, policy: Policy | str, *, module: nn.Module | None = None) -> None:
        if policy is None:
            raise TypeError("use_policy(None): pass a policy or its text, such as 'standard'")
        settled = settled_policy(policy)
        if settled.module_rules:
            name_modules(module, settled)
        devices = dict.fromkeys(("cpu", default_device()))
        self._policies = [kernels.prepared(kernels.prepare(settled, device)) for device in devices]
        self._ambient: scopes.Policies | None = None  # those of other threads, while it is entered

    @compiler.do_not_compile_alone
    def __enter__(self) -> Self:
        if self._ambient is not None:
            raise CallOrderError(f"{self!r} is entered already; make another one")
        outer = scopes.current()
        scopes.enter(outer, self._within(outer.policies or scopes.ambient), context=self)
        with _lock:
            scopes.ambient = self._ambient = self._within(scopes.ambient)
            _entered.append(self._ambient)
        for policy in self._policies:  # contexts of torch.autocast in any thread tell us nothing
            native.hold(policy.device)
        return self

    @compiler.do_not_compile_alone
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._ambient is None:
            raise CallOrderError(f"{self!r} is left and was not entered")
        with _lock:
            # Equal entries are the same object, so it does not matter which thread exits first.
            del _entered[max(n for n, each in enumerate(_entered) if each is self._ambient)]
            scopes.ambient = _entered[-1] if _entered else scopes.NO_POLICIES
        self._ambient = None
        for policy in self._policies:
            native.release(policy.device)
        scope = scopes.current()
        if scope.context is self:
            scopes.leave(scope)
            return
        where = "before a context that was entered in it"
        if not scopes.leave_below(self):
            where = "in another thread than it was entered in"
        if kind is None:  # the propagating error is more informative
            raise CallOrderError(f"{self!r} is left {where}")

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Return ``function`` with each call run in such a block."""

        @functools.wraps(function)
        def under_policy(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            block = object.__new__(use_policy)  # calls may be nested
            block._policies, block._ambient = self._policies, None
            with block:
                return function(*args, **kwargs)

        return under_policy

    def __repr__(self) -> str:
        return f"use_policy({str(self._policies[0].policy)!r})"

    def _within(self, policies: scopes.Policies) -> scopes.Policies:
        for policy in self._policies:
            policies = policies.with_policy(policy)
        return policies


_entered: list[scopes.Policies] = []
_lock = threading.Lock()


# --- inside torch.autograd.Function --------------------------------------------------------------

_Method = TypeVar("_Method", bound=Callable[..., Any])


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[_Method], _Method]: ...


@overload
def custom_fwd(
    fwd: _Method, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> _Method: ...


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Decorate the ``forward`` of a ``torch.autograd.Function`` for use under autocast.

    Does the same as ``torch.amp.custom_fwd``. Use :func:`custom_bwd` on ``backward``.

    Args:
        fwd: the method, when used without arguments: ``@custom_fwd``.
        device_type: ``"cuda"``, ``"cpu"``, ...; None as in :class:`~halfstep.autocast`.
        cast_inputs: None runs ``forward`` under the autocast of its caller. A dtype casts the
            floating-point inputs on the device, except float64 ones, to it and runs ``forward``
            with autocast off. Outside of autocast, neither has an effect.

    Sync: none.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     Square.apply(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    _device(device_type, enabled=True)
    if not (cast_inputs is None or isinstance(cast_inputs, torch.dtype)):
        raise TypeError(f"custom_fwd: cast_inputs is a torch.dtype, got {cast_inputs!r}")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any) -> Any:
        device = device_type or default_device()
        settings = current_settings(device)
        if cast_inputs is None or not settings.switches.enabled:
            _remember(ctx, settings)
            return fwd(ctx, *args)
        _remember(ctx, current_settings(device, enabled=False))
        with autocast(device, enabled=False):
            return fwd(ctx, *_cast_inputs(args, device, cast_inputs))

    return forward


def _cast_inputs(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast eligible tensors in nested containers; as in torch.amp, any mapping becomes a dict."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if is_eligible(value, device) else value
    if isinstance(value, Mapping):
        return {key: _cast_inputs(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return like(value, [_cast_inputs(item, device, dtype) for item in value])
    return value


@overload
def custom_bwd(
    bwd: None = None, *, device_type: str | None = None
) -> Callable[[_Method], _Method]: ...


@overload
def custom_bwd(bwd: _Method, *, device_type: str | None = None) -> _Method: ...


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Decorate the ``backward`` that belongs to a :func:`custom_fwd`.

    ``backward`` runs under the same autocast and policy as ``forward``.

    Args:
        bwd: the method, when used without arguments: ``@custom_bwd``.
        device_type: as for :func:`custom_fwd`.

    Raises:
        CallOrderError: ``forward`` is not decorated with :func:`custom_fwd`.

    Sync: none.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *gradients: Any) -> Any:
        settings = getattr(ctx, "_halfstep_settings", None)
        if settings is None:
            raise CallOrderError(
                "custom_bwd: the forward of this function did not run under halfstep.custom_fwd, "
                "so its autocast is not known. Decorate forward with halfstep.custom_fwd"
            )
        if torch.compiler.is_compiling():
            # Our only context that torch.compile can enter in the backward of a Function.
            with in_graph(settings):
                return bwd(ctx, *gradients)
        with Region(settings):
            return bwd(ctx, *gradients)

    return backward


def _remember(ctx: Any, settings: Settings) -> None:
    """Store the settings for ``backward``, also for torch.amp's."""
    ctx._halfstep_settings = settings
    amp.remember_for_custom_bwd(ctx, settings.switches)
