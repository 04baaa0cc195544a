"""The autocast context manager and decorator."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from halfstep import _torch
from halfstep.casting import kernels, scopes
from halfstep.casting.policy import Policy, preset
from halfstep.casting.rule import LOWER_PRECISIONS

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Settings(NamedTuple):
    """What a context switches on. Constants all, so that torch.compile can carry them in a graph.

    Attributes:
        switches: what PyTorch's switches are set to.
        policy: the number of the policy (see :func:`kernels.prepare`), None where autocast is off.
        inherit: whether the policy of a context outside this one goes before it.
    """

    switches: _torch.Switches
    policy: int | None
    inherit: bool


class Region:
    """The context manager behind :class:`autocast`, with everything settled."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._traced: list[object] = []

    @_torch.do_not_compile_alone
    def __enter__(self) -> None:
        switches, policy, inherit = self._settings
        if switches.enabled and torch.compiler.is_exporting():
            raise RuntimeError(
                "torch.export cannot keep a halfstep policy in the exported program: export the "
                "model without autocast and run the program under it, or use torch.autocast there"
            )
        if torch.compiler.is_compiling():
            self._traced.append(_torch.enter_traced(switches))
            enter_scope_in_graph(self._settings)
        else:
            _enter(switches, policy, inherit)

    @_torch.do_not_compile_alone
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling():
            leave_scope_in_graph()
            _torch.exit_traced(self._traced.pop())
        else:
            _exit()


