"""Rules of a policy that hold in some modules only."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import Policy, autocast, keep

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Layer(nn.Module):
    """Notes the dtypes of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        linear = self.inner(x)
        softmax = F.softmax(linear, -1)
        self.seen = {"input": x.dtype, "linear": linear.dtype, "softmax": softmax.dtype}
        return softmax


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = Layer()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def layers(self) -> list[Layer]:
        return [module for module in self.modules() if isinstance(module, Layer)]


def softmaxes(model: Any) -> list[torch.dtype]:
    return [layer.seen["softmax"] for layer in model.layers()]


def softmax_dtypes(
    rules: str, model: Model | None = None, dtype: torch.dtype = BF16, **options: Any
) -> list[torch.dtype]:
    """Return the dtypes of the four softmaxes."""
    model = model or Model()
    with autocast(DEVICE, dtype, policy=f"standard; {rules}", module=model, **options):
        model(torch.ones(1, 4))
    return softmaxes(model)


# --- where a rule holds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("softmax@head:lower", [FP32, FP32, FP32, BF16]),
        ("softmax@blocks.1:lower", [FP32, BF16, FP32, FP32]),
        ("softmax@blocks.*:lower", [BF16, BF16, BF16, FP32]),
        ("softmax:lower; softmax@head:fp32", [BF16, BF16, BF16, FP32]),
        ("softmax@*:lower; softmax@blocks.?:fp32", [FP32, FP32, FP32, BF16]),
        ("softmax@head:lower; softmax:fp32", [FP32, FP32, FP32, FP32]),  # later rules win
        ("softmax@head[fp16]:lower", [FP32, FP32, FP32, FP32]),
        ("softmax@head[cpu,bf16]:lower", [FP32, FP32, FP32, BF16]),
    ],
)
def test_a_rule_holds_in_its_modules(rules: str, expected: list[torch.dtype]) -> None:
    assert softmax_dtypes(rules) == expected


def test_it_holds_in_submodules_and_not_after_them() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = Layer(), Layer()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            before = F.softmax(x, -1)
            x = self.body(x)
            return before, F.softmax(self.last(x).to(BF16), -1)

    model = nn.Sequential(Outer())
    x = torch.ones(1, 4, dtype=BF16)
    with autocast(DEVICE, BF16, policy="standard; softmax@0.body:lower", module=model):
        before, after = model(x)
    assert model[0].body.seen["softmax"] == BF16
    assert {before.dtype, after.dtype, model[0].last.seen["softmax"]} == {FP32}
    with autocast(DEVICE, BF16, policy="standard; softmax@0:lower", module=model):
        before, after = model(x)
    assert model[0].last.seen["softmax"] == before.dtype == after.dtype == BF16


def test_a_rule_for_a_module_inside_one_that_has_rules() -> None:
    model = Model()
    model.head.deep = Layer()
    model.head.register_forward_hook(lambda module, args, out: module.deep(out))
    text = "standard; softmax,exp@head:lower; softmax@head.deep:fp32"
    with autocast(DEVICE, BF16, policy=text, module=model):
        model(torch.ones(1, 4))
    assert model.head.seen["softmax"] == BF16
    assert model.head.deep.seen["softmax"] == FP32


def test_a_whole_module_is_an_island() -> None:
    model = Model()
    softmax_dtypes("@blocks.1:fp32; softmax:lower", model)
    assert model.blocks[0].seen == {"input": FP32, "linear": BF16, "softmax": BF16}
    assert model.blocks[1].seen == {"input": FP32, "linear": FP32, "softmax": FP32}
    assert model.blocks[2].seen == {"input": FP32, "linear": BF16, "softmax": BF16}


def test_a_later_rule_takes_a_module_off_the_island() -> None:
    model = Model()
    softmax_dtypes("@blocks.?:fp32; @blocks.1:leave", model)
    assert [layer.seen["linear"] for layer in model.layers()] == [FP32, BF16, FP32, BF16]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_island_for_one_dtype(dtype: torch.dtype) -> None:
    model = Model()
    softmax_dtypes("@head[fp16]:fp32", model, dtype)
    assert model.head.seen["linear"] == (FP32 if dtype == FP16 else BF16)


def test_gradients_flow_through() -> None:
    torch.manual_seed(0)
    model = Model()
    with autocast(
        DEVICE, BF16, policy="standard; @head:fp32; softmax@blocks.1:lower", module=model
    ):
        loss = model(torch.randn(2, 4)).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.parameters())


# --- where it does not ----------------------------------------------------------------------------


def test_outside_of_the_policy_modules_run_as_ever() -> None:
    model, x = Model(), torch.ones(1, 4)
    expected = model(x)
    softmax_dtypes("softmax@head:lower; @blocks.0:fp32", model)
    assert torch.equal(model(x), expected)
    assert softmaxes(model) == [FP32] * 4
    with autocast(DEVICE, BF16):
        model(x)
    assert model.blocks[0].seen["linear"] == BF16
    with torch.autocast(DEVICE, BF16):
        model(x)
    assert model.head.seen["softmax"] == BF16  # PyTorch's CPU list has no softmax


def test_autocast_that_the_model_switches_off_stays_off() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()

        def forward(self, x: Tensor) -> Tensor:
            with autocast(DEVICE, enabled=False):
                out: Tensor = self.inner(x)
            return out

    model = Off()
    with autocast(DEVICE, BF16, policy="standard; softmax@inner:lower", module=model):
        model(torch.ones(1, 4))
    assert model.inner.seen["linear"] == FP32


