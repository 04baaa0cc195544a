"""Steps with master weights against the same steps of a float32 copy, made by hand."""

import copy
import gc
import io
import pickle
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device import DEVICE
from tests.training import assert_same, step_on
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

import halfstep
from halfstep import lost_updates, master_weights
from halfstep._master_weights import exchange
from halfstep._master_weights import master_weights as module
from halfstep._master_weights.exchange import Split, _flat, new_memory
from halfstep._pytorch import distributed
from halfstep.errors import CallOrderError

BF16, FP16 = torch.bfloat16, torch.float16

Make = Callable[[list[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Signs": lambda p: Signs(p, lr=1e-3),
}


class Signs(torch.optim.Optimizer):
    """An optimizer that PyTorch does not know, with one state for all of its parameters."""

    def __init__(self, params: list[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.total = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.total += sum(grad.abs().sum().item() for grad in grads if grad is not None)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    assert param.dtype is param.grad.dtype is torch.float32
                    param.add_(
                        param.grad.sign() * (1 + 1e-3 / (1 + self.total)), alpha=-group["lr"]
                    )
        return loss


def parameters(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    """Return parameters of many shapes and strides, some of them float32."""
    torch.manual_seed(0)
    values = [
        torch.randn(7, 5),
        torch.randn(2, 3, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(()),
        torch.randn(300),
        torch.randn(8, 8)[::2, ::2],  # with gaps in memory
    ]
    lower = [nn.Parameter(value.to(dtype)) for value in values]
    lower.append(nn.Parameter(torch.empty(10, 4, dtype=dtype)[:, :2].normal_()))
    return [*lower, nn.Parameter(torch.randn(5))]


def rounded(weight: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    """Return a weight in the lower precision, as the default store rounds it."""
    if dtype is FP16:
        return weight.half()
    upper = (weight.contiguous().view(torch.int32) + 0x8000) >> 16
    return upper.to(torch.int16).view(BF16)


class ByHand:
    """A float32 copy of parameters, which is stepped, and rounded to them."""

    def __init__(self, params: list[nn.Parameter], make: Make, groups: int = 1) -> None:
        self.params = params
        self.weights = [nn.Parameter(param.detach().float()) for param in params]
        self.optimizer = make(in_groups(self.weights, groups))

    def step(self) -> None:
        for param, weight in zip(self.params, self.weights, strict=True):
            weight.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        self.round()

    def round(self) -> None:
        for param, weight in zip(self.params, self.weights, strict=True):
            value = weight.detach()
            param.data.copy_(value if param.dtype is torch.float32 else rounded(value, param.dtype))


def in_groups(params: list[Any], groups: int) -> list[Any]:
    if groups == 1:
        return params
    return [{"params": params[i::groups], "lr": 1e-3 * (i + 1)} for i in range(groups)]


def give_gradients(params: list[nn.Parameter], seed: int, share: float = 0.8) -> None:
    torch.manual_seed(seed)
    for param in params:
        has_one = torch.rand(()) < share
        grad = (torch.randn_like(param) * 0.1).to(param.grad_dtype)
        param.grad = grad if has_one else None


@pytest.mark.parametrize(
    ("name", "store", "groups"),
    [
        (name, store, (1, 3)[(number + place) % 2])
        for number, name in enumerate(OPTIMIZERS)
        for place, store in enumerate(("split", "float32"))
    ],
)
def test_a_step_is_that_of_float32_weights(name: str, store: Any, groups: int) -> None:
    make, dtype = OPTIMIZERS[name], BF16 if store == "split" else FP16
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = make(in_groups(ours, groups))
    assert master_weights(optimizer, store) is optimizer
    by_hand = ByHand(theirs, make, groups)
    before = [(param.data_ptr(), param.shape, param.stride(), param.dtype) for param in ours]
    for seed in range(8):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        grads = [param.grad for param in ours]
        optimizer.step()
        by_hand.step()
        assert_same(ours, theirs)
        assert [id(param.grad) for param in ours] == list(map(id, grads))
    assert [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in ours] == before
    for param, weight in zip(ours, by_hand.weights, strict=True):
        state, reference = optimizer.state[param], by_hand.optimizer.state[weight]
        assert state.keys() - {"master_remainder", "master_weight"} == reference.keys()
        for key, value in reference.items():
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["SGD momentum", "AdamW", "AdamW fused", "Adafactor", "Signs"]),
    st.lists(st.sampled_from(["step", "skip", "save", "load model first", "write"]), max_size=8),
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_any_course_of_a_training(name: str, course: list[str], groups: int, seed: int) -> None:
    """Save and load at any step, gradients that are missing, writes to parameters."""
    make = OPTIMIZERS[name]
    ours, theirs = parameters(), parameters()
    optimizer = master_weights(make(in_groups(ours, groups)))
    by_hand = ByHand(theirs, make, groups)
    for number, event in enumerate(["step", *course, "step"]):
        if event in ("save", "load model first"):
            file = io.BytesIO()
            torch.save(
                {"params": [p.detach() for p in ours], "state": optimizer.state_dict()}, file
            )
            saved = torch.load(io.BytesIO(file.getvalue()))
            total = getattr(optimizer, "total", 0.0)
            ours = parameters()
            optimizer = master_weights(make(in_groups(ours, groups)))
            if event == "save":
                optimizer.load_state_dict(saved["state"])
            for param, value in zip(ours, saved["params"], strict=True):
                param.data.copy_(value)
            if event != "save":
                optimizer.load_state_dict(saved["state"])
            if isinstance(optimizer, Signs):
                optimizer.total = total
        elif event == "write":  # where the weights are what they round to
            for param, weight in zip(theirs, by_hand.weights, strict=True):
                weight.data.copy_(param)
            for state in optimizer.state.values():
                state.pop("master_remainder", None)
        else:
            share = 0.0 if event == "skip" else 0.7
            give_gradients(ours, seed + number, share)
            give_gradients(theirs, seed + number, share)
            optimizer.step()
            by_hand.step()
    assert_same(ours, theirs)


def linear(dtype: torch.dtype = BF16) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(16, 16, dtype=dtype)


def loss_at(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(4, 16, dtype=next(model.parameters()).dtype)
    loss: Tensor = model(x).float().square().mean()
    return loss


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None) -> None:
    """It evaluates a closure many times, with the parameters as the model has them."""

    def lbfgs(params: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn=search)

    ours, theirs = linear(), linear()
    optimizer = master_weights(lbfgs(list(ours.parameters())))
    by_hand = ByHand(list(theirs.parameters()), lbfgs)

    def closure() -> Tensor:
        assert ours.weight.dtype is BF16
        optimizer.zero_grad()
        loss = loss_at(ours, 0)
        loss.backward()
        return loss

    def closure_by_hand() -> Tensor:
        by_hand.round()
        theirs.zero_grad()
        loss = loss_at(theirs, 0)
        loss.backward()
        for param, weight in zip(by_hand.params, by_hand.weights, strict=True):
            weight.grad = param.grad.float()
        return loss

    for _ in range(3):
        found = optimizer.step(closure)
        expected = by_hand.optimizer.step(closure_by_hand)  # type: ignore[arg-type]
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
        by_hand.round()
        assert_same(ours.parameters(), by_hand.params)


def test_a_closure_that_is_given_by_name() -> None:
    model, seen = linear(), []
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.step(closure=lambda: seen.append(model.weight.dtype) or 1.0) == 1.0
    assert seen == [BF16]


class TwoSteps(torch.optim.SGD):
    """An optimizer that is stepped by two methods, to a neighbour and back."""

    @torch.no_grad()
    def first_step(self) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data = self.state[param]["old"]
        self.step()
        self.zero_grad(set_to_none=False)


def test_an_optimizer_that_goes_to_a_neighbour_and_back() -> None:
    def two_steps(params: list[Any]) -> TwoSteps:
        return TwoSteps(params, lr=1e-3)

    ours, theirs = linear(), linear()
    optimizer = master_weights(two_steps(list(ours.parameters())))
    by_hand = ByHand(list(theirs.parameters()), two_steps)
    for seed in range(10):
        for name in ("first_step", "second_step"):
            give_gradients(list(ours.parameters()), seed, share=1.0)
            give_gradients(by_hand.params, seed, share=1.0)
            for param, weight in zip(by_hand.params, by_hand.weights, strict=True):
                weight.grad = None if param.grad is None else param.grad.float()
            getattr(optimizer, name)()
            getattr(by_hand.optimizer, name)()
            by_hand.round()
            assert_same(ours.parameters(), by_hand.params)
    assert all(param.grad is not None and not param.grad.any() for param in ours.parameters())


class Averaged(torch.optim.SGD):
    """An optimizer whose parameters are an average while it is in eval mode."""

    @torch.no_grad()
    def eval(self) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["trained"] = param.clone()
            param.mul_(0.9)

    @torch.no_grad()
    def train(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.copy_(self.state[param].pop("trained"))


def test_an_optimizer_that_swaps_weights_and_their_average() -> None:
    params = [nn.Parameter(torch.randn(300).bfloat16())]
    optimizer = master_weights(Averaged(params, lr=1e-3))
    for seed in range(3):
        give_gradients(params, seed, share=1.0)
        optimizer.step()
    (exact,) = weights_of(optimizer, params)
    optimizer.eval()
    assert torch.equal(weights_of(optimizer, params)[0], exact * 0.9)
    assert torch.equal(params[0], rounded(exact * 0.9))
    optimizer.train()
    assert torch.equal(weights_of(optimizer, params)[0], exact)


# --- what else has the optimizer ------------------------------------------------------------------


def weights_of(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Return the float32 weights behind parameters, of the default store."""
    return [
        Split()
        .widen(_flat(param.detach()), _flat(optimizer.state[param]["master_remainder"]), new_memory)
        .view(param.shape)
        for param in params
    ]


def test_gradients_that_a_hook_sets_to_zero_are_zero() -> None:
    """Hooks of a step that somebody has replaced see the float32 gradients."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda opt, *_: opt.zero_grad(set_to_none=False))
    original = optimizer.step
    optimizer.step = lambda *args: original(*args)  # type: ignore[method-assign, assignment]
    master_weights(optimizer)
    step_on(optimizer, loss_at(model, 0))
    assert not model.weight.grad.any()


def test_hooks_of_a_step_are_called_once() -> None:
    params, seen = parameters(), []
    optimizer = master_weights(torch.optim.SGD(params, lr=0.1))
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", params[0].dtype)))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", params[0].dtype)))
    give_gradients(params, 0)
    optimizer.step()
    assert seen == [("before", BF16), ("after", BF16)]


def test_hooks_of_gradients_are_called_after_a_step() -> None:
    """DistributedDataParallel hears of a gradient by a hook of the node that adds it up."""
    param, seen = nn.Parameter(torch.ones(2, dtype=BF16)), []
    node = torch.autograd.graph.get_gradient_edge(param).node
    node.register_hook(lambda *_: seen.append("node"))
    param.register_hook(lambda _: seen.append("tensor"))
    param.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    optimizer = master_weights(torch.optim.SGD([param], lr=0.1))
    for _ in range(2):
        seen.clear()
        (param * 1.0).sum().backward()
        assert sorted(seen) == ["after", "node", "tensor"]
        optimizer.step()


def test_a_scaler_leaves_unscaled_gradients_of_a_fused_optimizer() -> None:
    model = linear()
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), fused=True))
    scaler = halfstep.GradScaler(DEVICE, init_scale=1024.0)
    loss_at(model, 0).backward()
    expected = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    optimizer.zero_grad()
    for _ in range(30):  # the first steps of an optimizer are measured
        optimizer.zero_grad()
        scaler.scale(loss_at(model, 0)).backward()
        last = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        scaler.step(optimizer)
        scaler.update()
    assert len(expected) == 2
    for param, scaled in zip(model.parameters(), last, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, scaled / 1024)


def test_compiled_models_and_contexts() -> None:
    """Casts of a weight are not served after the step that changed it."""
    model = linear(FP16)
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1.0), "float32")
    x = torch.randn(2, 16)
    with halfstep.autocast(DEVICE, BF16):
        first = model(x)
        step_on(optimizer, first.float().sum())
        second = model(x)
        assert not torch.equal(first, second)
        again = nn.functional.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
        assert torch.equal(second, again)


