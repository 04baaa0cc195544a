"""Every private name of PyTorch that halfstep uses, in one place.

When a new PyTorch moves one of these, this is the only file to change. docs/versions.md says what
was run with which version, and what differs.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.amp.autocast_mode
import torch.compiler.config
import torch.multiprocessing.reductions
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")
Kernel = Callable[..., Any]

# --- gradient scaling -----------------------------------------------------------------------------

# (gradients, found_inf, inv_scale): sets found_inf to 1 if any entry is inf or NaN, then multiplies
# all gradients by inv_scale in place, in float32 arithmetic. The gradients are of one device and
# one real dtype, found_inf and inv_scale float32 scalars on that device.
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# (tensors): what torch.autograd.graph.increment_version() calls.
increment_version: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version

# (is_on): what torch.no_grad() calls, twice, from seven functions.
set_grad_enabled = torch._C._set_grad_enabled

# (scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval): the transition
# of torch.amp in place on the device. Scale and found_inf are float32 scalars, growth_tracker is an
# int32 one. It grows the scale when growth_tracker + 1 == growth_interval, by equality.
update_scale_ = torch._amp_update_scale_

# (tensor): whether it stands for others inside torch.func.grad or vmap, where nothing outside may
# be written to.
is_inside_functorch = torch._C._functorch.is_functorch_wrapped_tensor

# Where the dispatcher looks first inside a transform of torch.func, once for each transform around
# the op; and where it looks when vmap is that transform, also for the ops inside a composite.
FUNCTORCH_KEYS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchBatched,
)


# (function): call it when the backward pass that is running ends, if it does not raise. One that is
# started inside of another, as in the reentrant variant of checkpoint, is a part of that.
after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def leaves_of(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves whose ``grad`` a backward pass from ``roots`` adds to, each once.

    Not those that a node reaches only by a backward pass of its own, as in the reentrant variant of
    ``torch.utils.checkpoint``. About a microsecond for each node of the graph. Sync: none.
    """
    leaves = []
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves


# --- autocast: the dispatcher ---------------------------------------------------------------------

# (with exclude_keys(keyset): ...) runs a block as if the keys were not there.
exclude_keys = torch._C._ExcludeDispatchKeyGuard


def autocast_key(device_type: str) -> torch._C.DispatchKey:
    """Return the dispatch key at which autocast for ``device_type`` runs, e.g. ``AutocastCPU``."""
    return torch._C.DispatchKey.__members__[
        "Autocast" + torch._C._dispatch_key_for_device(device_type)
    ]


