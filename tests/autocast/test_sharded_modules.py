"""What halfstep says of modules holds where two ranks share a model: rules, islands, traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.sharding import SHARDED, Model, data_of, dtypes_of_outputs, lower
from tests.device import DEVICE
from tests.ranks.pool import Pool
from torch import nn

import halfstep
from halfstep import autocast, keep

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32


# --- islands and rules for modules ----------------------------------------------------------------

RULES = "standard; @head:fp32; linear@blocks.1.up:fp32; gelu@blocks.0:fp32"


def with_rules(rank: int, way: str) -> Any:
    sharded = SHARDED[way](Model())
    return dtypes_of_outputs(sharded, lambda: autocast(DEVICE, BF16, policy=RULES, module=sharded))


def with_islands(rank: int, way: str, when: str) -> Any:
    plain = Model()
    if when == "before":
        keep(plain, "*.norm", "blocks.1", "head")
    sharded = SHARDED[way](plain)
    if when == "after":
        keep(sharded, "*.norm", "blocks.1", "head")
    return dtypes_of_outputs(sharded, lower)


def without_prefixes(dtypes: dict[str, str]) -> dict[str, str]:
    return {
        name.replace("_checkpoint_wrapped_module.", "").removeprefix("module."): dtype
        for name, dtype in dtypes.items()
        if not name.endswith("_checkpoint_wrapped_module") and name != "module"
    }


@pytest.mark.parametrize("way", ["resharded", "kept gathered", "checkpointed", "ddp"])
def test_rules_for_modules_hold(way: str, pool: Pool) -> None:
    plain = Model()
    expected, out = dtypes_of_outputs(
        plain, lambda: autocast(DEVICE, BF16, policy=RULES, module=plain)
    )
    assert [expected[name] for name in ("blocks.0.up", "blocks.1.up", "head")] == [
        "torch.bfloat16",
        "torch.float32",
        "torch.float32",
    ]
    for dtypes, result in pool.run(with_rules, way):
        assert without_prefixes(dtypes) == expected
        assert torch.equal(result, out)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["resharded", "checkpointed", "ddp"])
def test_islands_hold(way: str, when: str, pool: Pool) -> None:
    plain = Model()
    keep(plain, "*.norm", "blocks.1", "head")
    expected, out = dtypes_of_outputs(plain, lower)
    assert expected["blocks.0.up"] == "torch.bfloat16"
    assert expected["blocks.1.up"] == "torch.float32"
    for dtypes, result in pool.run(with_islands, way, when):
        assert without_prefixes(dtypes) == expected
        assert torch.equal(result, out)


def island_in_lower_precision(rank: int, pattern: str) -> str:
    sharded = SHARDED["lower precision"](Model())
    keep(sharded, pattern)
    with lower(), pytest.raises(ValueError, match="is an island") as raised:
        sharded(data_of(0)[0][0])
    return str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "named"), [("head", "Linear"), ("blocks.1", "FSDPBlock"), ("*.norm", "LayerNorm")]
)
def test_an_island_that_is_gathered_in_lower_precision_is_told(pattern, named, pool):
    for message in pool.run(island_in_lower_precision, pattern):
        assert message.startswith(
            f"{named} is an island in torch.float32, but runs with parameters in torch.bfloat16"
        )
        assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)" in message


def island_sharded_by_itself(rank: int) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain = Model()
    fully_shard(plain.head, mp_policy=MixedPrecisionPolicy(param_dtype=FP32))
    sharded = SHARDED["lower precision"](plain)
    keep(sharded, "head")
    told = dtypes_of_outputs(sharded, lower)
    x, target = data_of(0)[0]
    with lower():
        F.cross_entropy(sharded(x), target).backward()
    return told


def test_the_cure_for_such_an_island_works(pool: Pool) -> None:
    for dtypes, _ in pool.run(island_sharded_by_itself):
        assert dtypes["head"] == "torch.float32"
        assert dtypes["blocks.1.up"] == "torch.bfloat16"


# --- traces ---------------------------------------------------------------------------------------


def traced(rank: int, way: str) -> list[tuple[str, ...]]:
    return rows_of(SHARDED[way](Model()))


def rows_of(model: nn.Module) -> list[tuple[str, ...]]:
    x, target = data_of(0)[0]
    with halfstep.trace(model) as trace:
        with lower():
            loss = F.cross_entropy(model(x).float(), target)
        loss.backward()
    ours = ("native_layer_norm", "addmm", "gelu", "mm", "gelu_backward")
    told = ("phase", "module", "op", "compute", "rule")
    return sorted(
        tuple(str(getattr(row, key)).removeprefix("module.") for key in told)
        for row in trace.ops
        if row.op in ours
    )


@pytest.mark.parametrize("way", ["resharded", "kept gathered", "ddp"])
def test_a_trace_names_modules_and_rules_as_of_one_rank(way: str, pool: Pool) -> None:
    expected = rows_of(Model())
    assert ("forward", "blocks.1.up", "addmm", "bfloat16", "linear:lower") in expected
    for rows in pool.run(traced, way):
        assert rows == expected