def test_a_graph_from_before_a_step_is_an_error() -> None:
    model = linear()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1.0))
    loss_at(model, 0).backward()
    loss = (model.weight.square()).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Squares(torch.optim.Optimizer):
    """An optimizer whose step multiplies matrices, which autocast lowers and keeps casts for."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param @ param.t(), alpha=1e-3)


def test_a_step_inside_of_autocast() -> None:
    ours, theirs = [nn.Parameter(torch.ones(8, 8, dtype=BF16)) for _ in range(2)]
    optimizer, by_hand = master_weights(Squares([ours])), ByHand([theirs], Squares)
    for _ in range(4):
        with torch.autocast(DEVICE, BF16):
            optimizer.step()
        with torch.autocast(DEVICE, BF16):
            by_hand.step()
        assert_same([ours], [theirs])


def test_a_step_in_inference_mode() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = master_weights(torch.optim.SGD(ours, lr=0.1, momentum=0.9))
    by_hand = ByHand(theirs, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for seed in range(4):
        give_gradients(ours, seed, share=1.0)
        give_gradients(theirs, seed, share=1.0)
        with torch.inference_mode(seed % 2 == 0):
            optimizer.step()
        by_hand.step()
        assert_same(ours, theirs)


def test_a_step_in_a_hook_of_the_backward_pass() -> None:
    ours, theirs = linear(), linear()
    by_hand = ByHand(list(theirs.parameters()), OPTIMIZERS["AdamW"])
    optimizers = {p: master_weights(OPTIMIZERS["AdamW"]([p])) for p in ours.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        param.grad = None

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    for seed in range(4):
        loss_at(ours, seed).backward()
        theirs.zero_grad()
        step_on(by_hand, loss_at(theirs, seed))
        assert_same(ours.parameters(), by_hand.params)


# --- gradients in float32 -------------------------------------------------------------------------


def test_gradients_of_many_parts_are_added_up_in_float32() -> None:
    sums = {}
    for gradients in (None, "float32"):
        param = nn.Parameter(torch.zeros(4, dtype=BF16))
        optimizer = torch.optim.SGD([param], lr=1.0)
        master_weights(optimizer, gradients=gradients)  # type: ignore[arg-type]
        for _ in range(1000):
            (param * 0.001).sum().backward()
        sums[gradients] = param.grad.float().mean().item()
        optimizer.step()
        assert param.dtype is BF16
        assert param.grad.dtype is (BF16 if gradients is None else torch.float32)
    part = torch.tensor(0.001).bfloat16().item()
    assert sums["float32"] == pytest.approx(1000 * part, rel=1e-5)
    assert abs(sums[None] - 1000 * part) > 0.1


def test_gradients_that_were_there_become_float32() -> None:
    param = nn.Parameter(torch.zeros(4, dtype=FP16))
    (param * 3.0).sum().backward()
    master_weights(torch.optim.SGD([param], lr=1.0), "float32")
    assert param.grad.dtype is torch.float32
    (param * 4.0).sum().backward()
    assert param.grad.tolist() == [7.0] * 4


# --- whatever is written to a parameter -----------------------------------------------------------

WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "load_state_dict": lambda m: m.load_state_dict(
        {k: v * 0 + 2 for k, v in m.state_dict().items()}
    ),
    "data": lambda m: [p.data.fill_(2.0) for p in m.parameters()],
    "new data": lambda m: [setattr(p, "data", torch.full_like(p, 2.0)) for p in m.parameters()],
    "no_grad": lambda m: [torch.no_grad()(p.fill_)(2.0) for p in m.parameters()],
    "zeros": lambda m: [p.data.zero_() for p in m.parameters()],
    "numbers": lambda m: [p.data.copy_(-(p.data * 64).round() / 64) for p in m.parameters()],
}


@pytest.mark.parametrize("store", ["split", "float32"])
@pytest.mark.parametrize("write", WRITES)
def test_the_next_step_goes_on_from_there(store: Any, write: str) -> None:
    model = linear()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.1), store)
    for seed in range(2):
        step_on(optimizer, loss_at(model, seed))
    WRITES[write](model)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    step_on(optimizer, loss_at(model, 2))
    assert_same(model.parameters(), before)


def test_tied_frozen_and_added_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False, dtype=BF16) for _ in range(3)))
    theirs = copy.deepcopy(model)
    for each in (model, theirs):
        each[1].weight = each[0].weight
        each[2].weight.requires_grad_(False)
    make = OPTIMIZERS["AdamW"]
    optimizer = master_weights(make([model[0].weight]))
    by_hand = ByHand([theirs[0].weight], make)
    for seed in range(6):
        if seed == 3:
            for each in (model, theirs):
                each[2].weight.requires_grad_(True)
            optimizer.add_param_group({"params": [model[2].weight]})
            by_hand.params.append(theirs[2].weight)
            by_hand.weights.append(nn.Parameter(theirs[2].weight.detach().float()))
            by_hand.optimizer.add_param_group({"params": [by_hand.weights[-1]]})
        for each in (model, theirs):
            each.zero_grad()
            loss_at(each, seed).backward()
        optimizer.step()
        by_hand.step()
        assert_same(model.parameters(), theirs.parameters())


def test_a_frozen_parameter_takes_no_memory() -> None:
    model = nn.Sequential(linear(), linear())
    model[0].requires_grad_(False)
    optimizer = master_weights(Elsewhere(model.parameters(), lr=1e-3))
    dtypes = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_at(model, 0)
        loss.backward()
        return loss

    def note(*_: Any) -> None:
        dtypes.append([param.dtype for param in model.parameters()])

    with patch.object(torch.optim.AdamW, "_init_group", side_effect=note, return_value=False):
        optimizer.step(closure)
    assert dtypes == [[BF16, BF16, torch.float32, torch.float32]]
    assert set(optimizer.state) == set(model[1].parameters())


def test_a_frozen_parameter_may_still_be_swapped_with_its_average() -> None:
    params = [nn.Parameter(torch.randn(300).bfloat16())]
    optimizer = master_weights(Averaged(params, lr=1e-3))
    give_gradients(params, 0, share=1.0)
    optimizer.step()
    (exact,) = weights_of(optimizer, params)
    params[0].requires_grad_(False).grad = None
    optimizer.eval()
    optimizer.train()
    assert torch.equal(weights_of(optimizer, params)[0], exact)


def test_a_parameter_of_a_new_shape_begins_anew() -> None:
    param = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = master_weights(torch.optim.SGD([param], lr=1e-3))
    (param * 1.0).sum().backward()
    optimizer.step()
    param.grad = None
    param.data = torch.ones(6, dtype=BF16)
    (param * 1.0).sum().backward()
    optimizer.step()
    assert optimizer.state[param]["master_remainder"].shape == (6,)


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_state_of_a_plain_optimizer_loads() -> None:
    plain = linear()
    before = torch.optim.AdamW(plain.parameters(), foreach=True)
    step_on(before, loss_at(plain, 0))
    model = copy.deepcopy(plain)
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), foreach=True))
    optimizer.load_state_dict(before.state_dict())
    state = optimizer.state[model.weight]
    assert state["exp_avg"].dtype is torch.float32
    assert torch.equal(state["exp_avg"], before.state[plain.weight]["exp_avg"].float())
    optimizer.zero_grad()
    step_on(optimizer, loss_at(model, 1))


def test_state_that_an_optimizer_has_already_becomes_float32() -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step_on(optimizer, loss_at(model, 0))
    master_weights(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.float32
    optimizer.step()


class Containers(torch.optim.Optimizer):
    """Has averages of gradients in a dictionary, a list, a tuple and a queue."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["all"] = {"list": [torch.zeros_like(param)]}
                    state["pair"] = (torch.zeros_like(param),)
                    state["queue"] = deque([torch.zeros_like(param)], maxlen=1)
                for average in (*state["all"]["list"], *state["pair"], *state["queue"]):
                    average.lerp_(param.grad, 0.1)
                    param.sub_(average, alpha=group["lr"])