def key_set(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Return the set that holds ``key`` alone."""
    return torch._C.DispatchKeySet(key)


def keys_below(key: torch._C.DispatchKey) -> torch._C.DispatchKeySet:
    """Return the keys that the dispatcher looks at after ``key``."""
    return torch._C._dispatch_keyset_full_after(key)


@cache
def aten_overloads() -> dict[str, list[str]]:
    """Return every ATen op and its overloads: ``{"exp": ["default", "out"], ...}``."""
    overloads: dict[str, list[str]] = {}
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == "aten":
            op, _, overload = name.partition(".")
            overloads.setdefault(op, []).append(overload or "default")
    return overloads


def overloads_of_namespace(namespace: str) -> list[str]:
    """Return what is defined there at this moment: ``["mylib::attention.default", ...]``."""
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::"))
    return [name if "." in name else f"{name}.default" for name in names]


@cache
def overloads_with_autocast_kernel(device_type: str) -> frozenset[str]:
    """Return the overloads (``"exp.default"``) that PyTorch's own autocast casts on a device.

    Must be called before halfstep registers kernels for that device; the answer is kept.
    """
    key = autocast_key(device_type).name
    return frozenset(
        f"{op}.{overload}"
        for op, overloads in aten_overloads().items()
        for overload in overloads
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{op}" + ("" if overload == "default" else f".{overload}"), key
        )
    )


def takes_numbers(op: torch._ops.OpOverload) -> bool:
    """Say whether a number may stand where ``op`` takes a tensor, as in ``x * 2``."""
    return bool(torch._C._should_allow_numbers_as_tensors(op._schema.name.rpartition("::")[2]))


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Say whether ``op`` is made of other ops, which autograd and vmap see instead of it."""
    return has_kernel(op, torch._C.DispatchKey.CompositeImplicitAutograd)


def has_kernel(op: torch._ops.OpOverload, key: torch._C.DispatchKey) -> bool:
    """Say whether a kernel is registered for ``op`` at ``key``."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name)
    except RuntimeError:  # an op of Python alone, such as aten::sym_size
        return False


@cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]


def register_kernel(op: torch._ops.OpOverload, key: torch._C.DispatchKey, kernel: Kernel) -> None:
    """Make ``kernel(keys, *args, **kwargs)`` what the dispatcher calls for ``op`` at ``key``."""
    _implement(_library(op.namespace), op, key, kernel)


def _implement(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    key: torch._C.DispatchKey,
    kernel: Kernel,
) -> None:
    with warnings.catch_warnings():
        # PyTorch says once per process that a kernel was overridden; here that is the purpose.
        warnings.simplefilter("ignore")
        library.impl(  # type: ignore[no-untyped-call]
            op, kernel, key.name, with_keyset=True, allow_override=True
        )
    # Before 2.13 PyTorch refuses to register a kernel of its own where there is one of Python, and
    # its first vmap registers some. Once forgotten, ours is replaced, as it is from 2.13 on.
    torch.library._impls.difference_update(library._op_impls)


def callable_of(op: torch._ops.OpOverload) -> Kernel:
    """Return what calls ``op``, without the Python around it."""
    call: Kernel = op._op
    return call


class TemporaryKernels:
    """Kernels that the dispatcher calls until they are removed, and then those of before again."""

    def __init__(self) -> None:
        self._libraries: dict[str, torch.library.Library] = {}
        self._registered: set[tuple[torch._ops.OpOverload, torch._C.DispatchKey]] = set()

    def register(
        self, op: torch._ops.OpOverload, key: torch._C.DispatchKey, kernel: Kernel
    ) -> None:
        """Do what :func:`register_kernel` does, for a while; once for an op at a key."""
        if (op, key) in self._registered:
            return
        self._registered.add((op, key))
        if op.namespace not in self._libraries:
            library = torch.library.Library(op.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            self._libraries[op.namespace] = library
        _implement(self._libraries[op.namespace], op, key, kernel)

    def remove(self) -> None:
        """Take them all back."""
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]


# --- autocast: casts of weights -------------------------------------------------------------------


_unsafe_view = callable_of(torch.ops.aten._unsafe_view.default)


def in_place_of(source: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as if they had been computed from ``source``, of the same shape.

    The gradient with respect to the result, cast to the dtype of ``source``, goes to ``source``.
    Neither is copied, and a later write to ``source`` does not count as one to the result.
    """
    # The alias is one that autograd does not take for a view; the engine casts its gradient.
    stand_in: torch.Tensor = _unsafe_view(source, source.shape)
    stand_in.data = values
    return stand_in


# (with no_torch_function(): ...) runs a block as if no tensor had a __torch_function__ of its own.
no_torch_function = torch._C.DisableTorchFunctionSubclass


def is_used_once(tensor: torch.Tensor) -> bool:
    """Return whether nothing but ``tensor`` has its memory: no tensor, no array, no storage object.

    Not seen are raw pointers.
    """
    return _users(tensor) == _ONE_USER


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the owners of the memory of a tensor, and the references to its storage object."""
    storage = tensor.untyped_storage()  # one owner more, and one object for all who ask
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ONE_USER = _users(torch.empty(1))  # how references are counted differs between Pythons


def stream_of(tensor: torch.Tensor) -> int:
    """Return the current stream of the device of ``tensor``; 0 where there is one only."""
    if tensor.is_cpu or tensor.is_mps:
        return 0
    if tensor.is_cuda:
        return int(torch._C._cuda_getCurrentRawStream(tensor.device.index))
    return int(torch.accelerator.current_stream(tensor.device).stream_id)


def is_tracing() -> bool:
    """Say whether ops are not simply carried out, once each.

    So it is under vmap, grad and the like, forward-mode AD, fake tensors, jit.trace, make_fx, and
    under dispatch modes: some replay ops, or look at their order. Ours only look on.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing():
        return True
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return not all(isinstance(mode, DispatchMode) for mode in dispatch_modes())


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the modes that see the ops of this thread, the innermost last."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def saves_as_always() -> bool:
    """Say whether autograd in this thread saves tensors themselves, and takes hooks for them."""
    autograd: Any = torch._C._autograd
    has_hooks = autograd._top_saved_tensors_default_hooks(True) is not None
    return not has_hooks and bool(autograd._saved_tensors_hooks_is_enabled())


def placed_like(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes of this rank's part a whole tensor that lies on the ranks as ``tensor``."""
    if not is_dtensor(tensor):
        return lambda local: local
    cls: Any = type(tensor)
    spec = tensor._spec  # type: ignore[attr-defined]
    return lambda local: cls(local, spec, requires_grad=False)


def gathered_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype in which fully_shard gathers a module's parameters, None for their own."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # else nothing is sharded
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype


# --- autocast: recomputation ----------------------------------------------------------------------


@cache
def wrap_recomputed(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let torch.utils.checkpoint keep ``wrap(function)`` wherever it keeps a function to run again.

    Once and for good. ``wrap`` is called in the forward pass, its result in the backward pass too.
    """
    reentrant = torch.utils.checkpoint.CheckpointFunction
    forward = reentrant.forward
    frame = torch.utils.checkpoint._CheckpointFrame
    init = frame.__init__

    def wrapping_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, wrap(run_function), *args)  # type: ignore[no-untyped-call]

    def wrapping_init(self: Any, recompute_fn: Callable[..., Any], *args: Any) -> None:
        init(self, wrap(recompute_fn), *args)

    reentrant.forward = staticmethod(wrapping_forward)  # type: ignore[method-assign]
    frame.__init__ = wrapping_init  # type: ignore[method-assign,assignment]


def call_when_cache_is_cleared(function: Callable[[], None]) -> None:
    """Let ``torch.clear_autocast_cache()`` call ``function`` too, for good."""
    clear = torch.clear_autocast_cache

    @functools.wraps(clear)
    def clear_autocast_cache() -> None:
        clear()
        function()

    torch.clear_autocast_cache = clear_autocast_cache


def writes_to_arguments(function: Any) -> bool:
    """Return whether the schema of an op (``torch.ops...``) says that it writes to an argument."""
    match function:
        case torch._ops.OpOverload():
            overloads = [function]
        case torch._ops.OpOverloadPacket():
            overloads = [getattr(function, name) for name in function.overloads()]  # type: ignore[no-untyped-call]
        case _:
            return False
    arguments = (argument for op in overloads for argument in op._schema.arguments)
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in arguments
    )


# --- autocast: switches ---------------------------------------------------------------------------


class Switches(NamedTuple):
    """PyTorch's autocast switches of a thread for one device type."""

    device: str
    dtype: torch.dtype
    enabled: bool
    cache: bool


def autocast_switches(device_type: str) -> Switches:
    """Read the switches of this thread."""
    return Switches(
        device_type,
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type),
        torch.is_autocast_cache_enabled(),
    )


def set_autocast_switches(switches: Switches) -> None:
    """Set the switches of this thread."""
    device_type, dtype, enabled, cache = switches
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)


def switches_of(context: torch.amp.autocast_mode.autocast) -> Switches:
    """Return what a context of plain ``torch.autocast`` sets the switches to."""
    return Switches(
        context.device, context.fast_dtype, context._enabled, bool(context._cache_enabled)
    )


def is_tracing_before_autocast() -> bool:
    """Return whether ops are recorded before they come to the Autocast keys, and not run.

    So does ``make_fx(pre_dispatch=True)``, and what is made of it.
    """
    if not torch._C._is_torch_function_mode_enabled():  # it sets one, and this is fast
        return False
    proxy = torch._C._TorchDispatchModeKey.PROXY
    mode = torch._ops._get_dispatch_mode_pre_dispatch(proxy)  # type: ignore[no-untyped-call]
    return mode is not None


@cache
def switch_devices() -> list[str]:
    """Return the device types for which this build of PyTorch has autocast's switches."""
    return [each for each in torch._C._autocast_supported_devices() if each != _GUARD_DEVICE]


@cache
def autocast_devices() -> list[str]:
    """Return those of :func:`switch_devices` for which PyTorch takes kernels for autocast.

    For some others (XLA) it has autocast, but no Python name for the key.
    """
    keys = torch._C.DispatchKey.__members__
    return [
        each
        for each in switch_devices()
        if "Autocast" + torch._C._dispatch_key_for_device(each) in keys
    ]


# --- autocast: torch.compile ----------------------------------------------------------------------


def allow_in_graph(*functions: Callable[..., None]) -> None:
    """Let torch.compile put calls of the functions into its graphs as they are."""
    torch.compiler.allow_in_graph(list(functions))  # type: ignore[no-untyped-call]


def do_not_compile_alone(
    function: Callable[_Params, _Result], *, nor_below: bool = True
) -> Callable[_Params, _Result]:
    """Let torch.compile trace into ``function`` from its caller, but not start in it.

    Where torch.compile gives up on a function it runs it as it is and compiles what it calls. A
    graph made of code that switches autocast on would do so while it is traced, and never again.

    Args:
        function: what is not to be compiled.
        nor_below: not to start in anything that it calls either.
    """
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, skip if nor_below else default)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def keep_out_of_graphs(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Let torch.compile end a graph where ``function`` is called, and compile nothing in it.

    As ``torch.compiler.disable``, which would import all of torch.compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it keeps books in Python"  # type: ignore[attr-defined]
    return do_not_compile_alone(function)


def run_while_tracing(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Let torch.compile call ``function`` while it traces, and take the result for a constant.

    As ``torch.compiler.assume_constant_result``, which would import all of torch.compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant_while_tracing(kind: type[_Value]) -> type[_Value]:
    """Let torch.compile of 2.11 pass values of a class to what :func:`run_while_tracing` marks.

    Later versions do without. The class has ``__eq__`` and ``__hash__`` and is no dataclass; its
    values never change. Code that was compiled with one value is guarded by it.
    """
    torch.utils._pytree.register_constant(kind)
    return kind


@run_while_tracing
def is_exporting() -> bool:
    """Return whether torch.export traces; 2.11's own answer is True for torch.compile too."""
    return torch.compiler.is_exporting()


# torch.compile guards on the autocast dtype of every device type for which autocast is on. This one
# (Graphcore's) lost its backend, so no op ever looks at it, and a number written there as a dtype
# becomes part of the guards. It does count for torch._C._is_any_autocast_enabled().
_GUARD_DEVICE = "ipu"
_GUARD_VALUES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
NUM_GUARD_VALUES = len(_GUARD_VALUES)


# Whether autocast is on for that device type, and its dtype there.
CompileGuard = tuple[bool, torch.dtype]


def numbered_guard(number: int) -> CompileGuard:
    """Return a guard that differs from that of another number, below :data:`NUM_GUARD_VALUES`."""
    return True, _GUARD_VALUES[number]


def compile_guard() -> CompileGuard:
    """Return what code compiled in this thread now is guarded by."""
    return torch.is_autocast_enabled(_GUARD_DEVICE), torch.get_autocast_dtype(_GUARD_DEVICE)


def set_compile_guard(guard: CompileGuard) -> None:
    """Let code compiled in this thread from now on run only while the same guard is set again."""
    enabled, dtype = guard
    torch.set_autocast_enabled(_GUARD_DEVICE, enabled)
    torch.set_autocast_dtype(_GUARD_DEVICE, dtype)


_TAG_MARK = "|halfstep:"


def set_compile_cache_tag(tag: str) -> None:
    """Let the on-disk caches of torch.compile tell code compiled from now on by ``tag``."""
    config = torch.compiler.config
    before = config.cache_key_tag
    after = before.partition(_TAG_MARK)[0] + (_TAG_MARK + tag if tag else "")
    if after != before:
        config.cache_key_tag = after


def forget_compiled_code() -> None:
    """Drop everything that torch.compile has compiled in this process."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# --- tracing --------------------------------------------------------------------------------------

# A node of autograd has a number, given in order in the thread that makes it.

# (): the number that the next node of this thread gets.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# (): which backward pass runs in this thread, -1 for none.
backward_number: Callable[[], int] = torch._C._current_graph_task_id


def made_as(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the number of the node that made a tensor, and which result it is; None for a leaf."""
    node = tensor.grad_fn
    return None if node is None else (node._sequence_nr(), tensor.output_nr)


def running_sequence_number() -> int | None:
    """Return the number of the node whose backward runs in this thread, None if none does."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def accumulated_into() -> torch.Tensor | None:
    """Return the tensor whose ``grad`` a backward pass adds to in this thread, None for none."""
    node: Any = torch._C._current_autograd_node()
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


@cache
def is_made_of_others(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Say whether ``op`` runs on a device as other ops, and by no kernel of that device."""
    key = torch._C.DispatchKey.__members__[torch._C._dispatch_key_for_device(device_type)]
    return is_composite(op) and not has_kernel(op, key)


def decompose(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite op as the ops that it is made of.

    ``op.decompose`` prefers what ``torch._decomp`` has for some ops, which rounds otherwise.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def autocast_again(device_type: str) -> Any:
    """In a dispatch mode: return a context in which autocast casts, as it does in the program."""
    return torch._C._SetExcludeDispatchKeyGuard(autocast_key(device_type), False)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose ``__torch_dispatch__`` sees every op of a thread, below autocast and autograd.

    PyTorch's own imports all of torch.compile with the first op, to keep out of its graphs.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def autocast_switches_of_caller(device_type: str) -> Switches:
    """In a dispatch mode: read the switches under which the program called the op.

    The mode itself runs with all keys above its own excluded, and with them autocast.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return autocast_switches(device_type)


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a weak reference to the memory of a tensor, None if it has none of its own.

    Its ``cdata`` tells the memory from all other while the reference is held. The memory is freed
    as always; only its address is not used again.
    """
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    try:
        with no_torch_function():
            storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass that has parts
        return None
    return torch.multiprocessing.reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor count as written to so many times, for what autograd has saved of it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_compiled(module: torch.nn.Module) -> bool:
    """Say whether calls of a module run what torch.compile made of it."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


# --- recording ------------------------------------------------------------------------------------


@contextmanager
def listening_to_norms(
    listener: Callable[[list[torch.Tensor], torch.Tensor], None],
) -> Iterator[None]:
    """Hear of the norms that torch.nn.utils.clip_grad_norm_ measures, by whatever name it is known.

    Args:
        listener: Gets the gradients and their L2 norm, a scalar.
    """
    module = torch.nn.utils.clip_grad
    measure = module._get_total_norm

    def heard(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm: torch.Tensor = measure(tensors, norm_type, *args, **kwargs)
        if float(norm_type) == 2.0:
            listener(tensors, norm)
        return norm

    module._get_total_norm = heard
    try:
        yield
    finally:
        module._get_total_norm = measure


# --- diagnosing -----------------------------------------------------------------------------------

# What every backward pass begins in; what it calls in Python lies above that on the stack.
ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__


def restart_scaler(scaler: torch.amp.GradScaler, scale: float | None) -> None:
    """Give PyTorch's scaler new books, so that those it has are left alone.

    Args:
        scaler: Its attributes are replaced; keep ``vars(scaler)`` to bring them back.
        scale: The scale; None for the one that it has.
    """
    attributes: Any = vars(scaler)
    device = None if attributes["_scale"] is None else attributes["_scale"].device
    value = scaler.get_scale() if scale is None else scale
    if device is None:
        attributes["_init_scale"] = value
    else:
        attributes["_scale"] = torch.tensor(value, dtype=torch.float32, device=device)
        attributes["_growth_tracker"] = torch.tensor(0, dtype=torch.int32, device=device)
    states = attributes["_per_optimizer_states"]
    attributes["_per_optimizer_states"] = type(states)(states.default_factory)


def default_store() -> Any:
    """Return the store through which the ranks of this job have found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


# --- several ranks --------------------------------------------------------------------------------


def exchange_device(process_group: torch.distributed.ProcessGroup) -> torch.device:
    """Return where the ranks of a group exchange small tensors: the same kind on all of them.

    An accelerator if the group has a backend for it that is not that of the CPU, else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator in process_group._device_types:
        cpu = torch.device("cpu")
        own = process_group._get_backend(accelerator).name()
        types = process_group._device_types
        if cpu not in types or process_group._get_backend(cpu).name() != own:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def is_dtensor(value: object) -> bool:
    """Say whether ``value`` is a DTensor, without importing what defines them."""
    return type(value) is not torch.Tensor and is_dtensor_class(type(value))


def is_dtensor_class(kind: type) -> bool:
    """Say whether the tensors of a class are DTensors."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # else there are none
    return issubclass(kind, getattr(module, "DTensor", ()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a DTensor; another tensor as it is. No collective.

    It shares memory with the DTensor and is below autograd.
    """
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    local: torch.Tensor = tensor._local_tensor  # to_local() takes 20 times longer
    # The result of a collective that may be under way.
    return local if type(local) is torch.Tensor or not hasattr(local, "wait") else local.wait()


def spec_of(tensor: Any) -> Any:
    """Return the value that says where a DTensor lies, None for another tensor.

    DTensors with the same one lie on the same ranks in the same way.
    """
    return getattr(tensor, "_spec", None)


class _BucketsAsTheyAre:
    """The reducer of a DistributedDataParallel, which makes its buckets anew at another time."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def keep_buckets(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let forward passes not ask the other ranks for the order of buckets, as the second one does.

    Until the attribute ``reducer`` is put back.
    """
    module.reducer = _BucketsAsTheyAre(module.reducer)  # type: ignore[assignment]


def has_comm_hook(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Say whether the gradients are reduced by a function of the user's."""
    return bool(module._comm_hooks)


def names_left_out(module: torch.nn.parallel.DistributedDataParallel) -> set[str]:
    """Return the names of parameters whose gradients DistributedDataParallel leaves alone."""
    names: set[str] = module.parameters_to_ignore
    return names


def saving_group() -> torch.distributed.ProcessGroup | None:
    """Return the ranks on which torch.distributed.checkpoint asks for states to save now.

    None if it does not, or on one rank only. It tells nobody; the arguments of its ``save`` do.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            arguments = frame.f_locals
            if {"process_group", "no_dist"} <= arguments.keys():
                world = None if arguments["no_dist"] else torch.distributed.group.WORLD
                return world and (arguments["process_group"] or world)
        frame = frame.f_back
    return None


# --- the runner -----------------------------------------------------------------------------------


def script_instead(wrapper: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let torch.jit.script compile ``original`` where it finds ``wrapper``; torch.compile too."""
    vars(wrapper).update(__script_if_tracing_wrapper=True, __original_fn=original)


# (): whether torch.jit.trace, or an export that uses it, records what runs in this thread.
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing


def is_being_made(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Say whether a scheduler's ``step`` is the one that its constructor makes."""
    return scheduler._is_initial


def is_hooked(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Say whether an optimizer of this class was made: then its ``step`` calls the step hooks."""
    return getattr(optimizer_class.step, "hooked", False)


# The code of the function that PyTorch puts around ``step`` of every class of optimizers.
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def optimizer_step_depth() -> int:
    """Return how many steps of optimizers, each inside the one before, run in this thread."""
    frame: Any = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth += frame.f_code is _STEP_CODE
        frame = frame.f_back
    return depth


def is_fake(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has no values: it belongs to a FakeTensorMode."""
    module: Any = sys.modules.get("torch._subclasses.fake_tensor")  # else there is none
    return module is not None and isinstance(tensor, module.FakeTensor)


def unseen_by_modes() -> AbstractContextManager[object]:
    """Return a context whose ops no TorchDispatchMode of the user sees."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()