def test_a_context_inside_keeps_the_rules_and_another_policy_replaces_them() -> None:
    model = Model()
    with autocast(DEVICE, BF16, policy="standard; softmax@head:lower", module=model):
        with autocast(DEVICE, FP16):
            model(torch.ones(1, 4))
        assert softmaxes(model) == [FP32, FP32, FP32, FP16]
        with autocast(DEVICE, BF16, policy="standard"):
            model(torch.ones(1, 4))
        assert softmaxes(model) == [FP32] * 4


def test_an_exception_in_a_module_leaves_everything_as_it_was() -> None:
    model = Model()
    model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with autocast(
        DEVICE, BF16, policy="standard; @head:fp32; softmax@blocks.*:lower", module=model
    ):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 4))
        assert F.softmax(torch.ones(2, dtype=BF16), -1).dtype == FP32
        assert torch.is_autocast_enabled(DEVICE)


# --- copies, threads, compile ---------------------------------------------------------------------

MIXED = "softmax@blocks.1:lower; @head:fp32"
EXPECTED = [FP32, BF16, FP32, FP32]


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copies_know_their_names(copied: Callable[[Model], Model]) -> None:
    model = Model()
    softmax_dtypes(MIXED, model)
    other = copied(model)
    with autocast(DEVICE, BF16, policy=f"standard; {MIXED}", module=model):  # not other
        other(torch.ones(1, 4))
    assert softmaxes(other) == EXPECTED
    assert repr(other) == repr(model) == repr(Model())


def test_threads_have_policies_of_their_own() -> None:
    model, seen = Model(), {}

    def work(rules: str) -> None:
        own = copy.deepcopy(model)
        for _ in range(20):
            seen[rules] = softmax_dtypes(rules, own)

    threads = [
        threading.Thread(target=work, args=(rules,))
        for rules in ("softmax@head:lower", "softmax@blocks.0:lower", MIXED)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {
        "softmax@head:lower": [FP32, FP32, FP32, BF16],
        "softmax@blocks.0:lower": [BF16, FP32, FP32, FP32],
        MIXED: EXPECTED,
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    model = Model()
    x = torch.ones(1, 4, requires_grad=True)
    with autocast(DEVICE, BF16, policy=f"standard; {MIXED}", module=model):
        out = checkpoint(model, x, use_reentrant=reentrant)
    for layer in model.layers():
        layer.seen = {}
    out.sum().backward()
    recomputed = [layer.seen.get("softmax") for layer in model.layers()]
    assert recomputed[:3] == EXPECTED[:3]  # the last one is not always needed


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_compiled(inside: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)), torch.randn(2, 4)
    policies = ["standard; softmax@1:lower; @2:fp32", "standard; @0:fp32", "standard"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=inside)
    for text in [*policies, *policies]:
        with autocast(DEVICE, BF16, policy=text, module=model):
            expected, got = model(x), compiled(x)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_wrapped_in_ddp_and_fsdp2(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = Model()
        ddp = DistributedDataParallel(model)
        with autocast(DEVICE, BF16, policy=f"standard; {MIXED}", module=ddp):
            ddp(torch.ones(1, 4)).sum().backward()
        assert softmaxes(model) == EXPECTED

        sharded = Model()
        fully_shard(sharded.head, mesh=dist.init_device_mesh("cpu", (1,)))
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        assert softmax_dtypes(MIXED, sharded) == EXPECTED
    finally:
        dist.destroy_process_group()


# --- traces, messages -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trace_names_the_rule() -> None:
    model = Model()
    with halfstep.trace(model) as t:
        softmax_dtypes(MIXED, model)
    rules = {row.module: row.rule for row in t.ops if row.op == "_softmax"}
    assert rules == {
        "blocks.0": "softmax:fp32-dtype",
        "blocks.1": "softmax@blocks.1:lower",
        "blocks.2": "softmax:fp32-dtype",
        "head": "@head:fp32",
    }


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, r"rules for modules \(softmax@haed:lower\): pass the model"),
        ({"module": Model()}, ValueError, r"rule softmax@haed:lower.*'haed'.*'head'"),
        ({"module": "head"}, TypeError, "pass the model"),
    ],
)
def test_what_is_wrong(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autocast(DEVICE, BF16, policy="standard; softmax@haed:lower", **options)


def test_a_container_that_never_runs() -> None:
    with pytest.raises(
        ValueError, match=r"blocks is a ModuleList.* modules in it are 'blocks\.\*'"
    ):
        softmax_dtypes("softmax@blocks:lower")


def test_lazy_modules_are_refused_until_they_are_what_they_become() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    for ask in (lambda: keep(model, "0"), lambda: softmax_dtypes("@0:fp32", model)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="LazyLinear becomes another module with its first"):
            ask()
    model(torch.ones(1, 4))
    with keep(model, "0"), autocast(DEVICE, BF16):
        assert model(torch.ones(1, 4)).dtype == FP32


def test_a_model_without_need_is_fine() -> None:
    with autocast(DEVICE, BF16, policy="standard", module=Model()):
        assert torch.is_autocast_enabled(DEVICE)


def test_what_a_policy_decides_in_a_module() -> None:
    policy = Policy.parse("standard; softmax@blocks.*:lower; @blocks.0.norm:fp32")
    assert policy.action("softmax.int", "cpu", BF16) == "fp32-dtype"
    assert policy.action("softmax.int", "cpu", BF16, module="blocks.0.attn") == "lower"
    rule = policy.rule("softmax.int", "cpu", BF16, module="blocks.1")
    assert str(rule) == "softmax@blocks.*:lower"
    assert str(policy.island("blocks.0.norm", "cpu", BF16)) == "@blocks.0.norm:fp32"
