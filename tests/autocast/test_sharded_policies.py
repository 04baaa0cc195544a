"""docs/distributed.md on policies and FSDP2's MixedPrecisionPolicy, on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.sharding import WIDTH, Context, Model, data_of, lower
from tests.device import DEVICE
from tests.ranks.pool import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def as_they_are(module: Any) -> None:
    sharded(module)


def sharded(module: Any, **options: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(**options)
    for block in module.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)


def in_bfloat16(module: Any) -> None:
    sharded(module, param_dtype=torch.bfloat16)


def as_documented(module: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (block,) = [each for each in blocks if "def shard" in each]
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    namespace["shard"](module)


def by_ops(module: Any) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    sharded(module, param_dtype=bf16, reduce_dtype=fp32, cast_forward_inputs=False)


WAYS: dict[str, tuple[Callable[[Any], None], Context]] = {
    "autocast": (as_they_are, lower),
    "`param_dtype=torch.bfloat16`": (in_bfloat16, nullcontext),
    "both": (in_bfloat16, lower),
    "both, `reduce_dtype=torch.float32`, `cast_forward_inputs=False`": (by_ops, lower),
    "the same, and norms by themselves": (as_documented, lower),
}


class Gathers(TorchDispatchMode):
    """Notes the bytes that each gather gives a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.c10d._allgather_base_.default:
            self.sizes.append(args[0].numel() * args[0].element_size())
        return op(*args, **(kwargs or {}))


def one_step(rank: int, way: str) -> dict[str, Any]:
    """Return what a step has computed, what it has gathered, and in which dtypes ops ran."""
    shard, context = WAYS[way]
    module: Any = Model()
    with torch.no_grad():  # which rounding changes
        for norm in (each for each in module.modules() if isinstance(each, nn.LayerNorm)):
            norm.weight.copy_(torch.linspace(0.9, 1.1, norm.weight.numel()))
    shard(module)
    x, target = data_of(0)[rank]
    with Gathers() as gathers, halfstep.trace(module) as trace:
        with context():
            logits = module(x)
        loss = F.cross_entropy(logits.float(), target)
        loss.backward()
    grads = {name: param.grad.full_tensor() for name, param in module.named_parameters()}
    dtypes = {row.op: row.compute for row in trace.ops}
    return {
        "values": {"loss": loss.detach(), **grads},
        "gathers": gathers.sizes,
        "norm": dtypes["native_layer_norm"],
        "linear": dtypes["addmm"],
    }


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(one["values"].values(), other["values"].values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def steps(pool: Pool) -> dict[str, dict[str, Any]]:
    return {way: pool.run(one_step, way)[0] for way in WAYS}


def test_the_table_of_the_page(steps: dict[str, dict[str, Any]]) -> None:
    """Last column: the loss and all gradients are those of the first row, bit for bit."""
    table = "\n".join(
        f"| {way} | {sum(step['gathers']):,} in {len(step['gathers'])} | {step['linear']} | "
        f"{step['norm']} | {'yes' if is_same(step, steps['autocast']) else 'no'} |"
        for way, step in steps.items()
    )
    assert table in PAGE.read_text(encoding="utf-8"), table


def test_a_rule_reads_weights_that_were_rounded(pool: Pool) -> None:
    """The op of the rule runs in float32; an island in its place raises."""
    exact, rounded = (pool.run(norm_under_a_rule, way)[0] for way in ("autocast", "both"))
    assert exact[0] == rounded[0] == "float32"
    assert torch.equal(rounded[1], exact[1].bfloat16().float())
    assert not torch.equal(rounded[1], exact[1])


def norm_under_a_rule(rank: int, way: str) -> tuple[str, Tensor]:
    """Return the dtype in which the norm ran, and the weight that it read."""
    shard, _ = WAYS[way]
    module: Any = Model()
    with torch.no_grad():
        module.blocks[0].norm.weight.copy_(torch.linspace(0.9, 1.1, WIDTH))
    shard(module)
    read: list[Tensor] = []
    norm = module.blocks[0].norm
    norm.register_forward_hook(lambda *_: read.append(norm.weight.detach().float().clone()))
    with (
        halfstep.trace(module) as trace,
        halfstep.autocast(DEVICE, policy="standard; layer_norm:fp32"),
    ):
        module(data_of(0)[0][0])
    dtypes = {row.op: row.compute for row in trace.ops}
    return dtypes["native_layer_norm"], read[0]
