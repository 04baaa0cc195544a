"""Autograd: nodes, backward passes, saved tensors and recomputation."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint

# (function): calls it at the end of the running backward pass, unless that raises. A backward pass
# inside another one, as in reentrant checkpointing, counts as a part of it.
after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def leaves_of(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from ``roots`` accumulates into, each once.

    Leaves that a node reaches only through its own backward pass, as in the reentrant variant of
    ``torch.utils.checkpoint``, are missing. Takes about a microsecond per graph node. Sync: none.
    """
    return [node.variable for node in _nodes(roots) if type(node).__name__ == "AccumulateGrad"]


_PRODUCT = re.compile(
    r"(Add|B|Baddb|Addb|Grouped|SparseAdd|Sspadd)?[Mm]mBackward|(Add)?MvBackward|V?[Dd]otBackward|"
    r"(Mkldnn)?LinearBackward|TrilinearBackward|\w*(Conv|Attention|Rnn|LstmMps)\w*Backward"
)
"""The nodes of matrix products, convolutions, attention and recurrent layers."""


def products_of(roots: Iterable[torch.Tensor]) -> Counter[torch.dtype | bool]:
    """Return how many products have computed ``roots``, by the dtypes of their results.

    True and False count what may hide others: compiled functions, and each
    ``torch.autograd.Function`` unless its ``has_products`` is False; False those of the latter
    whose results are wider than two bytes. Takes about a microsecond per graph node. Sync: none.
    """
    found: Counter[torch.dtype | bool] = Counter()
    for node in _nodes(roots):
        function = getattr(type(node), "_forward_cls", None)
        if _PRODUCT.match(type(node).__name__):
            found[node._input_metadata[0].dtype] += 1
        elif function is not None and getattr(function, "has_products", True):
            may_lower = is_compiled_function(function) or _is_short(node._input_metadata)
            if may_lower or not function.__module__.startswith("torch."):  # such as a checkpoint
                found[may_lower] += 1
    return found


def _is_short(results: Sequence[Any]) -> bool:
    return any(each.dtype is not None and each.dtype.itemsize <= 2 for each in results)


