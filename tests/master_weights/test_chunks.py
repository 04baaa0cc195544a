"""Steps with a few parameters at a time against steps with all of them."""

import copy
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor, nn

from halfstep import master_weights
from halfstep._master_weights import chunks
from halfstep._master_weights.chunks import chunks_of

BF16 = torch.bfloat16


def params_of(*sizes: int, device: str = DEVICE) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=BF16, device=device)) for size in sizes]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = torch.randn_like(param)


# --- which parameters -----------------------------------------------------------------------------


def test_chunks_of_limited_size_in_turn(many: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CACHED", 400)
    params, optimizer, sizes = many
    optimizer.add_param_group({"params": params[20:]})
    master_weights(optimizer)
    give_gradients(params, 0)
    optimizer.step()
    assert sizes == [400] * 20  # each time for both groups
    assert all((param != 1.0).any() for param in params)
    assert [len(group["params"]) for group in optimizer.param_groups] == [20, 20]


def test_a_closure_is_called_once_before_the_first_chunk(
    many: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CACHED", 500)
    params, optimizer, sizes = many
    master_weights(optimizer)
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append([*sizes, {param.dtype for param in params}])
        give_gradients(params, 0)
        return 3.0

    with torch.no_grad():
        assert optimizer.step(closure) == optimizer.step(closure=closure) == 3.0
    assert sizes == [500] * 8
    assert calls == [[{BF16}], [*[500] * 4, {BF16}]]


def test_a_small_model_is_one_chunk(many: Any) -> None:
    params, optimizer, sizes = many
    master_weights(optimizer)
    give_gradients(params, 0)
    optimizer.step()
    assert sizes == [2000]


@pytest.mark.parametrize(("device", "expected"), [(DEVICE, [3, 1]), ("meta", [8, 2])])
def test_a_chunk_fits_the_cache_of_a_cpu_and_is_a_tenth_elsewhere(
    device: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CACHED", 30)
    params = params_of(*[10] * 82, device=device)
    give_gradients(params, 0)
    params[0].grad = None
    found = [len(chunk) for (chunk,) in chunks_of([params])]
    assert sum(found) == 81
    assert [found[0], found[-1]] == [expected[0], 81 % expected[0] or expected[0]]


# --- optimizers that are not PyTorch's ------------------------------------------------------------


class Counts(torch.optim.Optimizer):
    """Counts steps in its groups, as an attribute and in its state; each changes the step."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1, "number": torch.tensor(0.0)})
        self.num_steps = 0
        self.sizes: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        self.state["all"] = self.state.get("all", 0) + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["number"] = (
                group["number"].clone() if group["k"] == 1 else group["number"].add_(1)
            )
            counts = group["k"] + group["number"].item() + self.num_steps + self.state["all"]
            rate = group["lr"] / counts
            self.sizes.append(len(group["params"]))
            for param in group["params"]:
                before = self.state[param].get("before", 0.0)
                param.add_(param.grad + before, alpha=-rate)
                self.state[param]["before"] = param.grad  # keeps a hold of it


class Norm(Counts):
    """Divides all gradients by their norm and leaves that in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norms = [param.grad.norm() for param in group["params"]]
            group["norm"] = self.left(torch.stack(norms).norm())
            for param in group["params"]:
                param.sub_(param.grad / group["norm"])

    def left(self, norm: Tensor) -> Any:
        return norm.item()


class NormOfTensors(Norm):
    def left(self, norm: Tensor) -> Any:
        return norm.reshape(1)


def test_an_optimizer_that_counts_steps_in_chunks_as_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CACHED", 10)
    trained = []
    for chunked in (False, True):
        params = params_of(7, 5, 8, 3)
        optimizer = master_weights(Counts(params[:2]), chunked=chunked)
        optimizer.add_param_group({"params": params[2:]})
        for seed in range(4):
            give_gradients(params, seed)
            optimizer.step()
        assert optimizer.num_steps == optimizer.state["all"] == 4
        assert [group["k"] for group in optimizer.param_groups] == [4, 4]
        trained.append([value for p in params for value in (p, *optimizer.state[p].values())])
    assert optimizer.sizes[-8:] == [1, 0, 1, 0, 0, 1, 0, 1]
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("kind", [Norm, NormOfTensors])
def test_an_optimizer_that_computes_with_all_parameters_is_refused(
    kind: type[Norm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CACHED", 10)
    params = params_of(7, 5, 8)
    optimizer = master_weights(kind(params), chunked=True)
    for each in (copy.deepcopy(optimizer), optimizer):
        give_gradients(each.param_groups[0]["params"], 0)
        with pytest.raises(ValueError, match=r"another param_groups\[0\]\['norm'\] for each"):
            each.step()
    assert optimizer.param_groups[0]["params"] == params
    assert all(param.dtype is BF16 for param in params)


def test_without_the_promise_all_parameters_are_stepped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CACHED", 10)
    params = params_of(7, 5, 8)
    optimizer = master_weights(Counts(params))
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.sizes == [3]