class OwnLoading(torch.optim.AdamW):
    """Loads a state by itself, as PyTorch does, but without hooks: so does bitsandbytes."""

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self.state.clear()
        for id, state in copy.deepcopy(state_dict["state"]).items():
            param = params[id]
            self.state[param] = {
                key: value if key == "step" else value.to(param.dtype)
                for key, value in state.items()
            }


class LowMomentum(torch.optim.Optimizer):
    """Has a momentum in bfloat16, whatever its parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param, dtype=BF16))
                momentum.lerp_(param.grad.to(BF16), 0.1)
                param.sub_(momentum.float(), alpha=group["lr"])


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    (values, form), (others, expected) = map(tree_flatten, (one, other))
    assert form == expected
    for mine, theirs in zip(values, others, strict=True):
        if torch.is_tensor(mine):
            assert_same([mine], [theirs])
        else:
            assert mine == theirs


@pytest.mark.parametrize("gradients", [None, "float32"])
@pytest.mark.parametrize("store", ["split", "float32"])
@pytest.mark.parametrize(
    "name", ["NAdam", "ASGD", "LBFGS", "Containers", "OwnLoading", "LowMomentum"]
)
def test_all_of_a_state_is_loaded_as_it_was_saved(name: str, store: Any, gradients: Any) -> None:
    def go_on(model: nn.Linear, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_at(model, seed)  # noqa: B023
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)

    make = globals().get(name) or getattr(torch.optim, name)
    if name == "LBFGS":
        make = partial(make, max_iter=4)  # enough for several directions in its state
    options = {"strict": False} if name == "OwnLoading" else {}
    model = linear()
    optimizer = master_weights(make(model.parameters()), store, gradients)
    go_on(model, optimizer, range(2))
    later = copy.deepcopy(model)
    saved = copy.deepcopy(optimizer.state_dict())
    after = master_weights(make(later.parameters()), store, gradients)
    after.load_state_dict(saved, **options)
    assert_equal_states(after.state_dict(), saved)
    for key, value in after.state[later.weight].items():
        is_container = isinstance(value, dict | list | deque)
        assert not (is_container and value is saved["state"][0][key])  # it may be written to
    go_on(model, optimizer, range(2, 4))
    go_on(later, after, range(2, 4))
    assert_same(model.parameters(), later.parameters())


@pytest.mark.parametrize("saved", ["split", "float32"])
@pytest.mark.parametrize("loaded", ["split", "float32"])
def test_another_store_may_go_on(saved: Any, loaded: Any) -> None:
    model = linear()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1e-4), saved)
    for seed in range(3):
        step_on(optimizer, loss_at(model, seed))
    other = copy.deepcopy(model)
    after = master_weights(torch.optim.SGD(other.parameters(), lr=1e-4), loaded)
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((model, optimizer), (other, after)):
        each.zero_grad()
        step_on(stepped, loss_at(each, 9))
    torch.testing.assert_close(other.weight, model.weight, rtol=2**-7, atol=0)
    keys = {"split": "master_remainder", "float32": "master_weight"}
    assert set(after.state[other.weight]) == {keys[loaded]}


def test_state_is_loaded_while_a_model_is_float32() -> None:
    """What was kept would be cast to float32 then, where nothing can be made of it later."""
    model = linear()
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for dtype in (BF16, torch.float32, BF16):
        model.to(dtype)
        optimizer.zero_grad()
        step_on(optimizer, loss_at(model, 0))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[model.weight]["master_remainder"].dtype is torch.int16


def pickled(values: Any) -> Any:
    return pickle.loads(pickle.dumps(values))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("store", ["split", "float32"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, LowMomentum])
def test_a_copy_goes_on(kind: Any, store: Any, copied: Callable[[Any], Any]) -> None:
    """As the original does, which does not notice."""
    model = linear()
    optimizer = master_weights(kind(model.parameters()), store, "float32")
    step_on(optimizer, loss_at(model, 0))
    again, other = copied((model, optimizer))
    assert type(other) is kind
    for each, stepped in ((model, optimizer), (again, other)):
        for seed in (1, 2):
            stepped.zero_grad()
            loss_at(each, seed).backward()
            assert each.weight.grad.dtype is torch.float32
            stepped.step()
    assert_same(model.parameters(), again.parameters())
    assert optimizer.state_dict().keys() == other.state_dict().keys()
    kept = (each.state[param] for each, param in ((optimizer, model.weight), (other, again.weight)))
    for one, two in zip(*map(dict.values, kept), strict=True):
        assert torch.equal(one, two)
        assert one.dtype is two.dtype
    with pytest.raises(ValueError, match="has master weights already"):
        master_weights(other)


def test_a_state_that_was_loaded_too_early_is_refused() -> None:
    model = linear()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    step_on(optimizer, loss_at(model, 0))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    late.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"Call\s+master_weights\(\) first"):
        master_weights(late)


# --- memory ---------------------------------------------------------------------------------------


class Elsewhere(torch.optim.AdamW):
    """An optimizer of another library: it steps all parameters at once."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Elsewhere])
