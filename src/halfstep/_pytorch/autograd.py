"""Autograd: nodes, backward passes, saved tensors and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint

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


# A node of autograd has a number, given in order in the thread that makes it.

# (): the number that the next node of this thread gets.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# (): which backward pass runs in this thread, -1 for none.
backward_number: Callable[[], int] = torch._C._current_graph_task_id


def running_sequence_number() -> int | None:
    """Return the number of the node whose backward runs in this thread, None if none does."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def accumulated_into() -> torch.Tensor | None:
    """Return the tensor whose ``grad`` a backward pass adds to in this thread, None for none."""
    node: Any = torch._C._current_autograd_node()
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def has_hooks_after_accumulation(leaf: torch.Tensor) -> bool:
    """Return whether hooks run when the gradient of a leaf is there, and may take it away."""
    return bool(leaf._post_accumulate_grad_hooks)


# What every backward pass begins in; what it calls in Python lies above that on the stack.
ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__


def gradients_of(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the sum of outputs, unseen by what is around ``autograd.grad``."""
    ones = tuple(map(torch.ones_like, outputs))
    run: Any = torch.autograd.graph._engine_run_backward
    found: tuple[torch.Tensor | None, ...] = run(
        tuple(outputs), ones, False, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


@contextmanager
def engine_in(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run the engine of every backward pass of the block in a context made for it."""
    owner: Any = torch.autograd
    original = owner._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    owner._engine_run_backward = run
    try:
        yield
    finally:
        owner._engine_run_backward = original


def saves_as_always() -> bool:
    """Say whether autograd in this thread saves tensors themselves, and takes hooks for them."""
    autograd: Any = torch._C._autograd
    has_hooks = autograd._top_saved_tensors_default_hooks(True) is not None
    return not has_hooks and bool(autograd._saved_tensors_hooks_is_enabled())


def saving_as_always() -> AbstractContextManager[object]:
    """Keep hooks around a block, such as those of a checkpoint, from what is saved in it."""

    def same(saved: torch.Tensor) -> torch.Tensor:
        return saved

    # torch.func knows no hooks.
    is_free = saves_as_always()
    return nullcontext() if is_free else torch.autograd.graph.saved_tensors_hooks(same, same)


# Where ``apply`` of every class of torch.autograd.Function ends up. Up to 2.13 that of the class
# calls that of its base, also if it was looked up before; later it is PyTorch's C++ itself.
_function: Any = torch.autograd.Function
_is_calling_base = isinstance(vars(_function)["apply"], classmethod)
FUNCTION_BASE: Any = torch.autograd.function._SingleLevelFunction if _is_calling_base else _function


def is_compiled_function(cls: type) -> bool:
    """Return whether a class of ``torch.autograd.Function`` was made by torch.compile."""
    return cls.__module__.startswith("torch._functorch")


def is_made_by_compiled_code(tensor: torch.Tensor) -> bool:
    """Return whether what torch.compile has made computed a tensor."""
    made_by = getattr(type(tensor.grad_fn), "_forward_cls", None)
    return made_by is not None and is_compiled_function(made_by)


def goes_backward(function: Any) -> bool:
    """Return whether a function is ``backward``, or ``grad`` of autograd."""
    names = {"torch._tensor": ("backward",), "torch.autograd": ("backward", "grad")}
    name = getattr(function, "__name__", None)
    return name in names.get(getattr(function, "__module__", None) or "", ())


# (tensor): whether it is a view of another tensor.
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 where inference mode has made it, for none."""
    return 0 if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor count as written to so many times, for what autograd has saved of it."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


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
