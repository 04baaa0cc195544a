"""What lowering would spoil: positions, coordinates, and the state of a recurrent cell."""

from collections.abc import Callable

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor, nn

from halfstep._autocast import autocast
from halfstep._autocast.rule import HALVES

POSITIONS = torch.arange(2000.0)
FREQUENCIES = 10000 ** -torch.linspace(0, 1, 32)
ANGLES: dict[str, Callable[[], Tensor]] = {
    "einsum": lambda: torch.einsum("i,j->ij", POSITIONS, FREQUENCIES),
    "einsum, implicit": lambda: torch.einsum("i,j", POSITIONS, FREQUENCIES),
    "einsum, by row": lambda: torch.einsum("...i,...->...i", FREQUENCIES, POSITIONS[:, None])[:, 0],
    "einsum, sublists": lambda: torch.einsum(POSITIONS, [0], FREQUENCIES, [1], [0, 1]),
    "outer": lambda: torch.outer(POSITIONS, FREQUENCIES),
    "matmul": lambda: POSITIONS[:, None] @ FREQUENCIES[None],
    "bmm": lambda: torch.bmm(POSITIONS[None, :, None], FREQUENCIES[None, None])[0],
    "addr": lambda: torch.addr(torch.zeros(2000, 32), POSITIONS, FREQUENCIES),
}


@pytest.mark.parametrize("policy", ["standard", "torch-cuda"])
@pytest.mark.parametrize("name", ANGLES)
def test_rotary_positions_are_those_of_float32(name: str, policy: str) -> None:
    if (name, policy) == ("addr", "torch-cuda"):
        pytest.skip("PyTorch's list lowers addr")
    with autocast(DEVICE, torch.bfloat16, policy=policy):
        angles = ANGLES[name]()
    assert torch.allclose(angles, POSITIONS[:, None] * FREQUENCIES)


@pytest.mark.skipif(DEVICE != "cpu", reason="torch.autocast has no rules for this device")
def test_an_angle_at_position_60001_is_off_by_1_9_under_torch_autocast() -> None:
    position = torch.tensor([[60_001.0]])
    errors = []
    for context in (torch.autocast, autocast):
        with context(DEVICE, torch.bfloat16):
            errors.append((position @ torch.ones(1, 1)).float().cos() - position.cos())
    assert (errors[0].abs() > 1.9, errors[1]) == (True, 0)


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "i,i", "ij,jk", "...d,...d->...", "ij,ij->i"])
def test_an_einsum_that_contracts_is_a_product(equation: str) -> None:
    sizes = equation.partition("->")[0].split(",")
    operands = [torch.ones([3] * len(term.replace("...", "b"))) for term in sizes]
    with autocast(DEVICE, torch.bfloat16):
        assert torch.einsum(equation, *operands).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cell_counts_past_what_lower_precision_holds(dtype: torch.dtype) -> None:
    cell, steps = nn.LSTMCell(1, 1), 2500
    for param in cell.parameters():
        nn.init.zeros_(param)
    with torch.no_grad():
        cell.bias_ih.fill_(50.0)  # every gate is open, and the cell adds 1 a step
    state = torch.zeros(1, 1), torch.zeros(1, 1)
    with torch.no_grad(), autocast(DEVICE, dtype):
        for _ in range(steps):
            state = cell(torch.zeros(1, 1), state)
    assert state[1].dtype is torch.float32
    assert state[1] == steps


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_recurrent_layer_trains(bidirectional: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 8, num_layers=2, bidirectional=bidirectional)
    x = torch.randn(5, 3, 8)
    with autocast(DEVICE, dtype):
        lowered = model(x)[0]
    lowered.float().sum().backward()
    assert torch.allclose(lowered.float(), model(x)[0], atol=2e-2)
    assert all(
        param.grad is not None and param.grad.isfinite().all() for param in model.parameters()
    )