def _nodes(roots: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph above ``roots``, each once."""
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


# Autograd nodes have sequence numbers, in the order of their creation in a thread.

# (): the sequence number of this thread's next node.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# (): the id of the backward pass running in this thread, -1 for none.
backward_number: Callable[[], int] = torch._C._current_graph_task_id

# (): the node running backward in this thread, None for none.
running_node: Callable[[], Any] = torch._C._current_autograd_node


def sequence_number(node: Any) -> int:
    """Return the sequence number of a node."""
    return int(node._sequence_nr())


def accumulated_into() -> torch.Tensor | None:
    """Return the tensor whose ``grad`` is being accumulated in this thread, None for none."""
    node: Any = torch._C._current_autograd_node()
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def has_hooks_after_accumulation(leaf: torch.Tensor) -> bool:
    """Return whether a leaf has hooks that run after accumulation and may remove its gradient."""
    return bool(leaf._post_accumulate_grad_hooks)


# The function in which every backward pass starts; Python code called by it is above on the stack.
ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__


def frames() -> Iterator[FrameType]:
    """Yield the frames of the caller, innermost first.

    A backward pass on a device runs in a thread of autograd. There the frames of the thread that
    called it follow, if only one thread waits for a pass.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(2):
        while frame is not None:
            yield frame
            frame = frame.f_back
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return  # Python started this thread, not autograd
        waiting = [each for each in sys._current_frames().values() if each.f_code is ENGINE_CODE]
        frame = waiting[0] if len(waiting) == 1 else None


def is_in_nested_backward() -> bool:
    """Return whether the pass running in this thread was begun inside of another one."""
    return sum(frame.f_code is ENGINE_CODE for frame in frames()) > 1


@contextmanager
def engine_in(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run every backward pass in the block inside a new ``context()``."""
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
    """Return whether autograd in this thread saves tensors directly, and allows hooks for them."""
    autograd: Any = torch._C._autograd
    has_hooks = autograd._top_saved_tensors_default_hooks(True) is not None
    return not has_hooks and bool(autograd._saved_tensors_hooks_is_enabled())


def saving_as_always() -> AbstractContextManager[object]:
    """Disable surrounding hooks on saved tensors, such as those of a checkpoint, in a block."""

    def same(saved: torch.Tensor) -> torch.Tensor:
        return saved

    # torch.func does not support these hooks.
    is_free = saves_as_always()
    return nullcontext() if is_free else torch.autograd.graph.saved_tensors_hooks(same, same)


# The class that implements ``apply`` for every torch.autograd.Function. Up to 2.13 the class method
# calls its base's, even if looked up earlier; later versions have PyTorch's C++ method itself.
_function: Any = torch.autograd.Function
_is_calling_base = isinstance(vars(_function)["apply"], classmethod)
FUNCTION_BASE: Any = torch.autograd.function._SingleLevelFunction if _is_calling_base else _function


def is_compiled_function(cls: type) -> bool:
    """Return whether a subclass of ``torch.autograd.Function`` was created by torch.compile."""
    return cls.__module__.startswith("torch._functorch")


def is_made_by_compiled_code(tensor: torch.Tensor) -> bool:
    """Return whether compiled code computed a tensor."""
    made_by = getattr(type(tensor.grad_fn), "_forward_cls", None)
    return made_by is not None and is_compiled_function(made_by)


def goes_backward(function: Any) -> bool:
    """Return whether a function is ``backward``, or ``grad`` of autograd."""
    names = {"torch._tensor": ("backward",), "torch.autograd": ("backward", "grad")}
    name = getattr(function, "__name__", None)
    return name in names.get(getattr(function, "__module__", None) or "", ())


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor, which autograd compares for saved tensors."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@cache
def wrap_recomputed(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make torch.utils.checkpoint store ``wrap(function)`` instead of each function to recompute.

    Done once, permanently. ``wrap`` is called in the forward pass; its result in both passes.
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


def saved_by(node: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a node has for its backward pass, by the names of its formula."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    found = {}
    for name in names:
        with suppress(RuntimeError):  # released by a backward pass
            found[name.removeprefix("_saved_")] = getattr(node, name)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def factor_of(root: Any) -> float:
    """Return the number that a loss was last multiplied by; 1 if it was not. Sync: one."""
    node: Any = getattr(root, "grad_fn", None)
    while type(node).__name__ == "DivBackward0":
        node = node.next_functions[0][0]
    saved = [*saved_by(node).values()] if type(node).__name__ == "MulBackward0" else []
    return float(*saved) if [each.numel() for each in saved] == [1] else 1.0


def without_grad_mode(function: Any) -> Any:
    """Return the function that ``torch.no_grad`` and such, as decorators, have wrapped."""
    code = getattr(function, "__code__", None)
    is_wrapper = code is not None and code.co_filename == torch.utils._contextlib.__file__
    return function.__wrapped__ if is_wrapper else function


def function_without_autocast(context: object) -> type | None:
    """Return the user's ``autograd.Function`` of a ``ctx``; None if ``custom_fwd`` marked it."""
    function: type | None = getattr(type(context), "_forward_cls", None)
    is_marked = function is None or hasattr(context, "_fwd_used_autocast")
    return None if is_marked or _is_ours(function.__module__) else function


def functions_of(roots: Iterable[torch.Tensor]) -> list[type]:
    """Return the user's subclasses of ``torch.autograd.Function`` in a graph."""
    found = (getattr(type(node), "_forward_cls", None) for node in _nodes(roots))
    return [cls for cls in found if cls is not None and not _is_ours(cls.__module__)]


def hooks_of(owner: torch.Tensor | torch.nn.Module) -> list[Any]:
    """Return the user's hooks on the gradients of a parameter, or on those at a module."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    found = (hook for name in names for hook in (getattr(owner, name, None) or {}).values())
    return [hook for hook in found if not _is_ours(_module_of(hook))]


def _module_of(hook: Any) -> str:
    hook = getattr(hook, "func", hook)  # of a partial
    return getattr(hook, "__module__", None) or type(hook).__module__


def _is_ours(module: str) -> bool:
    return module.startswith(("torch.", "halfstep."))
