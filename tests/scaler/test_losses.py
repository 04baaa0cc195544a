"""Scaling of losses in any container."""

from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch

from halfstep._scaler import GradScaler

Pair = namedtuple("Pair", ["a", "b"])


@pytest.fixture
def scaler() -> GradScaler:
    return GradScaler(init_scale=4.0)


def one() -> torch.Tensor:
    return torch.tensor(1.0)


def test_a_tensor(scaler: GradScaler) -> None:
    loss = torch.tensor(3.0, requires_grad=True)
    scaled = scaler.scale(loss)
    assert scaled.item() == 12.0
    scaled.backward()
    assert loss.grad.item() == 4.0


def test_nested_containers_keep_their_types(scaler: GradScaler) -> None:
    outputs = [one(), (one(), [one()]), {"a": one(), "b": (one(),)}, Pair(one(), [one()])]
    assert scaler.scale(outputs) == [4.0, (4.0, [4.0]), {"a": 4.0, "b": (4.0,)}, Pair(4.0, [4.0])]
    assert isinstance(scaler.scale(outputs)[3], Pair)
    assert outputs[0] == 1.0


@pytest.mark.parametrize("outputs", [[], (), {}])
def test_nothing_to_scale(scaler: GradScaler, outputs: object) -> None:
    assert scaler.scale(outputs) == outputs


def test_mappings(scaler: GradScaler) -> None:
    default = defaultdict(list, a=one())
    scaled = scaler.scale(default)
    assert scaled == {"a": 4.0}
    assert scaled["new"] == []
    assert default == {"a": 1.0}
    assert isinstance(scaler.scale(OrderedDict(a=one())), OrderedDict)
    assert scaler.scale(MappingProxyType({"a": one()})) == {"a": 4.0}


def test_other_iterables_become_lists(scaler: GradScaler) -> None:
    scaled = scaler.scale(one() for _ in range(2))
    assert scaled == [4.0, 4.0]
    assert scaler.scale({"a": one()}.values()) == [4.0]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize(
    ("dtype", "scaled_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes(shape: tuple[int, ...], dtype: torch.dtype, scaled_dtype: torch.dtype) -> None:
    scaled = GradScaler().scale(torch.ones(shape, dtype=dtype))
    assert scaled.dtype == scaled_dtype
    assert torch.equal(scaled, torch.full(shape, 65536.0, dtype=scaled_dtype))


def test_bfloat16_keeps_torch_promotion() -> None:
    assert GradScaler().scale(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (1.0, r"outputs is 1.0 \(float\): scale\(\) takes a tensor"),
        ("loss", r"outputs is 'loss' \(str\)"),
        ([one(), None], r"outputs\[1\] is None \(NoneType\)"),
        ({"a": [one(), {"b": 3}]}, r"outputs\['a'\]\[1\]\['b'\] is 3 \(int\)"),
        (["x" * 100], r"outputs\[0\] is str: "),
    ],
)
def test_anything_else_is_refused_by_place(scaler: GradScaler, outputs: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        scaler.scale(outputs)
    assert scaler.scale(one()) == 4.0
