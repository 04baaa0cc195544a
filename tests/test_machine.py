"""Which of several processes this is."""

import pytest

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
