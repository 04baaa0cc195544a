"""A watch is not seen by the loop: objects, modes and compiled functions of the user's own."""

from __future__ import annotations

import gc
import shutil
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.watch import call_log
from halfstep._tools.watch.watch import Watch


class Odd(dict[str, Tensor]):
    """Mapping that cannot be copied or looked through."""

    def values(self) -> Any:
        raise RuntimeError("not to be listed")

    def __copy__(self) -> Odd:
        raise RuntimeError("not to be copied")


class OddTuple(tuple[Tensor]):
    """Tuple that raises an error where a named tuple has its fields."""

    @property
    def _fields(self) -> Any:
        raise RuntimeError("no fields")


def _cyclic(tensor: Tensor) -> list[Any]:
    found: list[Any] = [tensor]
    found.append(found)
    return found


class Model(nn.Module):
    """Linear layer that takes and returns anything."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = nn.Linear(3, 3), make

    def forward(self, x: Tensor, _: Any = None) -> tuple[Tensor, Any]:
        return self.layer(x), self.make(x)


@pytest.mark.parametrize("make", [lambda x: Odd(x=x), lambda x: OddTuple((x,)), _cyclic])
def test_objects_that_cannot_be_looked_through(make: Callable[[Tensor], Any]) -> None:
    model = Model(make)
    gc.disable()  # a finalizer that runs at the end of a recursion would fail
    try:
        with Watch() as watch:
            x = torch.ones(2, 3).exp()
            y, other = model(x, make(x))
            model(y, other)[0].sum().backward()
    finally:
        gc.enable()
    assert model.layer.weight.grad is not None
    assert not watch.found


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _names_seen(*, is_outside: bool) -> list[str]:
    model, mode = nn.Linear(3, 3), _Names()

    def step() -> None:
        hidden = model(torch.ones(2, 3)).mul_(2)
        torch.nn.functional.mse_loss(hidden, torch.zeros(2, 3)).backward()

    with mode if is_outside else Watch(), Watch() if is_outside else mode:
        step()
    return mode.names


@pytest.mark.parametrize("is_outside", [False, True])
def test_modes_of_the_user_see_the_calls_of_the_loop_alone(is_outside: bool) -> None:
    model, mode = nn.Linear(3, 3), _Names()
    with mode:
        hidden = model(torch.ones(2, 3)).mul_(2)
        torch.nn.functional.mse_loss(hidden, torch.zeros(2, 3)).backward()
    seen = _names_seen(is_outside=is_outside)
    assert [name for name in seen if name in mode.names] == mode.names
    assert "is_inference" not in seen


def test_a_mode_that_begins_after_a_step_has_raised_an_error() -> None:
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("no step")

    model = nn.Linear(3, 3)
    optimizer = Failing(model.parameters(), lr=0.1)
    with Watch():
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match="no step"):
            optimizer.step()
        with torch.device("meta"):
            model(torch.ones(2, 3, device="cpu"))
        assert torch.ones(2).device.type == "cpu"
    assert not torch._C._len_torch_function_stack()


def test_buffers_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(3)
    with Watch() as watch, torch.inference_mode():
        model(torch.ones(2, 3))
    assert not watch.found


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile asks for it
@pytest.mark.parametrize("is_broken", [False, True])
def test_compiled_functions_are_compiled_as_often(is_broken: bool) -> None:
    def num_graphs(*, is_watched: bool) -> int:
        graphs = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph

        def loss(x: Tensor) -> Tensor:
            hidden = model(x).exp()
            if is_broken:
                torch._dynamo.graph_break()
            return F.mse_loss(hidden, x.sin())

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        compiled = torch.compile(loss, backend=backend, fullgraph=not is_broken, dynamic=False)
        torch._dynamo.reset()
        with Watch() if is_watched else torch.enable_grad():
            for size in (2, 2, 3):
                compiled(torch.ones(size, 3)).backward()
        torch._dynamo.reset()
        return len(graphs)

    assert num_graphs(is_watched=True) == num_graphs(is_watched=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile asks for it
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_compiled_function_is_told_what_shows_it(is_forced: bool) -> None:
    model, told = nn.Linear(3, 3), list[Diagnosis]()
    loss_of = torch.compile(lambda p: -torch.log(p).mean())
    torch._dynamo.reset()
    with (
        torch.compiler.set_stance("force_eager" if is_forced else "default"),
        Watch(tell=lambda found, step: told.append(found)),
    ):
        loss_of(model(torch.ones(2, 3)).relu() * 0).backward()
    torch._dynamo.reset()
    (found,) = told
    if is_forced:
        assert (found.verdict, found.bad and found.bad.op) == ("maths", "log")
    else:
        assert found.verdict == "unknown"
        assert any('set_stance("force_eager")' in note for note in found.notes)


@pytest.mark.parametrize(
    ("has_grad", "most"), [(False, call_log.MOST_EVALUATED), (True, call_log.MOST_MODELS)]
)
def test_an_evaluation_keeps_few_of_its_batches(has_grad: bool, most: int) -> None:
    def num_tensors() -> int:
        gc.collect()
        return sum(type(each) is Tensor for each in gc.get_objects())

    model, total = nn.Linear(3, 3), torch.zeros(())
    with Watch(), torch.set_grad_enabled(has_grad):
        before = num_tensors()
        for _ in range(5 * most):
            batch = torch.from_numpy(torch.ones(2, 3).numpy())
            total = total + model(batch).detach().sum()
        assert num_tensors() - before < 4 * most


def test_gradients_of_a_subclass_that_knows_few_functions() -> None:
    class Few(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__ in ("aminmax", "isfinite", "is_floating_point", "is_inference"):
                raise TypeError("not known")
            return super().__torch_function__(func, types, args, kwargs)

    model = nn.Linear(3, 3)
    with Watch() as watch:
        model(torch.ones(2, 3)).sum().as_subclass(Few).backward()
    assert model.weight.grad is not None
    assert not watch.found


def test_tensors_of_the_first_step_are_let_go() -> None:
    class Trainer:
        def train(self) -> None:
            first, second = nn.Linear(3, 3), nn.Linear(3, 1)
            hidden = first(torch.ones(2, 3))
            second(hidden).sum().backward()
            reference = weakref.ref(hidden)
            del hidden
            gc.collect()
            is_there.append(reference() is not None)

    is_there: list[bool] = []
    with Watch():
        Trainer().train()
    assert is_there == [False]


@pytest.mark.parametrize(("most", "is_held"), [(100, False), (2**28, True)])
def test_large_values_that_the_loop_has_written_are_let_go(most: int, is_held: bool, monkeypatch):
    monkeypatch.setattr(call_log, "MOST_COPIED", most)
    weight, value = nn.Parameter(torch.zeros(64)), torch.ones(64)
    reference = weakref.ref(value)
    with Watch(), torch.no_grad():
        weight.copy_(value)
        del value
        assert (reference() is not None) is is_held


def test_an_error_of_a_signal_handler_reaches_the_loop() -> None:
    def handler(*_: object) -> None:
        raise TimeoutError("too long")

    class Slow(dict[str, Tensor]):
        def values(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return super().values()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Watch(), pytest.raises(TimeoutError, match="too long"):
            Model(lambda x: x)(torch.ones(2, 3), Slow(x=torch.ones(1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
