"""Steps with a few parameters at a time against steps with all of them."""

from typing import Any

import pytest
import torch
from tests.device import DEVICE
from torch import nn

from halfstep import master_weights
from halfstep._master_weights import exchange
from halfstep._master_weights.exchange import chunks_of

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
    monkeypatch.setattr(exchange, "CACHED", 400)
    params, optimizer, sizes = many
    optimizer.add_param_group({"params": params[20:]})
    master_weights(optimizer)
    give_gradients(params, 0)
    optimizer.step()
    assert sizes == [400] * 20  # each time for both groups
    assert all((param != 1.0).any() for param in params)
    assert [len(group["params"]) for group in optimizer.param_groups] == [20, 20]


def test_a_closure_is_called_once_before_the_first_chunk(many, monkeypatch):
    monkeypatch.setattr(exchange, "CACHED", 500)
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
def test_a_chunk_fits_the_cache_of_a_cpu_and_is_a_tenth_elsewhere(device, expected, monkeypatch):
    monkeypatch.setattr(exchange, "CACHED", 30)
    params = params_of(*[10] * 82, device=device)
    give_gradients(params, 0)
    params[0].grad = None
    found = [len(chunk) for (chunk,) in chunks_of([params])]
    assert sum(found) == 81
    assert [found[0], found[-1]] == [expected[0], 81 % expected[0] or expected[0]]


# --- optimizers that are not PyTorch's ------------------------------------------------------------


class Counts(torch.optim.Optimizer):
    """Counts its parameters at each step, and divides their gradients by their common norm."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.sizes: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.sizes.append(len(group["params"]))
            norm = torch.stack([param.grad.norm() for param in group["params"]]).norm()
            for param in group["params"]:
                param.sub_(param.grad / norm)


def test_an_optimizer_that_is_not_of_pytorch_steps_all_parameters_at_once(monkeypatch):
    monkeypatch.setattr(exchange, "CACHED", 10)
    params = params_of(7, 5, 8)
    optimizer = master_weights(Counts(params))
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.sizes == [3]