@pytest.mark.parametrize("store", ["split", "float32"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_small_and_large_parameters_together(kind, store, dtype, monkeypatch):
    """Those that are converted side by side step like those that are converted alone."""
    if store == "split" and dtype is FP16:
        pytest.skip("split serves bfloat16")
    weights = []
    for small in (0, 1 << 16):
        monkeypatch.setattr(exchange, "SMALL", small)
        torch.manual_seed(0)
        shapes = [(3, 5), (1,), (0,), (), (17,), (64, 33), (16,), (2, 3, 4)]
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        params.append(nn.Parameter(torch.randn(6, 4).to(dtype).t()))
        optimizer = master_weights(kind(params, lr=1e-3), store)
        for seed in range(4):
            give_gradients(params[seed:], seed, share=1.0)  # some have none
            optimizer.step()
            params[2 + seed].data.mul_(2.0)
        weights.append([param.detach().clone() for param in params])
        states = [optimizer.state[param] for param in params]
        weights[-1] += [state[key] for state in states for key in module.KEYS & state.keys()]
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Elsewhere])
def test_small_parameters_are_converted_at_once(kind: type[torch.optim.AdamW]) -> None:
    params = [nn.Parameter(torch.randn(4, 4).to(BF16)) for _ in range(100)]
    optimizer = master_weights(kind(params, lr=1e-3))
    give_gradients(params, 0, share=1.0)
    with patch.object(Split, "widen", autospec=True, side_effect=Split.widen) as widen:
        optimizer.step()
    assert widen.call_count == 2  # 64 and 36 of them


