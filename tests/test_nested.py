"""Walks over nested values."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from halfstep._common.nested import map_leaves, map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


class Outputs(UserDict[str, Any]):
    """A mapping with an attribute, as of transformers."""

    note = ""


def twice(value: Any) -> Any:
    return map_tensors(lambda tensor: 2 * tensor, value)


def test_tensors_are_found_in_containers() -> None:
    value = [ONE, "text", (TWO, {"a": ONE}), Pair(3, TWO), Outputs(b=[ONE])]
    assert [int(tensor) for tensor in tensors_in(value)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    "value",
    [
        [ONE, "text"],
        (ONE, [TWO, None]),
        Pair(ONE, 1),
        torch.max(torch.ones(2, 2), dim=0),
        {"a": ONE},
        OrderedDict(b=ONE, a=TWO),
        Outputs(a=(ONE,)),
    ],
)
def test_containers_keep_their_class(value: Any) -> None:
    found = twice(value)
    assert type(found) is type(value)
    before, after = tensors_in([value]), tensors_in([found])
    assert all(torch.equal(2 * old, new) for old, new in zip(before, after, strict=True))


def test_what_a_class_adds_is_kept() -> None:
    outputs = Outputs(a=ONE)
    outputs.note = "kept"
    assert twice(outputs).note == "kept"
    assert (outputs["a"], twice(outputs)["a"]) == (ONE, TWO)
    lists = twice(defaultdict(list, a=ONE))
    assert (lists["a"], lists["b"]) == (TWO, [])


class Shared(MutableMapping[str, Any]):
    """A mapping whose copies share their items."""

    def __init__(self, **items: Any) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


@pytest.mark.parametrize("mapping", [Shared(a=ONE), MappingProxyType({"a": ONE})])
def test_other_mappings_are_left_alone(mapping: Any) -> None:
    assert twice([mapping])[0] is mapping
    assert mapping["a"] is ONE


def test_a_named_tuple_that_takes_other_arguments() -> None:
    class One(Pair):
        def __new__(cls, first: Any) -> "One":
            return super().__new__(cls, first, first)

    found = twice(One(ONE))
    assert (type(found), found.second) == (One, TWO)


def test_a_container_without_a_change_is_returned_itself() -> None:
    inner = ("text", {"a": 1})
    value = [ONE, inner]
    assert map_tensors(lambda tensor: tensor, value) is value
    assert twice(value)[1] is inner


def test_a_function_of_anything_sees_all_that_is_no_container() -> None:
    seen: list[Any] = []
    map_leaves(lambda item: seen.append(item) or item, [1, "text", {"key": (None,)}])
    assert seen == [1, "text", None]
