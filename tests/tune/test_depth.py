import torch

from halfstep._tune.depth import Depths


def test_the_longest_way_counts() -> None:
    x = torch.ones(2, requires_grad=True)
    short, long = x * 2, ((x * 2) * 3).exp()
    depths = Depths()
    assert [depths.of(t) for t in (x, short, long, short + long, short)] == [0, 1, 3, 4, 1]
    assert depths.of(torch.ones(2)) == 0


def test_thousands_of_ops_in_a_row() -> None:
    y = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        y = y + 1
    assert Depths().of(y) == 5000