class ZeroesOne(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["params"][0].grad.zero_()


def test_a_gradient_that_is_written_to_is_written_back_alone() -> None:
    params = [nn.Parameter(torch.randn(4, 4).to(BF16)) for _ in range(3)]
    optimizer = master_weights(ZeroesOne(params, lr=0.1))
    give_gradients(params, 0, share=1.0)
    grads = [param.grad for param in params]
    before = [grad._version for grad in grads]
    optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert not grads[0].any()
    assert [grad._version for grad in grads] == [before[0] + 1, before[1], before[2]]


def test_all_are_float32_where_another_step_was_put(many: Any) -> None:
    params, optimizer, sizes = many
    original = optimizer.step
    optimizer.step = lambda *args: original(*args)
    master_weights(optimizer)
    give_gradients(params, 0, share=1.0)
    optimizer.step()
    assert sizes == [2000]


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_all_are_float32_where_another_step_is_that_of_the_class(many, is_wrapped, monkeypatch):
    monkeypatch.setattr(exchange, "CACHED", 1)
    params, optimizer, sizes = many
    original, calls = torch.optim.SGD.step, []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))

    def step(*args: Any) -> Any:
        calls.append("step")
        return (original if is_wrapped else original.__wrapped__)(*args)  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.optim.SGD, "step", wraps(original)(step) if is_wrapped else step)
    master_weights(optimizer)
    give_gradients(params, 0, share=1.0)
    optimizer.step()
    assert sizes == [2000]
    assert sorted(calls) == ["hook", "step"]


