"""Master weights: optimizer steps in float32 for bfloat16 and float16 parameters."""

from __future__ import annotations

import builtins
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._common.formats import dtype_name
from halfstep._common.nested import like
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import (
    Names,
    Replacements,
    makes_step_of,
    members,
    require_optimizer,
    split_closure,
    with_closure,
)
from halfstep._gradients.scalars import describe
from halfstep._master_weights.exchange import (
    STORES,
    Exchange,
    Scratch,
    Split,
    Store,
    float32_weight,
    step_in_chunks,
    steps_one_at_a_time,
)
from halfstep._pytorch.distributed import (
    has_process_group,
    is_dtensor,
    lacks_forward,
    local_part,
    names_left_out,
    reduce_in_float32,
    reduced_by,
)
from halfstep._pytorch.modes import is_fake
from halfstep._pytorch.optim import (
    is_whole,
    replace_method,
    step_without_hooks,
    tell_scheduler,
    with_step_hooks,
)
from halfstep._scaler import is_guarded
from halfstep.errors import CallOrderError

LOWER = (torch.bfloat16, torch.float16)  # the dtypes whose parameters may have master weights
UNTOUCHED = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""The dtypes whose parameters are left alone."""

BESIDE_STEP = ("train", "eval", "first_step", "second_step")
"""Methods with which schedule-free and sharpness-aware optimizers change parameters."""

StoreName = Literal["split", "float32"]

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def master_weights(
    optimizer: _Optimizer, store: StoreName = "split", gradients: Literal["float32"] | None = None
) -> _Optimizer:
    """Make an optimizer step its bfloat16 and float16 parameters in float32.

    The state of the optimizer stores what rounding drops from each weight. During
    ``optimizer.step`` parameters and gradients *are* float32: any optimizer of PyTorch computes bit
    for bit as on a float32 model, and creates float32 state. Afterwards the parameters have their
    own dtype again: they are the same objects in the same memory, newly rounded. After any other
    write to a parameter, the next step continues from the new value. docs/half_parameters.md says
    what else changes parameters, and what it costs.

    Args:
        optimizer: Any optimizer with PyTorch's interface. It is changed in place.
        store: What is kept beside each parameter: ``"split"`` the lower 16 bits of its float32
            weight, for bfloat16; ``"float32"`` the weight, for bfloat16 and float16.
        gradients: ``"float32"`` accumulates gradients in float32, at 4 bytes a weight instead of 2.
            None accumulates them in the dtype of the parameter, except for float16 parameters:
            their gradients are float32, which a GradScaler needs. DTensors cannot have them.

    Returns:
        The optimizer.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, wraps one (pass the wrapped one), or holds
            several (pass each of them).
        ValueError: The optimizer has master weights or a guard already, or loaded state with them
            before; no parameter is bfloat16 or float16; one has a dtype that the store does not
            support, or shares memory with another; gradients cannot be float32; or an argument is
            not valid.

    Memory: float32 weights and gradients of some parameters at a time; of all with LBFGS, and with
    an optimizer that is not PyTorch's. Sync: none.

    Example:
        >>> import halfstep
        >>> model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> optimizer = halfstep.master_weights(optimizer)
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> state = optimizer.state[model.weight]
        >>> model.weight.dtype, state["exp_avg"].dtype, state["master_remainder"].dtype
        (torch.bfloat16, torch.float32, torch.int16)
    """
    call = f"master_weights({type(optimizer).__name__})"
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{call}: pass a torch.optim.Optimizer")
    if len(members(optimizer)) > 1:
        raise TypeError(
            f"{call}: it holds several optimizers, and their checkpoints would not contain its "
            "state. Pass each of them, one by one"
        )
    if not is_whole(optimizer):
        raise TypeError(
            f"{call}: it wraps an optimizer, and a checkpoint would omit the wrapper's state. Pass "
            "the optimizer that it wraps"
        )
    if optimizer in _MASTERS:
        raise ValueError(
            f"{type(optimizer).__name__} has master weights already: call master_weights() once"
        )
    if gradients not in (None, "float32"):
        raise ValueError(f"gradients={gradients!r}: pass 'float32', or leave it out")
    if store not in STORES:
        raise ValueError(f"store={store!r}: pass one of {', '.join(map(repr, STORES))}")
    if is_guarded(optimizer):
        raise ValueError(
            f"{call}: it has a guard, which would find float32 parameters: call guard(optimizer) "
            "after master_weights(optimizer), or guarded.remove() before it"
        )
    MasterWeights(STORES[store], gradients == "float32").take(optimizer)
    return optimizer


_MASTERS: weakref.WeakKeyDictionary[Optimizer, MasterWeights] = weakref.WeakKeyDictionary()

KEYS = {each.key for each in STORES.values()}
"""The keys, in the state of an optimizer, of the tensors that stores keep."""


class MasterWeights:
    """The master weights of one optimizer; bfloat16 ones may have ``float32_gradients`` too."""

    def __init__(self, store: Store, float32_gradients: bool) -> None:
        self.store, self._float32_gradients = store, float32_gradients
        self._loaded: dict[int, dict[str, Any]] = {}

    def take(self, optimizer: Optimizer) -> None:
        """Make an optimizer step in float32 from now on."""
        if not self._served(optimizer, optimizer.param_groups):
            raise ValueError(
                f"master_weights({type(optimizer).__name__}): all its parameters are float32 or "
                "wider, which need no master weights. Lower the model first: "
                "model.to(torch.bfloat16)"
            )
        for param in parameters(optimizer):
            state = optimizer.state.get(param, {})
            if any(key in state and state[key].dtype is param.dtype for key in KEYS):
                raise ValueError(
                    f"master_weights({type(optimizer).__name__}): its state was loaded before it "
                    "had master weights, and PyTorch has rounded what was kept of them. Call "
                    "master_weights() first, and then load_state_dict()"
                )
        self._widen_states(optimizer)
        replaced = Replacements(optimizer, "master_weights", "would round the updates away")
        self._take_step(optimizer, replaced)
        for name in BESIDE_STEP:
            if callable(original := getattr(optimizer, name, None)):
                replaced.put(optimizer, name, partial(self._step_at_once, original))
        self._take_groups(optimizer)
        self._take_copies(optimizer)
        self._take_loading(optimizer)
        optimizer.register_state_dict_post_hook(_after_save)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        _MASTERS[optimizer] = self

    def _take_step(self, optimizer: Optimizer, replaced: Replacements) -> None:
        alone, original = step_without_hooks(optimizer), optimizer.step
        known = (*self.store.dtypes, *UNTOUCHED)

        def step(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
            if any(param.dtype not in known for param in parameters(optimizer)):
                self._served(optimizer, optimizer.param_groups)  # raises, as after model.half()
            if alone is None:  # replaced by others: its hooks see float32 parameters
                return self._step_at_once(original, optimizer, *args, **kwargs)
            tell_scheduler(optimizer)
            return self._step(alone, optimizer, *args, **kwargs)

        replaced.put(optimizer, "step", step if alone is None else with_step_hooks(step))

    def _take_groups(self, optimizer: Optimizer) -> None:
        original = optimizer.add_param_group

        def add_param_group(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            try:
                self._served(optimizer, optimizer.param_groups[-1:])
            except ValueError:
                del optimizer.param_groups[-1]
                raise

        replace_method(optimizer, "add_param_group", add_param_group)

    def _take_copies(self, optimizer: Optimizer) -> None:
        """Give copies made by ``copy`` and ``pickle`` master weights too."""

        def reduce(optimizer: Optimizer, protocol: SupportsIndex) -> tuple[Any, ...]:
            # As without master weights: attributes of the instance are not saved.
            parts = type(optimizer).__reduce_ex__(optimizer, protocol)
            return _copied, (self.store.name, self._float32_gradients, parts)

        replace_method(optimizer, "__reduce_ex__", reduce)

    def _take_loading(self, optimizer: Optimizer) -> None:
        """Support optimizers whose ``load_state_dict`` calls no hooks, as in bitsandbytes."""
        original = optimizer.load_state_dict

        def load_state_dict(
            optimizer: Optimizer, /, state_dict: dict[str, Any], *args: Any, **kwargs: Any
        ) -> None:
            self._before_load(optimizer, state_dict)
            original(state_dict, *args, **kwargs)
            self._after_load(optimizer)  # has no effect if it was already called as a hook

        replace_method(optimizer, "load_state_dict", load_state_dict)

    def _served(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[Tensor]:
        """Return the parameters that the store serves, and set the dtype of their gradients."""
        found = []
        for group in groups:
            names = group.get("param_names") or range(len(group["params"]))
            for name, param in zip(names, group["params"], strict=True):
                if param.dtype in self.store.dtypes:
                    found.append((param, name))
                elif param.dtype not in UNTOUCHED:
                    cure = " Pass store='float32'." if param.dtype is torch.float16 else ""
                    served = " and ".join(map(dtype_name, self.store.dtypes))
                    raise ValueError(
                        f"master_weights({type(optimizer).__name__}, store={self.store.name!r}): "
                        f"parameter {name} is {describe(param)}, and this store serves {served} "
                        f"and leaves float32 alone.{cure}"
                    )
        _refuse_shared_memory(optimizer)
        before = [(param, param.grad_dtype) for param, _ in found]
        try:
            for param, name in found:
                self._see_to_gradients(param, name)
            self._see_to_buckets([p for p, _ in found if p.grad_dtype is torch.float32])
        except ValueError:
            for param, dtype in before:
                _set_grad_dtype(param, dtype)
            raise
        return [param for param, _ in found]

    def _see_to_gradients(self, param: Tensor, name: object) -> None:
        if self._float32_gradients or param.dtype is torch.float16:
            if is_dtensor(param):
                raise ValueError(
                    f"master_weights(): the gradient of parameter {name}, a DTensor of "
                    f"{param.dtype}, cannot be float32: fully_shard and tensor "
                    "parallel make it of the parameter's dtype. Use bfloat16, and leave "
                    "gradients='float32' out; fully_shard adds up in float32 with "
                    "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
            _set_grad_dtype(param, torch.float32)

    @staticmethod
    def _see_to_buckets(params: list[Tensor]) -> None:
        """Make DistributedDataParallel reduce in float32 if all its gradients are float32."""
        if params and has_process_group():
            modules = dict(reduced_by(params))
            _refuse_later_wrapping([param for param in params if id(param) not in modules])
            for module in dict.fromkeys(modules.values()):
                if _reduced_dtypes(module) == {torch.float32}:
                    reduce_in_float32(module)
                _check_first_backward(module, params)

    # --- a step -----------------------------------------------------------------------------------

    def _step(
        self, step: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Step in chunks if the result is the same, else all at once."""
        if not steps_one_at_a_time(optimizer, step):
            return self._step_at_once(step, optimizer, *args, **kwargs)
        closure, loss = next(iter(args), kwargs.get("closure")), None
        if callable(closure):  # PyTorch would call it once, at the start
            with torch.enable_grad():
                loss = closure()
        scratch = Scratch()

        def step_chunk() -> None:
            Exchange(optimizer, self.store, scratch).around(step)

        step_in_chunks(optimizer, step_chunk)
        return loss

    def _step_at_once(
        self, step: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any
    ) -> Any:
        exchange = Exchange(optimizer, self.store)
        closure, others, kwargs = split_closure(args, kwargs)
        if closure is not None:
            args, kwargs = with_closure(exchange.outside(closure), others, kwargs)
        return exchange.around(step, *args, **kwargs)

    # --- checkpoints ------------------------------------------------------------------------------

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Set aside the state of lower parameters: PyTorch casts state to the parameter's dtype.

        PyTorch loads the optimizer's own state, which ``__setstate__`` may need, and nothing else.
        """
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        saved = dict(state_dict["state"])
        self._loaded = {}
        for id, param in zip(ids, parameters(optimizer), strict=False):
            if id in saved:
                if param.dtype in self.store.dtypes:
                    self._loaded[builtins.id(param)] = saved[id]
                saved[id] = {key: each for key, each in saved[id].items() if key not in KEYS}
        return state_dict | {"state": saved}

    def _after_load(self, optimizer: Optimizer) -> None:
        """Restore the state that was set aside, with the dtypes in which it was saved."""
        for param in parameters(optimizer):
            for key, value in self._loaded.get(id(param), {}).items():
                state = optimizer.state[param]
                # PyTorch leaves "step" float32. Keys that __setstate__ has removed stay removed.
                is_cast = isinstance(value, _WITH_TENSORS) and key != "step" and key in state
                if key in KEYS or is_cast:
                    state[key] = _map_state(methodcaller("to", param.device), value)
                if key == Split.key:
                    state[key] = state[key].short()
        self._loaded = {}
        self._widen_states(optimizer)

    def _widen_states(self, optimizer: Optimizer) -> None:
        """Cast state that was made without master weights to float32.

        State made with them has a lower precision only if the optimizer chose it.
        """
        for param in parameters(optimizer):
            state = optimizer.state.get(param, {})
            if param.dtype in self.store.dtypes and KEYS.isdisjoint(state):
                for key, value in state.items():
                    state[key] = _map_state(_widened, value)


def _copied(store: str, float32_gradients: bool, parts: tuple[Any, ...]) -> Optimizer:
    make, args, state, *_ = parts
    optimizer: Optimizer = make(*args)
    optimizer.__setstate__(state)
    MasterWeights(STORES[store], float32_gradients).take(optimizer)
    return optimizer


def _after_save(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Save the remainders of DTensors as int32: no backend of torch.distributed sends int16."""
    state = dict(state_dict["state"])
    for id, each in state.items():
        if isinstance(each, dict) and is_dtensor(each.get(Split.key)):
            state[id] = each | {Split.key: each[Split.key].int()}
    return state_dict | {"state": state}


