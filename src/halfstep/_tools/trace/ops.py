"""Ops in a dispatch mode: their kinds, their modules, phases and rules, and the mode itself.

An op of the forward pass belongs to the running module. An op of the backward pass belongs to the
op whose gradient it computes: autograd numbers its nodes in order of creation, and the place of
each node is recorded when it is created.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._autocast import Rule
from halfstep._common.formats import dtype_name
from halfstep._common.module_names import around, without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._pytorch import amp, autograd, compiler, dispatch, modes
from halfstep._pytorch.compiler import eager
from halfstep._pytorch.dispatch import schema_of
from halfstep._pytorch.modules import GlobalHooks
from halfstep._tools.trace.rows import Cast, Phase, Row, Value
from halfstep.events import PolicyOnDevice, active_policies, is_on_island

# Ops that allocate results without computing them.
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# These ops write to buffers of batch norm, which their schemas (PyTorch 2.13) omit.
_WRITE_BUFFERS = {
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
}


@cache
def op_name(func: Any) -> str:
    return schema_of(func).name.removeprefix("aten::")


def device_of(given: list[Tensor], kwargs: dict[str, Any]) -> str:
    if given:
        return given[0].device.type
    return torch.device(kwargs.get("device") or torch.get_default_device()).type


def casts_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the dtype if an op casts from a floating dtype to another, else None."""
    if func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor):  # else a number
        source, to = args[0].dtype, kwargs.get("dtype") or args[0].dtype
    elif func is torch.ops.aten.copy_.default:
        source, to = args[1].dtype, args[0].dtype
    else:
        return None
    is_cast = to is not source and to.is_floating_point and source.is_floating_point
    return dtype_name(to) if is_cast else None


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op by their names in its schema."""
    names = (argument.name for argument in schema_of(func).arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    names = _names_written(func)
    given = by_name(func, args, kwargs) if names else {}
    return [given[name] for name in names if name in given]


@cache
def _names_written(func: Any) -> tuple[str, ...]:
    schema, writes_buffers = schema_of(func), op_name(func) in _WRITE_BUFFERS
    if not (writes_buffers or schema.is_mutable):
        return ()
    infos = ((argument.name, argument.alias_info) for argument in schema.arguments)
    written = [name for name, info in infos if info is not None and info.is_write]
    return (*written, *(("running_mean", "running_var") if writes_buffers else ()))


@cache
def makes_no_values(func: Any) -> bool:
    """Return whether an op only allocates, or returns another view of its input."""
    return func.is_view or only_allocates(func)


def only_allocates(func: Any) -> bool:
    """Return whether the values of an op's results are those that the memory had before."""
    return op_name(func) in _ALLOCATE


def computes_nothing(func: Any, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> bool:
    """Return whether an op only allocates, returns a view of its input, or has no tensors."""
    if makes_no_values(func) or not (inputs or outputs):
        return True
    memories = {value.storage for value in inputs}
    return (
        bool(outputs)
        and not schema_of(func).is_mutable
        and all(value.storage in memories for value in outputs)
    )


# --- places ---------------------------------------------------------------------------------------


class ModuleCall(NamedTuple):
    """A running call of a module; in a backward pass it is a recomputation."""

    module: str
    number: int
    in_backward: bool


class ThreadState(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, ModuleCall]] = []  # running, outermost first
        self.ruled: list[RuledOp] = []  # the nested ops that run by a rule, outermost first
        self.next_node = autograd.next_sequence_number()  # as of the last op
        self.nodes: dict[int, OpPlace] = {}  # created in this thread, by sequence number
        self.records: dict[int, bool] = {}  # whether gradients are recorded, by backward pass
        self.nested: set[int] = set()  # the backward passes that began inside of another one
        self.is_cast = False  # whether autocast has cast what the decomposed composite gets
        # Of a trace: casts made under plain torch.autocast, by its kernels for the next op or by
        # hand, each with its own row.
        self.casts: list[Row] = []