class autocast(Region):
    """Run the ops of a block each in the dtype that a policy gives it.

    Works as ``torch.autocast`` does: as a context manager or a decorator, nested, per thread,
    inside and around ``torch.compile``. PyTorch's own switches are on inside, so that code
    which asks ``torch.is_autocast_enabled()`` or ``torch.get_autocast_dtype()`` sees it.

    A plain ``torch.autocast`` inside the block changes the dtype or switches casting off, as
    always; the policy stays. Outside the block, and in other threads, it is what it was.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ...; None for the accelerator of this machine, or the
            CPU if it has none.
        dtype: the lower precision: ``torch.float16`` or ``torch.bfloat16`` (``torch.float32``
            lowers nothing); None for PyTorch's default for the device.
        enabled: False runs the block with autocast off.
        cache_enabled: whether a weight that is used several times is cast once; None to leave this
            as it is outside.
        policy: a :class:`Policy` or its text: a preset (``"standard"``, ``"torch"``, ...) and
            rules, ``"standard; softmax:lower"``. None for ``"standard"``, or, inside another
            context for the device, for the policy there.

    Raises:
        ValueError: the device is not there, or the dtype or the policy is not one of the above.
        TypeError: an argument has the wrong type.

    Sync: none.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     y = model(torch.randn(2, 8))
        ...     p = torch.softmax(y, dim=-1)
        >>> y.dtype, p.dtype
        (torch.bfloat16, torch.float32)
    """

    @_torch.do_not_compile_alone
    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
    ) -> None:
        super().__init__(_settle(device_type, dtype, enabled, cache_enabled, policy))

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Return ``function`` with its calls run under this autocast."""
        if not callable(function):
            raise TypeError(
                f"autocast(...)(function) decorates a function, got {function!r}; "
                "to run a block: with autocast(...):"
            )
        settings = self._settings

        @functools.wraps(function)
        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with Region(settings):  # made here: torch.compile enters only what it saw made
                return function(*args, **kwargs)

        return under_autocast

    def __reduce__(self) -> tuple[object, ...]:
        # The number of a policy means nothing in another process.
        switches, number, inherit = self._settings
        policy = None if inherit or number is None else kernels.prepared(number).policy
        return functools.partial(autocast, policy=policy), tuple(switches)


def current_policy(device_type: str) -> Policy | None:
    """Return the policy that decides for ops on ``device_type`` in this thread, None for PyTorch's.

    Sync: none.
    """
    active = scopes.current().policies.get(device_type)
    return None if active is None else active.policy


@_torch.run_while_tracing
def current_settings(device_type: str) -> Settings:
    """Return what a :class:`Region` must be given to run a block as it would run now."""
    active = scopes.current().policies.get(device_type)
    switches = _torch.autocast_switches(device_type)
    if active is not None:
        return Settings(switches, active.number, inherit=False)
    number = kernels.prepare(preset("torch"), device_type) if switches.enabled else None
    return Settings(switches, number, inherit=False)


# --- entering and leaving -------------------------------------------------------------------------


def _enter(switches: _torch.Switches, policy: int | None, inherit: bool) -> None:
    outside = _torch.autocast_switches(switches.device)
    if outside.dtype is not switches.dtype:
        torch.clear_autocast_cache()  # what PyTorch's kernels keep does not know its dtype
    scopes.enter(_policies(switches.device, policy, inherit), outside)
    _torch.set_autocast_switches(switches)
    torch.autocast_increment_nesting()


def _exit() -> None:
    outside = scopes.leave()
    assert outside is not None
    nesting = torch.autocast_decrement_nesting()
    # As in torch.autocast, what PyTorch's kernels keep ends with the outermost context.
    if nesting == 0 or outside.dtype is not torch.get_autocast_dtype(outside.device):
        torch.clear_autocast_cache()
    _torch.set_autocast_switches(outside)


def _policies(device: str, number: int | None, inherit: bool) -> scopes.Policies:
    """Return what is to be active inside: what is active outside, and the policy of ``device``."""
    outside = scopes.current().policies
    if number is None or (inherit and device in outside):
        return outside
    return {**outside, device: kernels.prepared(number)}


def enter_scope_in_graph(settings: Settings) -> None:
    """While torch.compile traces: make a graph in which the policy of ``settings`` is active."""
    _allow_in_graph()
    _enter_scope_in_graph(settings.switches.device, settings.policy, settings.inherit)


# torch.compile puts calls of these into its graphs as they are and makes them while it traces: the
# kernels that run meanwhile then see the scope. (For clearing the cache see _enter.)
def _enter_scope_in_graph(device: str, number: int | None, inherit: bool) -> None:
    torch.clear_autocast_cache()
    scopes.enter(_policies(device, number, inherit), traced=True)


def leave_scope_in_graph() -> None:
    """Undo :func:`enter_scope_in_graph`."""
    torch.clear_autocast_cache()
    scopes.leave()


@_torch.run_while_tracing
def _allow_in_graph() -> None:
    _torch.allow_in_graph(_enter_scope_in_graph, leave_scope_in_graph)


# --- checking what the user asks for --------------------------------------------------------------


@_torch.run_while_tracing
def _settle(
    device_type: str | None,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: Policy | str | None,
) -> Settings:
    device = _device(device_type)
    if dtype is None:
        dtype = torch.get_autocast_dtype(device)
    elif dtype not in LOWER_PRECISIONS:
        raise ValueError(
            f"autocast lowers to torch.float16 or torch.bfloat16, got dtype={dtype!r}; "
            "to run a block without autocast: autocast(enabled=False)"
        )
    if cache_enabled is None:
        cache_enabled = torch.is_autocast_cache_enabled()
    for name, value in (("enabled", enabled), ("cache_enabled", cache_enabled)):
        if not isinstance(value, int):  # a bool is one
            raise TypeError(f"autocast: {name} is True or False, got {value!r}")
    number = None
    if enabled:
        _check_device(device, dtype)
        number = kernels.prepare(_policy(policy), device)
    switches = _torch.Switches(device, dtype, bool(enabled), bool(cache_enabled))
    return Settings(switches, number, inherit=policy is None)


def _device(device_type: str | None) -> str:
    if device_type is None:
        return default_device()
    if not isinstance(device_type, str):
        raise TypeError(
            f"autocast takes a device type such as 'cuda' or 'cpu', got {device_type!r}"
            + ("; pass device.type" if isinstance(device_type, torch.device) else "")
        )
    known = _torch.autocast_devices()
    if device_type not in known:
        raise ValueError(
            f"PyTorch has no autocast for {device_type!r}; it has for {', '.join(known)} "
            "(types, without an index)"
        )
    return device_type


def default_device() -> str:
    """Return the type of this machine's accelerator if autocast knows it, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        return accelerator.type
    return "cpu"


def _check_device(device: str, dtype: torch.dtype) -> None:
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError(
            "autocast('cuda'), but PyTorch sees no CUDA device here; leave device_type out to use "
            "what this machine has, or pass enabled=False"
        )
    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise ValueError(
            f"{torch.cuda.get_device_name()} does not compute in bfloat16; "
            "use dtype=torch.float16 with a GradScaler"
        )


def _policy(policy: Policy | str | None) -> Policy:
    match policy:
        case None:
            return preset("standard")
        case str():
            return Policy.parse(policy)
        case Policy():
            return policy
        case _:
            raise TypeError(
                f"policy is a Policy or its text, such as 'standard; softmax:lower', got {policy!r}"
            )
