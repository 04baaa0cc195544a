"""The choice between PyTorch's kernels of products and halfstep's.

PyTorch's own kernels at the Autocast keys cast what a product needs, without Python. In halfstep's
contexts PyTorch's cache of casts is off, so they compute bit for bit what halfstep's compute: one
cast for each use of a weight, whose gradients are added in float32. Halfstep's do more in three
cases, for which the first contexts of each device and gradient mode are watched:

- a weight is used again in a context: its cast is kept, which saves time and memory;
- an argument is in float64, or sparse by other rules than PyTorch's: the product runs wider;
- a product contracts nothing, like that of a column and a row: lowering would only round it.

The kernels of products like the last two stay. The others leave the dispatcher, for plain
``torch.autocast`` too, if no cast was kept in :data:`NUM_WATCHED` contexts. They come back after an
error about dtypes, after a context that made another number of autograd nodes than those watched
(another model, a longer loop), and every :data:`NUM_UNWATCHED` contexts. The next contexts are
watched then, not that one itself.

The dispatcher reads its tables without a lock. So kernels come and go only while no thread is
inside a context of halfstep, nor recomputes what one contained.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch

from halfstep._pytorch import autograd, dispatch
from halfstep._pytorch.dispatch import Kernel, overload

NUM_WATCHED = 2  # contexts in a row without need after which halfstep's kernels leave

NUM_UNWATCHED = 500
"""Contexts after which some are watched again: registering 11 kernels takes some 0.3 ms."""

NUM_ALIKE = 16
"""Numbers of nodes after which only twice the largest counts as another one: they vary."""


class _Watch:
    """What is known of the contexts of one device in one gradient mode."""

    __slots__ = ("left", "needs_kernels", "nodes")

    def __init__(self) -> None:
        self.nodes: set[int] = set()  # the numbers of autograd nodes made in watched contexts
        # Contexts without need until needs_kernels changes, of all contexts if it is False.
        self.resume()

    def resume(self) -> None:
        self.needs_kernels, self.left = True, NUM_WATCHED


class Products:
    def __init__(self, device: str) -> None:
        self._key = dispatch.autocast_key(device)
        self._kernels: dict[str, Kernel] = {}
        self._permanent: set[str] = set()
        self.registered: dispatch.PythonKernels | None = dispatch.PythonKernels()
        """Halfstep's kernels; None while PyTorch's are in place."""
        self.watches: dict[bool, _Watch] = {}
        self.num_holds = 0
        """The number of reasons to leave halfstep's kernels in place."""
        self.pinned: set[str] = set()
        """The overloads whose kernels stay: PyTorch's could not do what a call needed."""
        self._lasting = dispatch.PythonKernels()

    def add(self, kernels: Mapping[str, Kernel], permanent: Set[str]) -> None:
        """Add kernels of halfstep, by overload, and the overloads that have theirs permanently.

        The latter are left alone from now on: kernels that report ops may be above theirs.
        """
        with _lock:
            self._permanent |= permanent
            both = {**self._kernels, **kernels}
            self._kernels = {op: both[op] for op in both if op not in self._permanent}
            if self.registered is not None:
                self._register(self.registered, self._kernels)

    def settle(self) -> None:
        """Register or remove halfstep's kernels, as needed; no thread may be in a context."""
        watches = self.watches.values()
        if self.num_holds or not watches or any(watch.needs_kernels for watch in watches):
            if self.registered is None:
                self.registered = dispatch.PythonKernels()
                self._register(self.registered, self._kernels)
        elif self.registered is not None:
            self._register(self._lasting, self.pinned)
            self.registered.remove()
            self.registered = None

    def _register(self, kernels: dispatch.PythonKernels, ops: Iterable[str]) -> None:
        for op in sorted(self._kernels.keys() & ops):
            kernels.register(overload(op), self._key, self._kernels[op])


products: dict[str, Products] = {}  # by device type


class _Thread(threading.local):
    def __init__(self) -> None:
        self.was_used = False  # whether a kernel of halfstep was of use in the running context
        # The running contexts by device: their watch, the number of the first autograd node, and
        # whether halfstep's kernels are registered.
        self.running: dict[str, tuple[_Watch, int, bool]] = {}


thread = _Thread()
_lock = threading.Lock()
_num_running = 0  # contexts, in all threads


def begin(device: str) -> None:
    """Begin the outermost context for a device in this thread."""
    global _num_running
    here, has_grad = products[device], torch.is_grad_enabled()
    watch = here.watches.get(has_grad)
    if not thread.running:
        thread.was_used = False
    with _lock:
        if watch is None:
            watch = here.watches[has_grad] = _Watch()
        if not watch.needs_kernels:
            watch.left -= 1
            if watch.left == 0:
                watch.resume()
        if here.registered is None and (watch.needs_kernels or here.num_holds) and not _num_running:
            here.settle()
        _num_running += 1
    has_kernels = here.registered is not None
    thread.running[device] = watch, autograd.next_sequence_number(), has_kernels


def end(device: str) -> None:
    """End the outermost context for a device in this thread."""
    global _num_running
    running = thread.running.pop(device, None)
    if running is None:  # it began inside of a use_policy that was left
        return
    watch, first_node, had_kernels = running
    num_nodes = autograd.next_sequence_number() - first_node
    here, was_used = products[device], thread.was_used
    with _lock:
        _num_running -= 1
        if was_used:
            watch.resume()
        elif not watch.needs_kernels:
            if num_nodes not in watch.nodes | {0} and (
                len(watch.nodes) < NUM_ALIKE or num_nodes > 2 * max(watch.nodes)
            ):
                watch.resume()
        elif had_kernels:
            watch.nodes.add(num_nodes)
            watch.left -= 1
            if watch.left == 0:
                watch.needs_kernels, watch.left = False, NUM_UNWATCHED
        if here.registered is not None and not watch.needs_kernels and not _num_running:
            here.settle()
    thread.was_used = False


@contextmanager
def recomputing() -> Iterator[None]:
    """Let no kernels come or go in a block."""
    global _num_running
    with _lock:
        _num_running += 1
    try:
        yield
    finally:
        with _lock:
            _num_running -= 1


def hold(device: str) -> None:
    """Have halfstep's kernels in all threads until :func:`release`."""
    with _lock:
        products[device].num_holds += 1
        products[device].settle()


def release(device: str) -> None:
    """Undo :func:`hold`; the next context that ends removes the kernels."""
    with _lock:
        products[device].num_holds -= 1


_ABOUT_DTYPES = re.compile("dtype|not implemented for|scalar type|[Dd]ouble")


def explain(error: RuntimeError, device: str) -> None:
    """Note the cure on an error that halfstep's kernels of products might not have raised."""
    here = products[device]
    if here.registered is None and not here.num_holds and _ABOUT_DTYPES.search(str(error)):
        with _lock:
            here.num_holds += 1
        error.add_note(_NOTE)


_NOTE = (
    "halfstep: no product so far had an argument in float64 or a sparse one, so PyTorch's kernels "
    "compute them. If this one has, run it again: from the next context on halfstep's kernels do, "
    "in float64 or float32. A rule for the op does so from the first context on: "
    'policy="standard; mm:fp32" (linear, matmul, ...)'
)
