"""What is not inspected is never called finite: transforms, wrappers, sparse tensors, objects."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap
from torch.masked import masked_tensor

import halfstep

Step = Callable[[bool], object]


class Plain:
    """An object of the user's own."""

    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


@dataclass
class Out:
    """What a model of transformers returns looks like this."""

    loss: object


class Wrapper(Tensor):
    """A tensor that has another one and no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*args, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, Tensor) else result


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
EMBEDDING = nn.Embedding(10, 4, sparse=True)
X, Y = torch.randn(8, 4), torch.randn(8, 1)


def spoilt(x: Tensor, is_bad: bool) -> Tensor:
    return (x * 0).log() if is_bad else x


def loss_of(params: dict[str, Tensor], is_bad: bool, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return F.mse_loss(spoilt(functional_call(MODEL, params, (x,)), is_bad), y)


def params() -> dict[str, Tensor]:
    return {name: param.detach() for name, param in MODEL.named_parameters()}


def set_grads(gradients: dict[str, Tensor]) -> None:
    for name, param in MODEL.named_parameters():
        param.grad = gradients[name]


def grad_and_value_set(is_bad: bool) -> None:
    set_grads(grad_and_value(lambda p: loss_of(p, is_bad))(params())[0])


def grad_returned(is_bad: bool) -> object:
    return grad(lambda p: loss_of(p, is_bad))(params())


def grad_kept_to_itself(is_bad: bool) -> None:
    gradients = grad(lambda p: loss_of(p, is_bad))(params())
    _ = [value - gradients[name] for name, value in params().items()]


def vmap_of_grad(is_bad: bool) -> None:
    def one(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(p, is_bad, x[None], y[None])

    gradients = vmap(grad(one), (None, 0, 0))(params(), X, Y)
    set_grads({name: value.mean(0) for name, value in gradients.items()})


def vmap_of_forward(is_bad: bool) -> None:
    vmap(lambda x: spoilt(MODEL(x), is_bad))(X).sum().backward()


def vjp_set(is_bad: bool) -> None:
    value, pull = vjp(lambda p: loss_of(p, is_bad), params())
    set_grads(pull(torch.ones_like(value))[0])


def jacrev_backward(is_bad: bool) -> None:
    jacrev(lambda x: spoilt(MODEL(x), is_bad))(X[0]).square().sum().backward()


def jvp_returned(is_bad: bool) -> object:
    return jvp(lambda x: spoilt(MODEL(x), is_bad), (X,), (X,))


def grad_set_by_hand(is_bad: bool) -> None:
    for param in MODEL.parameters():
        param.grad = spoilt(torch.randn_like(param), is_bad)


def grad_changed_after_backward(is_bad: bool) -> None:
    MODEL(X).sum().backward()
    for param in MODEL.parameters():
        param.grad = spoilt(param.grad.abs() + 1, is_bad)


def sparse_gradient(is_bad: bool) -> None:
    rows = EMBEDDING(torch.tensor([1, 2, 1]))
    MODEL(spoilt(rows, is_bad)).sum().backward()


def sparse_result(is_bad: bool) -> object:
    return spoilt(torch.eye(4).to_sparse().to_dense() + 1, is_bad).to_sparse()


def nested_backward(is_bad: bool) -> None:
    nested = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
    spoilt(MODEL(nested), is_bad).values().sum().backward()


def nested_result(is_bad: bool) -> object:
    nested = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
    return spoilt(MODEL(nested), is_bad)


def in_cond(is_bad: bool) -> object:
    return torch.cond(X.sum() > -1e9, lambda x: spoilt(x, is_bad), lambda x: x * 2, (X,))


def hook_that_takes_the_gradient(is_bad: bool) -> None:
    handles = [
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        for param in MODEL.parameters()
    ]
    output = MODEL(X)
    output.register_hook(lambda gradient: spoilt(gradient, is_bad))
    output.sum().backward()
    for handle in handles:
        handle.remove()


SEEN: tuple[Step, ...] = (
    grad_and_value_set,
    grad_returned,
    grad_kept_to_itself,
    vmap_of_grad,
    vmap_of_forward,
    vjp_set,
    jacrev_backward,
    jvp_returned,
    grad_set_by_hand,
    grad_changed_after_backward,
    sparse_gradient,
    sparse_result,
    nested_backward,
    nested_result,
    in_cond,
    hook_that_takes_the_gradient,
    lambda is_bad: Plain([{"a": Out(Slotted(loss_of(params(), is_bad)))}]),
    lambda is_bad: {loss_of(params(), is_bad)},
    lambda is_bad: loss_of(params(), is_bad).item(),
    lambda is_bad: loss_of(params(), is_bad).detach().numpy(),
)


@pytest.mark.parametrize("step", SEEN)
def test_bad_values_are_found_and_good_ones_are_not(step: Step) -> None:
    MODEL.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes of PyTorch
        good = halfstep.diagnose(lambda: step(False), model=MODEL)
        bad = halfstep.diagnose(lambda: step(True), model=MODEL)
    assert good.verdict == "none", str(good)
    assert str(good).startswith("the step is finite: every loss, and every gradient")
    assert bad.verdict == "maths", str(bad)
    assert bad.bad is not None
    assert "log" in (bad.bad.op, bad.bad.forward_op) or bad.bad.op == "div"
    assert all(param.grad is None for param in MODEL.parameters())


@pytest.mark.parametrize(
    "made", [Wrapper, lambda x: masked_tensor(x, X > 0)], ids=["wrapper", "masked tensor"]
)
def test_a_tensor_that_cannot_be_looked_into_is_not_called_finite(made: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = halfstep.diagnose(lambda: made(X) * 2)
        bad = halfstep.diagnose(lambda: (made(X) * 0).log())
    assert good.verdict == "none"  # every op that it came from was seen
    assert bad.verdict == "unknown"
    assert bad.bad.op == "log"
    assert any(note.startswith("not seen: a result of class") for note in bad.notes)


def test_a_tensor_without_values_is_not_called_finite() -> None:
    found = halfstep.diagnose(lambda: torch.ones(2, device="meta") * 2)
    assert found.verdict == "unknown"
    assert "a result of class Tensor on meta" in found.notes[0]


def test_a_step_without_an_end_says_so() -> None:
    found = halfstep.diagnose(lambda: print(end=str(MODEL(X).shape[:0])[:0]))
    assert str(found).startswith("the step is finite: every op\n")
    assert any("called no backward and returned no tensor" in note for note in found.notes)


def test_what_another_thread_has_computed_is_not_called_data() -> None:
    def step() -> Tensor:
        made: list[Tensor] = []
        thread = threading.Thread(target=lambda: made.append((X * 0).log()))
        thread.start()
        thread.join()
        return made[0]

    found = halfstep.diagnose(step)
    assert (found.verdict, found.bad) == ("unknown", None)
    assert "no op that was seen made the inf or NaN" in found.notes[0]


def test_a_gradient_that_was_bad_before_is_found_if_the_step_leaves_it() -> None:
    unused = nn.Linear(2, 2)
    unused.weight.grad = torch.full((2, 2), math.nan)
    both = nn.ModuleList([MODEL, unused])

    def step() -> None:
        MODEL(X).sum().backward()

    found = halfstep.diagnose(step, model=both)
    assert found.verdict == "data"
    assert found.tensor == "1.weight.grad"
    assert "zero_grad()" in found.cure.text


def test_sparse_gradients_are_as_before() -> None:
    EMBEDDING.zero_grad()
    sparse_gradient(False)
    before = EMBEDDING.weight.grad
    values, indices = before._values().clone(), before._indices().clone()
    assert halfstep.diagnose(lambda: sparse_gradient(True), model=MODEL).verdict == "maths"
    assert EMBEDDING.weight.grad is before
    assert torch.equal(before._values(), values)
    assert torch.equal(before._indices(), indices)
    assert not before.is_coalesced()
    EMBEDDING.zero_grad()
    MODEL.zero_grad()


def test_numbers_that_are_made_a_tensor_again_have_their_origin() -> None:
    def step() -> None:
        returns = torch.ones(1)
        returns = returns / (returns - returns.mean())  # 1 / 0
        returns = returns - returns
        target = torch.tensor([returns[0]])
        (MODEL(X[:1])[0] - target).square().sum().backward()

    found = halfstep.diagnose(step)
    assert (found.verdict, found.bad.op) == ("maths", "div")


def test_a_number_that_is_not_finite_is_data_and_one_that_was_read_has_its_origin() -> None:
    net, x = nn.Linear(4, 1), torch.randn(3, 4)
    for number in ("nan", "inf", "-inf"):
        found = halfstep.diagnose(lambda: (net(x).mean() * float(number)).backward())  # noqa: B023
        assert (found.verdict, found.tensor) == ("data", f"the number {number}")
        assert found.bad.op == "mul"
        assert f"data: `mul` in the forward pass is given the number {number}" in str(found)
        assert found.cure.text == f"look where the number {number} comes from"

    def step() -> None:
        weight = (x - x).sum() / (x - x).sum()
        (net(x).mean() * weight.item()).backward()

    found = halfstep.diagnose(step)
    assert (found.verdict, found.bad.op) == ("maths", "div")


@pytest.mark.parametrize("is_bad", [False, True])
def test_what_is_made_of_the_gradients_of_a_function_is_an_end(is_bad: bool) -> None:
    params = {name: param.detach() for name, param in MODEL.named_parameters()}

    def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(MODEL, params, (x,)).square().mean() * (0 if is_bad else 1)

    def step() -> object:
        gradients = vmap(grad(loss_of), (None, 0))(params, X)
        return {
            name: g.flatten(1) / g.flatten(1).norm(dim=1, keepdim=True)
            for name, g in gradients.items()
        }

    found = halfstep.diagnose(step)
    assert found.verdict == ("maths" if is_bad else "none")
    assert not is_bad or (found.bad is not None and found.bad.op == "div")


def test_a_module_whose_name_another_model_has_too_is_named_with_its_class() -> None:
    model, other = (
        nn.Sequential(nn.Linear(4, 1)),
        type("Other", (nn.Sequential,), {})(nn.Linear(4, 4)),
    )
    nn.init.ones_(model[0].weight)
    scaler = halfstep.GradScaler(enabled=False)
    with halfstep.diagnose(scaler, model=model, tell=lambda *_: None) as watch:
        other(X)
        model(torch.full((2, 4), 3e38)).sum().backward()
    assert "of `Sequential.0` in the forward pass" in str(watch.found[0])