# --- what goes wrong ------------------------------------------------------------------------------


def test_groups_are_put_back_after_an_error(many: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CACHED", 1)  # each parameter is a chunk
    params, optimizer, _ = many
    master_weights(optimizer)
    give_gradients(params, 0, share=1.0)
    optimizer.param_groups[0]["lr"] = "wrong"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    assert all(param.dtype is BF16 for param in params)
    assert len(optimizer.param_groups[0]["params"]) == 20


def interrupt(call: Callable[[], Any], at: int) -> bool:
    """Return whether a call was interrupted, as by Ctrl-C, before so many instructions of ours."""
    folder = str(Path(module.__file__).parent)
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith((folder, distributed.__file__)):
            return None
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        if event == "opcode" and seen == at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chunks", "all", "closure"])
def test_an_interrupt_at_any_place(kind: str) -> None:
    at, step = 1, 41
    # Python 3.12 traces opcodes from the second time on.
    interrupt(lambda: module.with_masters(torch.optim.SGD(parameters())), 0)
    while True:
        params = parameters()[1:3] + parameters()[-3:]
        make = OPTIMIZERS["Signs" if kind == "all" else "SGD momentum"]
        optimizer = master_weights(make(in_groups(params, 2)))
        give_gradients(params, 0, share=1.0)
        optimizer.step()
        give_gradients(params, 1, share=1.0)
        before = [list(group["params"]) for group in optimizer.param_groups]
        found = [(p.dtype, p.data_ptr(), p.grad) for p in params]
        closure: Any = (lambda: 1.0) if kind == "closure" else None
        is_interrupted = interrupt(lambda opt=optimizer, c=closure: opt.step(c), at)
        assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
            list(map(id, group)) for group in before
        ]
        for param, (dtype, address, grad) in zip(params, found, strict=True):
            assert param.dtype is dtype
            assert param.data_ptr() == address
            assert param.grad is grad
            assert dtype is torch.float32 or "master_remainder" in optimizer.state[param]
        optimizer.step()
        if not is_interrupted:
            break
        at += step
    assert at > 10 * step


