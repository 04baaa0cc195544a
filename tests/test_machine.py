"""Which of several processes this is."""

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from halfstep._common.machine import num_ranks, rank


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "0"}, (0, 1)),
        ({"RANK": "first", "WORLD_SIZE": "x"}, (0, 1)),
    ],
)
def test_what_is_no_number_of_a_launcher_is_left_out(environ, expected) -> None:
    assert (rank(environ), num_ranks(environ)) == expected


def test_without_a_launcher_the_process_group_knows() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        assert (rank({}), num_ranks({})) == (2, 3)
        assert (rank({"RANK": "1"}), num_ranks({"WORLD_SIZE": "4"})) == (1, 4)
    finally:
        torch.distributed.destroy_process_group()
