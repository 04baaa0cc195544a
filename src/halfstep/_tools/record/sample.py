"""Sampled steps: hooks that measure tensors, and counts of lost updates."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from halfstep._autocast import default_device
from halfstep._common.formats import FORMATS, FORMATS_BY_DTYPE, dtype_name
from halfstep._common.nested import tensors_in
from halfstep._gradients.gradients import parameters
from halfstep._master_weights.lost_updates import Counted, OpenSteps, looked_at
from halfstep._pytorch import autograd, modes
from halfstep._pytorch.amp import Switches
from halfstep._pytorch.devices import to_device
from halfstep._pytorch.modules import GlobalHooks
from halfstep._tools.measure import measure
from halfstep._tools.record.models import Models
from halfstep._tools.record.run import KINDS, Kind, Measured
from halfstep._tools.statistics import Statistics, merged
from halfstep._tools.trace.rows import grouped
from halfstep.events import PolicyOnDevice, active_policies, observe_contexts

OUTERMOST = "(model)"  # the name of the outermost module
COMPILED = (
    "parts of the model are compiled: the outputs of modules inside them are not sampled, but "
    "their parameters and the gradients of these are"
)


class Sampler:
    """A sampler of parameters, module outputs, and the gradients of both.

    It has hooks only between :meth:`begin` and :meth:`end`; otherwise it costs nothing. If it
    ``is_searching``, outermost modules that run with gradients become models.
    """

    def __init__(
        self,
        models: Models,
        is_searching: bool,
        say: Callable[[str], None],
        is_listening: Callable[[], bool],
    ) -> None:
        self._models = models
        self._is_searching = is_searching
        self._say, self._is_listening = say, is_listening
        self.is_open = self._is_measuring = False
        self._global_hooks = GlobalHooks(self._enter, self._leave)
        self._opened = ExitStack()  # undoes what the step has installed
        self._watched = ExitStack()  # undoes the hooks on the models
        self._found: dict[tuple[Kind, str], tuple[str, Statistics]] = {}
        self._last_outputs: list[weakref.ref[Tensor]] = []
        self._depth = 0
        self._depth_of_region = -1  # of the innermost call that entered autocast itself
        self._devices = dict.fromkeys(("cpu", default_device()))
        # Number of calls by device, dtype and policy; None is PyTorch's policy.
        self._ran_under: Counter[tuple[str, torch.dtype, PolicyOnDevice | None]] = Counter()
        self.policies: dict[str, tuple[str, str]] = {}  # lower precision and text, by device type

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter was given a gradient in this step."""
        return any(kind == "parameter_gradient" for kind, _ in self._found)

    def begin(self, is_measuring: bool) -> None:
        """Begin a step; without measuring, it only finds models and policies."""
        self.is_open, self._is_measuring = True, is_measuring
        self._depth, self._depth_of_region = 0, -1
        self._ran_under.clear()
        self._opened.enter_context(observe_contexts(self._enter_region))
        self._global_hooks.install()
        self._opened.callback(self._global_hooks.remove)
        self._watch_models()

    def end(self) -> list[Measured]:
        """End the step and return its tensors, in the order of the kinds."""
        self.is_open = False
        self._watched.close()
        self._opened.close()
        # The policy of most calls on each device.
        counts: Counter[tuple[str, str, str]] = Counter()
        for (device, dtype, policy), num_calls in self._ran_under.items():
            text = "torch" if policy is None else str(policy.policy)
            counts[device, dtype_name(dtype), text] += num_calls
        for (device, name, text), _ in reversed(counts.most_common()):
            self.policies[device] = name, text
        found, self._found = self._found, {}
        measured = [Measured.of(*key, *value) for key, value in found.items()]
        return sorted(measured, key=lambda each: KINDS.index(each.kind))

    def _watch_models(self) -> None:
        """Install hooks on the models; called again when another model is found."""
        if not len(self._models):
            return
        self._watched.close()
        if self._models.has_compiled:
            # Global hooks would make torch.compile compile everything again.
            self._say(COMPILED)
            self._global_hooks.remove()
            for module in self._models.eager_modules():
                handle = module.register_forward_hook(_ForwardHook(self._leave))
                self._watched.callback(handle.remove)
        if not self._is_measuring:
            return
        for name, parameter in self._models.parameters():
            if is_lazy(parameter):  # it has no shape before the first batch
                continue
            if ("parameter", name) not in self._found:
                self._take("parameter", name, parameter)
            if parameter.requires_grad and parameter.is_leaf:
                hook = partial(self._take_gradient, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._watched.callback(handle.remove)

    # --- hooks ------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, _: Any) -> None:
        if _is_traced() or not self._is_listening():
            return
        if (
            self._depth == 0
            and self._is_searching
            and self._models.name(module) is None
            and torch.is_grad_enabled()
            and any(parameter.requires_grad for parameter in module.parameters())
            and not _is_being_built(module)
        ):
            if self._models.add(module):
                self._found = {}  # it contains the names of a part of this model
            self._watch_models()
        self._depth += 1

    def _enter_region(self, switches: Switches) -> None:
        if _is_traced() or not (switches.enabled and self._is_listening()):
            return
        if autograd.backward_number() < 0 and torch.is_grad_enabled():
            self._depth_of_region = self._depth
            self._note_policy()

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if _is_traced() or not self._is_listening():
            return
        # An autocast context entered by the call itself has been exited by now.
        has_own_region = self._depth_of_region >= self._depth
        self._depth_of_region = min(self._depth_of_region, self._depth - 1)
        self._depth = max(self._depth - 1, 0)
        name = self._models.name(module)
        # In a backward pass a checkpoint is being recomputed.
        if name is None or autograd.backward_number() >= 0:
            return
        self._models.ran(name)
        if not torch.is_grad_enabled():
            return
        if not has_own_region:
            self._note_policy()
        if self._is_measuring:
            with modes.unseen_by_modes():
                self._take_outputs(name or OUTERMOST, output)

    def _take_outputs(self, name: str, output: Any) -> None:
        outputs = [tensor for tensor in tensors_in([output]) if tensor.requires_grad]
        last = [ref() for ref in self._last_outputs]
        for tensor in outputs:
            if any(tensor is seen for seen in last):
                continue  # a container returns the output of its last module
            self._take("output", name, tensor)
            hook = partial(self._take, "output_gradient", name)
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            self._opened.callback(handle.remove)
        self._last_outputs = [weakref.ref(tensor) for tensor in outputs]

    def _take_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None or not self._is_listening():
            return  # consumed by a step inside the backward pass, or a replay
        # With several backward passes this is the sum so far: only the last one counts.
        self._found.pop(("parameter_gradient", name), None)
        self._take("parameter_gradient", name, parameter.grad)

    def _take(self, kind: Kind, name: str, tensor: Tensor) -> None:
        if _is_traced():
            return
        try:
            # Zeros in gradients of outputs come from ReLUs and masks.
            with modes.unseen_by_modes():
                statistics = measure(tensor, is_gradient=kind == "parameter_gradient")
        except (RuntimeError, NotImplementedError) as error:  # a recorder must not end a run
            self._say(f"{kind} {name} cannot be measured: {error}")
            return
        if statistics is None:
            return
        _, earlier = self._found.get((kind, name), ("", None))
        if earlier is not None:
            statistics = merged((earlier, statistics))
        self._found[kind, name] = dtype_name(tensor.dtype), statistics

    def _note_policy(self) -> None:
        policies = active_policies()
        for device in self._devices:
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                self._ran_under[device, dtype, policies.get(device)] += 1


class _ForwardHook:
    """A hook that is not copied or saved with its module."""

    def __init__(self, function: Callable[..., None] = lambda *args: None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return _ForwardHook, ()


def _is_traced() -> bool:
    """Return whether the code is being traced or compiled, so that tensors have no values."""
    return torch.compiler.is_compiling() or modes.is_jit_tracing()


def _is_being_built(module: nn.Module) -> bool:
    """Return whether a module is one whose ``__init__`` is running, or part of it.

    Some models call themselves, or their parts, to determine shapes or strides.
    """
    for frame in autograd.frames():
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            built = frame.f_locals.get(code.co_varnames[0])
            if (
                isinstance(built, nn.Module)
                and "_modules" in vars(built)
                and any(each is module for each in built.modules())
            ):
                return True
    return False


MOST_ROWS = 256
"""The most tensors of a kind that a sample has one by one: a quarter of them the worst."""
OTHERS = "(others)"  # the name of the row that adds up the other tensors of a kind and dtype


def bounded(measured: Sequence[Measured]) -> list[Measured]:
    """Return the rows of a sample: of a kind with many tensors, the rest as sums.

    Most rows are those of tensors at equal distances in the model, the same in each sample; the
    others are those with inf and NaN, and with the largest shares that leave the range of float16.
    """
    rows: list[Measured] = []
    order = {name: n for n, name in enumerate(dict.fromkeys(each.name for each in measured))}
    for kind in KINDS:
        found = [each for each in measured if each.kind == kind]
        if len(found) > MOST_ROWS:
            found.sort(key=lambda each: order[each.name])  # gradients come in that of backward
            num_by_name = MOST_ROWS * 3 // 4
            chosen = {number * len(found) // num_by_name for number in range(num_by_name)}
            rest = [number for number in range(len(found)) if number not in chosen]
            rest.sort(key=lambda number: _badness(found[number]), reverse=True)
            chosen.update(rest[: MOST_ROWS - num_by_name])
            left = (each for number, each in enumerate(found) if number not in chosen)
            others = grouped(left, lambda each: each.dtype)
            found = [found[number] for number in sorted(chosen)]
            found += [Measured.of(kind, OTHERS, d, merged(of)) for d, of in others.items()]
        rows += found
    return rows


def _badness(measured: Measured) -> tuple[int, float]:
    lost = measured.overflow["fp16"] + measured.lost()
    return measured.nan + measured.inf, measured.share(lost)


def sample_scalars(tensors: Sequence[Measured]) -> dict[str, float]:
    """Return what sinks receive of a sampled step, from its measured tensors."""
    headrooms, underflows, non_finite = [], [0.0], 0
    for tensor in tensors:
        headroom = tensor.headroom(FORMATS_BY_DTYPE.get(tensor.dtype, FORMATS["fp16"]))
        if headroom is not None:
            headrooms.append(headroom)
        if tensor.kind == "parameter_gradient":
            underflows.append(tensor.share(tensor.lost()))
        non_finite += bool(tensor.nan or tensor.inf)
    scalars = {"underflow": max(underflows), "non_finite": float(non_finite)}
    return scalars | ({"headroom": min(headrooms)} if headrooms else {})


# --- lost updates ---------------------------------------------------------------------------------


class UpdateCounter:
    """A counter of the updates of all optimizers, and of lost ones.

    It has a hook only between :meth:`begin` and :meth:`end`; otherwise it costs nothing.
    """

    def __init__(self, say: Callable[[str], None], is_listening: Callable[[], bool]) -> None:
        self._say, self._is_listening = say, is_listening
        self._hook: RemovableHandle | None = None
        self._steps = OpenSteps(looked_at)
        self._counted: dict[int, Counted] = {}

    def begin(self) -> None:
        """Begin a sampled step."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_listening():
            return
        with modes.unseen_by_modes(), self._noting_failures():
            self._steps.begin(optimizer, args, kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the updates of a step that has begun in a sampled step. Sync: none."""
        if self._hook is not None:
            with self._noting_failures():
                counted = self._steps.end(optimizer)
                self._counted.update((id(each.param), each) for each in counted)

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a recorder must not end a run, whatever the optimizer is
            self._say(f"lost updates cannot be counted: {error}")

    def counts(self, optimizer: torch.optim.Optimizer | None) -> tuple[Tensor | None, ...]:
        """Return the number of an optimizer's updates and of lost ones; None if unknown.

        Counts in a part of a large tensor are extrapolated to its size. Sync: none.
        """
        if optimizer is None or not self._counted:
            return None, None
        found = [self._counted[id(p)] for p in parameters(optimizer) if id(p) in self._counted]
        if not found:
            return None, None
        device = found[-1].counts.device
        return torch.stack([to_device(each.in_full(), device) for each in found]).sum(0).unbind()

    def end(self, measured: list[Measured], params: Iterable[tuple[str, Tensor]]) -> list[Measured]:
        """End the sampled step and return its tensors, the parameters with their counts.

        Sync: one for each parameter.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._steps.clear()
        counted, self._counted = self._counted, {}
        found = ((name, counted.get(id(param))) for name, param in params)
        counts = {name: each.counts.tolist() for name, each in found if each is not None}
        for n, each in enumerate(measured):
            if each.kind == "parameter" and (known := counts.get(each.name)):
                measured[n] = replace(each, updates=known[0], lost_updates=known[1])
        return measured
