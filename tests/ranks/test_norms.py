"""Norms and clipping are global: parts are added up, copies are counted once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.ranks import cases
from tests.ranks.pool import Pool
from torch import Tensor, distributed, nn

import halfstep

KINDS = ("fsdp2", "tensor_parallel", "ddp", "hybrid", "both")


def spread(kind: str) -> tuple[nn.Module, nn.Module]:
    """Return a model on two ranks, and the same one on this rank alone."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    plain = cases.model()
    if kind == "tensor_parallel":
        torch.manual_seed(0)
        plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        return cases.tensor_parallel(), plain
    if kind == "hybrid":  # copies on two ranks, each whole
        mesh = distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard"))
        return fully_shard(cases.model(), mesh=mesh), plain
    if kind == "both":  # one part lies on both dimensions, the other on one of them
        mesh = distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        module, plain = (nn.Sequential(*cases.model(), nn.Tanh()) for _ in range(2))
        rowwise = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(module, mesh["tensor"], {"2": rowwise})
        fully_shard(module, mesh=mesh["data"])
        return module, plain
    return getattr(cases, kind)(), plain


def whole(grad: Any) -> Tensor:
    full: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return full


def norms_and_gradients(rank: int, kind: str) -> Any:
    found = []
    for module in spread(kind):
        optimizer = cases.sgd(module)
        is_alone = bool(found)
        books = halfstep.GradScaler(
            init_scale=64.0, module=module, process_group="local" if is_alone else None
        )
        cases.backward(books, module, cases.batch(0))
        books.step(optimizer, max_norm=0.05)
        grads = [whole(param.grad) for param in module.parameters()]
        found.append((books.outcome(optimizer).norm, grads))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_is_that_of_one_rank(pool: Pool, kind: str) -> None:
    for (norm, grads), (expected, expected_grads) in pool.run(norms_and_gradients, kind):
        assert norm == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-8)


def test_norms_of_stages_are_added_up(pool: Pool) -> None:
    assert pool.run(norms_of_stages) == [pytest.approx([5.0, 7.0])] * 2


def norms_of_stages(rank: int) -> list[float]:
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    books = halfstep.GradScaler(process_group=cases.world(), init_scale=4.0)

    books.scale(param.sum() * (4.0 if rank else 3.0) / math.sqrt(2.0)).backward()
    books.step(optimizer, max_norm=math.inf)
    disabled = halfstep.GradScaler(process_group=cases.world(), enabled=False)
    param.grad = torch.tensor([3.0, 0.0] if rank else [0.0, 2.0])
    disabled.step(optimizer, max_norm=math.sqrt(13.0) / 7.0)
    return [books.outcome(optimizer).norm, (3.0 if rank else 2.0) / float(param.grad.norm())]


def test_copies_that_are_averaged_by_hand(pool: Pool) -> None:
    for norm, expected in pool.run(averaged_by_hand):
        assert norm == pytest.approx(expected, rel=1e-6)


def averaged_by_hand(rank: int) -> tuple[float, float]:
    module = cases.model()
    optimizer = cases.sgd(module)
    books = halfstep.GradScaler(process_group=cases.world())
    books.replicated(module.parameters(), cases.world())
    cases.backward(books, module, cases.batch(rank))
    for param in module.parameters():
        distributed.all_reduce(param.grad)
    books.step(optimizer, max_norm=math.inf)
    module = cases.model()
    for other in range(2):
        module(cases.batch(other)).square().mean().backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in module.parameters()])
    return books.outcome(optimizer).norm, norm.item()


def test_a_norm_that_was_not_measured_is_not_that_of_one_rank(pool: Pool) -> None:
    for kind, message in pool.run(unmeasured):
        assert kind == "CallOrderError"
        assert "spread over several ranks" in message


def unmeasured(rank: int) -> Any:
    module = cases.fsdp2()
    optimizer = cases.sgd(module)
    books = halfstep.GradScaler()
    cases.backward(books, module, cases.batch(rank))
    books.unscale_(optimizer)
    books.step(optimizer)
    books.update()
    return cases.raised(lambda: books.outcome(optimizer).norm)