class RunningModules:
    """The running calls of a model's modules, by thread."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[nn.Module, str] = {}
        self._owners: dict[Tensor, str] = {}
        self._counts: Counter[nn.Module] = Counter()
        self.of_thread = ThreadState()
        if model is not None:
            self.add(model)

    def add(self, model: nn.Module, name: str = "") -> None:
        """Also track the modules of another model, with the name prefix ``name``."""
        # A module with several names gets the first.
        for path, module in model.named_modules():
            names = (each for each in (name, without_wrappers(path)) if each)
            self._names.setdefault(module, ".".join(names))
        self._owners.clear()

    def knows(self, module: nn.Module) -> bool:
        return module in self._names

    def owner_of(self, param: Tensor) -> str:
        """Return the path of the module that owns a parameter, empty if unknown."""
        if not self._owners:
            for module, name in self._names.items():
                for parameter in module.parameters(recurse=False):
                    self._owners.setdefault(parameter, name)
        return self._owners.get(param, "")

    @property
    def have_run(self) -> bool:
        return bool(self._counts)

    def innermost(self) -> ModuleCall | None:
        calls = self.of_thread.calls
        return calls[-1][1] if calls else None

    @contextmanager
    def followed(self) -> Iterator[None]:
        hooks = GlobalHooks(self._enter, self._leave)
        hooks.install()
        try:
            yield
        finally:
            hooks.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            in_backward = autograd.backward_number() >= 0
            self._counts[module] += 1
            call = ModuleCall(name, self._counts[module], in_backward)
            self.of_thread.calls.append((module, call))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        # Calls that a KeyboardInterrupt ended are still above it, since no hook ran for them. The
        # module itself is missing if an earlier hook raised an error.
        calls = self.of_thread.calls
        if any(running is module for running, _ in calls):
            while calls.pop()[0] is not module:
                pass


def _rule_of_island(module: str) -> str | None:
    """Return the rule that makes a module, or one around it, an island that this thread is in."""
    is_inside = is_on_island()
    for policy in active_policies().values():
        # The inputs of an island are cast before autocast is off.
        if is_inside or autocast_of_caller(policy.device):
            names, lower = around(module) if is_inside else [module], policy.lower_precision()
            rules = (policy.policy.island(name, policy.device, lower) for name in names)
            rule = next((rule for rule in rules if rule is not None), None)
            if rule is not None:
                return str(rule)
    return None


@dataclass
class RuledOp:
    op: str
    rule: Rule
    lower: str  # the lower precision of autocast
    casts: list[Cast] = field(default_factory=list)  # for the next op in it that computes something


class OpPlace(NamedTuple):
    """The module, call and rule of an op, and for an autograd node of the op that created it."""

    module: str = ""
    call: int = 0  # of the module, from 1; 0 outside of the modules
    rule: str | None = None
    op: str | None = None  # that the rule was looked up for; None if it is that of an island
    number: int = -1  # of the op that created a node, if ops are numbered
    made_by: str = ""  # that op


class OpPlaces:
    """The attribution of ops to modules, rules and autograd nodes, by thread."""

    def __init__(self, modules: RunningModules) -> None:
        self.modules = modules
        self._thread = modules.of_thread
        self._nodes = self._thread.nodes  # of the thread that runs the forward pass

    @property
    def ruled(self) -> list[RuledOp]:
        """The nested ops of this thread that run by a rule, outermost first."""
        return self._thread.ruled

    @contextmanager
    def under(self, op: str, rule: Rule, policy: PolicyOnDevice) -> Iterator[RuledOp]:
        """Attribute the ops in the block to ``op``, which runs by ``rule``."""
        lower = dtype_name(amp.autocast_switches(policy.device).dtype)
        ruled = RuledOp(op.rpartition(".")[0], rule, lower)
        self.ruled.append(ruled)
        try:
            yield ruled
        finally:
            self.ruled.pop()

    def backward_begins(self) -> bool:
        """Return whether the next op is the first of its backward pass."""
        task = autograd.backward_number()
        return task >= 0 and task not in self._thread.records

    def place(self, op: str, number: int = -1) -> tuple[OpPlace, Phase]:
        """Return the place of an op, and record it for the autograd nodes that the op created."""
        here, task = self._thread, autograd.backward_number()
        call, ruled = self.modules.innermost(), here.ruled[-1] if here.ruled else None
        phase: Phase = "forward"
        if task < 0:
            place = OpPlace(call.module, call.number) if call else OpPlace()
        else:
            place, phase = self._place_in_backward(task, call, op)
        if ruled is not None:
            place = place._replace(rule=str(ruled.rule), op=ruled.op)
        following = autograd.next_sequence_number()
        made_for = place if phase == "backward" else place._replace(op=place.op or op)
        made_for = made_for._replace(number=number, made_by=op)
        for node in range(here.next_node, following):
            here.nodes[node] = made_for
        here.next_node = following
        if place.rule is None and phase == "forward":  # not for the nodes: their ops have rules
            place = place._replace(rule=_rule_of_island(place.module))
        return place, phase

    def _place_in_backward(
        self, task: int, call: ModuleCall | None, op: str
    ) -> tuple[OpPlace, Phase]:
        here = self._thread
        if task not in here.records and autograd.is_in_nested_backward():
            here.nested.add(task)
        records = here.records.setdefault(task, torch.is_grad_enabled())
        place = self._place_of(autograd.running_node())
        if call is not None and call.in_backward:
            return OpPlace(call.module, call.number), "recompute"
        if torch.is_grad_enabled() and not records:  # a function, not a module
            return OpPlace(place.module, place.call), "recompute"
        into = autograd.accumulated_into()
        if into is not None:
            return OpPlace(self.modules.owner_of(into)), "backward"
        if op in ("add", "add_"):  # autograd's own sum of gradients, without a rule
            place = place._replace(rule=None, op=None)
        return place, "backward"

    def _place_of(self, node: Any) -> OpPlace:
        """Return the place of the op that created an autograd node.

        Each thread numbers the nodes that it creates. Autograd's threads for devices create some
        when they recompute a checkpoint, which a nested backward pass then runs, and for a second
        backward pass; of two nodes with one number, the name of the op tells which it is.
        """
        tables = [self._nodes, self._thread.nodes]
        if autograd.backward_number() in self._thread.nested:
            tables.reverse()
        number = -1 if node is None else autograd.sequence_number(node)
        found = [table[number] for table in tables if number in table]
        kind = "" if node is None else node.name().partition("Backward")[0].lower()
        alike = (each for each in found if each.made_by.replace("_", "") == kind)
        return next(alike, found[0] if found else OpPlace())


# --- the mode -------------------------------------------------------------------------------------


class OpMode(modes.DispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that calls :meth:`run` for every op except composites."""

    def __init__(self, modules: RunningModules) -> None:
        super().__init__()
        self.modules, self.places, self.of_thread = modules, OpPlaces(modules), modules.of_thread

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate the mode for this thread and its backward passes.

        Compiled code runs in eager mode, see :func:`eager`.
        """
        with eager(), self.modules.followed(), self:
            yield

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op and return its result; ``given`` are the tensors among its arguments."""
        raise NotImplementedError

    @compiler.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if dispatch.is_higher_order(func):
            kernel = dispatch.kernel_in_mode(func)
            with self if kernel is not None else nullcontext():
                return (kernel or func)(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        device = device_of(given, kwargs)
        # Nested and sparse tensors have kernels other than those of their device.
        is_dense = all(t.layout is torch.strided and not t.is_nested for t in given)
        if is_dense and dispatch.is_made_of_others(func, device):
            return self._decompose(func, device, args, kwargs)
        return self.run(func, args, kwargs, given)

    def _decompose(
        self, func: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite as its component ops: in inference mode, nothing above this mode does.

        Autocast is off inside a mode. It is enabled for the components, unless it has already cast
        the arguments of the composite.
        """
        here, before = self.of_thread, self.of_thread.is_cast
        here.is_cast = before or self._is_cast_by_autocast(func, device)
        is_on = not here.is_cast and autocast_of_caller(device) is not None
        try:
            with modes.autocast_again(device) if is_on else nullcontext(), self:
                return dispatch.decompose(func, args, kwargs)
        finally:
            here.is_cast = before

    def _is_cast_by_autocast(self, func: Any, device: str) -> bool:
        if device in active_policies():
            ruled = self.places.ruled
            return bool(ruled) and ruled[-1].rule.action != "leave"
        if device not in amp.autocast_devices():
            return False
        name = f"{op_name(func)}.{dispatch.overload_of(func)}"
        return name in dispatch.overloads_with_autocast_kernel(device)


def autocast_of_caller(device: str) -> str | None:
    """Return autocast's lower precision outside of the mode, None if it is off."""
    if device not in amp.autocast_devices():
        return None
    switches = modes.autocast_switches_of_caller(device)
    return dtype_name(switches.dtype) if switches.enabled else None