def wrong(dtype: torch.dtype, name: str = "", **kwargs: Any) -> None:
    params = [nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=dtype.is_floating_point)]
    given = [(name, params[0])] if name else params
    master_weights(torch.optim.SGD(given, lr=0.1), **kwargs)


def wrapped() -> torch.optim.Optimizer:
    return master_weights(torch.optim.SGD(linear().parameters(), lr=0.1))


class Wrapper(torch.optim.Optimizer):
    """As some libraries make it: it has the type, and what it wraps has the rest."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD(linear().parameters())
        self.param_groups = self.optimizer.param_groups


class Twin(torch.optim.Optimizer):
    """As Lightning makes it: it has all attributes of what it wraps."""

    def __init__(self) -> None:
        self._optimizer = torch.optim.SGD(linear().parameters())
        vars(self).update(vars(self._optimizer))


def sharded() -> torch.optim.Optimizer:
    optim = pytest.importorskip("torch.distributed.optim")
    made: torch.optim.Optimizer = optim.ZeroRedundancyOptimizer.__new__(
        optim.ZeroRedundancyOptimizer
    )
    made._optimizer_load_state_dict_pre_hooks = OrderedDict()
    return made


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wrong(torch.float32), ValueError, r"all its parameters are float32.*model\.to"),
        (lambda: wrong(FP16), ValueError, r"parameter 0 is float16\[3\].*store='float32'"),
        (lambda: wrong(FP16, "head.weight"), ValueError, r"parameter head\.weight is float16"),
        (lambda: master_weights(wrapped()), ValueError, "SGD has master weights already"),
        (lambda: wrong(torch.int32), ValueError, r"parameter 0 is int32\[3\]"),
        (lambda: wrong(BF16, store="both"), ValueError, "store='both': pass one of 'split', 'f"),
        (lambda: wrong(BF16, gradients="bf16"), ValueError, "gradients='bf16'"),
        (lambda: master_weights(nn.Linear(1, 1)), TypeError, "Linear"),  # type: ignore[type-var]
        (lambda: master_weights(Wrapper()), TypeError, "Pass the optimizer that it wraps"),
        (lambda: master_weights(Twin()), TypeError, "Pass the optimizer that it wraps"),
        (lambda: master_weights(sharded()), TypeError, "ZeroRedundancyOptimizer.*that it wraps"),
    ],
)
def test_wrong_use(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_step_that_was_kept_from_before_is_an_error() -> None:
    """So Accelerate keeps it, with a scaler: updates would be rounded away in silence."""
    params = [nn.Parameter(torch.ones(3, dtype=BF16))]
    optimizer = torch.optim.SGD(params, lr=0.5)
    kept = optimizer.step
    master_weights(optimizer)
    params[0].grad = torch.ones_like(params[0])
    for step in (kept, lambda: torch.optim.SGD.step(optimizer)):
        with pytest.raises(CallOrderError, match=r"call master_weights\(optimizer\) first"):
            step()
    assert torch.equal(params[0], torch.ones_like(params[0]))
    optimizer.step()
    assert torch.equal(params[0], torch.full_like(params[0], 0.5))


def test_a_model_that_became_float16_is_an_error() -> None:
    model = linear()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    model.half()
    loss_at(model, 0).backward()
    with pytest.raises(ValueError, match=r"parameter 0 is float16.*store='float32'"):
        optimizer.step()


def test_a_group_that_cannot_be_served_is_not_added() -> None:
    optimizer = master_weights(torch.optim.SGD(linear().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="parameter 0 is float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=FP16))]})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_share_their_memory_are_refused() -> None:
    """Each would have a weight of its own, and the last one to be written would win."""
    model = nn.Sequential(linear(), linear(), linear())
    model[1].weight = nn.Parameter(model[0].weight.data)
    message = r"\['params'\]\[0\] and .*\['params'\]\[2\] share their memory"
    with pytest.raises(ValueError, match=message):
        master_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = master_weights(torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(
        ValueError, match=r"share their memory.*decoder\.weight = embedding\.weight"
    ):
        optimizer.add_param_group({"params": [model[1].weight]})
    assert len(optimizer.param_groups) == 1


def test_parts_of_one_block_of_memory() -> None:
    block = torch.zeros(8, dtype=BF16)
    params = [nn.Parameter(block[:4]), nn.Parameter(block[4:]), nn.Parameter(block[4:4])]
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(block, -torch.ones(8, dtype=BF16))


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("store", ["split", "float32"])
def test_a_model_without_values_steps(store: Any, device: str) -> None:
    """Memory is estimated this way, before anything is computed."""
    with FakeTensorMode() if device == "fake" else torch.device(device):
        model = nn.Linear(16, 16, dtype=BF16)
        optimizer = master_weights(torch.optim.AdamW(model.parameters()), store)
        for _ in range(2):
            model(torch.ones(4, 16, dtype=BF16)).sum().backward()
            with lost_updates(optimizer) as lost:
                optimizer.step()
        assert lost.shares == {}
        assert model.weight.dtype is BF16
        state = optimizer.state[model.weight]
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32


@pytest.mark.parametrize("store", ["split", "float32"])
def test_tensors_are_where_the_parameters_are(store: Any) -> None:
    params = [nn.Parameter(torch.ones(40, dtype=BF16))]
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5), store)
    params[0].grad = torch.ones_like(params[0])
    with torch.device("meta"):  # a default device, which torch.set_default_device sets too
        optimizer.step()
    assert torch.equal(params[0], torch.full_like(params[0], 0.5))


def test_nothing_is_kept_alive() -> None:
    model = linear()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    step_on(optimizer, loss_at(model, 0))
    gone = weakref.ref(optimizer), weakref.ref(model)
    del optimizer, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert isinstance(module._MASTERS, weakref.WeakKeyDictionary)
    assert Split.key == "master_remainder"