def float32_weights(model: torch.nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Return the ``state_dict`` of a model with exact float32 weights, for export.

    Args:
        model: The model.
        optimizers: All optimizers of its parameters that have master weights, or wrappers or
            containers of them.

    Returns:
        A ``state_dict`` with float32 copies of all bfloat16 and float16 parameters: the master
        weights of those that the optimizers step, the values of the others. All other entries are
        those of ``model.state_dict()``.

    Raises:
        TypeError: One of ``optimizers`` is not an optimizer.
        ValueError: No optimizer has master weights, or none has a parameter of this model.

    Memory: the float32 weights. Sync: none.

    Example:
        >>> import halfstep
        >>> model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = halfstep.master_weights(torch.optim.SGD(model.parameters(), lr=1e-3))
        >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> exported = torch.nn.Linear(2, 1)
        >>> exported.load_state_dict(float32_weights(model, optimizer))
        <All keys matched successfully>
    """
    for optimizer in optimizers:
        require_optimizer("float32_weights", optimizer)
    behind = [master for optimizer in optimizers for master in with_masters(optimizer)]
    if not behind:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"float32_weights({names}): no master weights; the parameters are the weights: use "
            "model.state_dict()"
        )
    owners = {param: optimizer for optimizer in behind for param in parameters(optimizer)}
    weights = model.state_dict(keep_vars=True)
    lower = {id(v) for v in weights.values() if isinstance(v, Tensor) and v.dtype in LOWER}
    if lower and lower.isdisjoint(map(id, owners)):
        raise ValueError(
            f"float32_weights({type(model).__name__}): no optimizer has a parameter of its "
            "state_dict. Pass the model that is trained, not a copy, not a model with replaced "
            "parameters (load_state_dict(assign=True)), and not a FullyShardedDataParallel"
        )
    exact: dict[Tensor, Tensor] = {}  # tied parameters stay tied
    for name, value in weights.items():
        if isinstance(value, torch.nn.Parameter) and value.dtype in LOWER:
            if value not in exact:
                exact[value] = weight_of(owners.get(value, behind[0]), value).float()
            weights[name] = exact[value]
        elif isinstance(value, Tensor):
            weights[name] = value.detach()
    return weights


def with_masters(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers with master weights that a step of this optimizer steps."""
    own = [each for each in _MASTERS if each is optimizer]  # a container may not be hashable
    return own or [each for each in _MASTERS if makes_step_of(optimizer, each)]


def weight_of(optimizer: Optimizer, param: Tensor) -> Tensor:
    """Return the float32 weight behind a parameter; without one, the parameter itself."""
    masters = _MASTERS.get(optimizer)
    if masters is None or param.dtype not in masters.store.dtypes:
        return param.detach()
    return float32_weight(optimizer, masters.store, param)


def _set_grad_dtype(param: Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype of gradients, also of the one that a parameter has."""
    if param.grad_dtype is not dtype:
        grad, param.grad = param.grad, None
        param.grad_dtype = dtype
        param.grad = None if grad is None else grad.to(dtype)


def _refuse_later_wrapping(params: list[Tensor]) -> None:
    """Raise an error in the first backward pass if DistributedDataParallel has wrapped them since.

    PyTorch would raise "Expected Half, got Float": its buckets have the dtypes of the parameters.
    """

    def check() -> bool:
        if any(reduced_by(params)):
            raise ValueError(
                "master_weights(): a DistributedDataParallel that was made later cannot reduce the "
                "float32 gradients of its parameters. Make it first: model = "
                "DistributedDataParallel(model), and then master_weights(optimizer, ...)"
            )
        return True

    _at_gradients(params, check)


def _at_gradients(params: list[Tensor], check: Callable[[], bool]) -> None:
    """Call ``check`` when a parameter gets its gradient, until it has raised or returned True."""

    def call(gradient: Tensor) -> None:
        is_done = True
        try:
            is_done = check()
        finally:
            for handle in handles if is_done else ():
                handle.remove()

    trained = (param for param in params if param.requires_grad)
    handles = [param.register_hook(call) for param in trained]  # type: ignore[no-untyped-call]


def _reduced_dtypes(module: torch.nn.parallel.DistributedDataParallel) -> set[torch.dtype | None]:
    left_out = names_left_out(module)
    return {
        param.grad_dtype
        for name, param in module.module.named_parameters()
        if param.requires_grad and name not in left_out
    }


def _check_first_backward(
    module: torch.nn.parallel.DistributedDataParallel, params: list[Tensor]
) -> None:
    """Raise an error in the first backward pass if float32 gradients could not be reduced.

    If its forward pass came before, each rank would keep its own gradients, and the ranks would
    diverge. Of other dtypes beside, PyTorch would raise "Expected Half, got Float".
    """

    def check() -> bool:
        if not module.require_backward_grad_sync:  # in no_sync(): a later pass reduces
            return False
        if _reduced_dtypes(module) != {torch.float32}:
            raise CallOrderError(
                "master_weights(): a DistributedDataParallel has parameters with float32 gradients "
                "and others, and cannot reduce both. Call it on all optimizers of the model, with "
                "the same gradients=, before the first backward pass"
            )
        if lacks_forward(module):
            raise CallOrderError(
                "master_weights(): it was called between the forward and the backward pass of a "
                "DistributedDataParallel, which would not reduce these gradients. Call it before "
                "the forward pass. If the backward pass is not one of DistributedDataParallel, put "
                "it into its no_sync()"
            )
        return True

    _at_gradients(params, check)


def _refuse_shared_memory(optimizer: Optimizer) -> None:
    """Raise an error if two parameters share memory: each would get its own float32 weight."""
    owners: dict[int, Tensor] = {}
    for param in parameters(optimizer):
        local = local_part(param)
        if param.dtype in LOWER and local.numel() > 0 and not is_fake(local):
            address = local.data_ptr()  # 0 without memory, as on "meta"
            other = owners.setdefault(address, param) if address else param
            if other is not param:
                one, two = Names().of([other, param], optimizer)
                raise ValueError(
                    f"master_weights({type(optimizer).__name__}): {one} and {two} share their "
                    "memory, and a step would keep the update of one of them alone. Let them be "
                    "the same parameter: decoder.weight = embedding.weight"
                )


_WITH_TENSORS = (Tensor, dict, list, tuple, deque)
"""The classes of state values that are, or may hold, tensors."""


def _map_state(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a state value with a function applied to its tensors.

    Containers are copied, as in PyTorch's ``load_state_dict``: an optimizer may write to them, and
    the loaded ones belong to the caller.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_state(function, item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((_map_state(function, item) for item in value), value.maxlen)
    if isinstance(value, list | tuple):
        return like(value, [_map_state(function, item) for item in value])
    return value


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOWER else tensor
