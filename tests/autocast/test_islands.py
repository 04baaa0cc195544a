"""Modules that stay in one dtype under autocast."""

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep._autocast import autocast, keep

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def dtypes(model: nn.Module, run: Callable[..., Any] | None = None) -> dict[str, torch.dtype]:
    """The dtype that every linear layer computes in under bfloat16 autocast."""
    seen: dict[str, torch.dtype] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with autocast("cpu", BF16):
        (run or model)(torch.ones(2, 4))
    for hook in hooks:
        hook.remove()
    return seen


def in_fp32(model: nn.Module, **kwargs: Any) -> list[str]:
    return [name for name, dtype in dtypes(model, **kwargs).items() if dtype is FP32]


def test_as_long_as_a_block_and_for_good() -> None:
    model = make()
    with keep(model, "*.norm", "head"):
        assert in_fp32(model) == ["blocks.0.norm.0", "blocks.1.norm.0", "head"]
    assert in_fp32(model) == []
    assert {type(module) for module in model.modules()} == {
        *(Net, nn.ModuleList, Block, nn.Linear, nn.Sequential)
    }

    kept = keep(model, "blocks.0")
    assert in_fp32(model) == ["blocks.0.fc", "blocks.0.norm.0"]
    assert repr(kept) == "<1 modules kept in torch.float32>"
    kept.remove()
    assert in_fp32(model) == []


def test_an_exception_ends_the_block() -> None:
    model = make()
    with pytest.raises(RuntimeError, match="shapes"), keep(model, "head"), autocast("cpu", BF16):
        model.head(torch.ones(2, 3))
    assert not torch.is_autocast_enabled("cpu")
    assert in_fp32(model) == []


def test_the_values_are_those_of_float32() -> None:
    model = make()
    expected = model.head(torch.ones(2, 4, dtype=BF16).float())
    keep(model, "head")
    for context in (autocast("cpu", BF16), autocast("cpu", enabled=False)):
        with context:
            assert torch.equal(model.head(torch.ones(2, 4, dtype=BF16)), expected)


def test_the_model_looks_as_before() -> None:
    model = make()
    before, names = repr(model), list(model.state_dict())
    keep(model, "*.norm", "head")
    assert repr(model) == before
    assert list(model.state_dict()) == names
    assert isinstance(model.head, nn.Linear)


def test_the_last_one_holds_and_order_of_removal_does_not_matter() -> None:
    model = make()
    first = keep(model, "head")
    model.head.to(torch.float64)
    second = keep(model, "head", dtype=torch.float64)
    assert dtypes(model)["head"] is torch.float64
    first.remove()
    assert dtypes(model)["head"] is torch.float64
    second.remove()
    model.head.float()
    assert in_fp32(model) == []


def test_islands_in_islands() -> None:
    model = make()
    keep(model, "blocks.*")
    with autocast("cpu", BF16):
        assert model.blocks[0].fc(torch.ones(2, 4)).dtype is FP32  # matched by itself, too
    assert in_fp32(model) == [*("blocks.0.fc", "blocks.0.norm.0", "blocks.1.fc", "blocks.1.norm.0")]


@pytest.mark.parametrize("cast_back", [False, True])
def test_outputs_are_cast_back_if_asked(cast_back: bool) -> None:
    model = make()
    keep(model, "blocks.0", cast_back=cast_back)
    with autocast("cpu", BF16):
        assert model.blocks[0](torch.ones(2, 4, dtype=BF16)).dtype is (BF16 if cast_back else FP32)
        assert model.blocks[0](torch.ones(2, 4)).dtype is FP32


class Pair(NamedTuple):
    first: Tensor
    rest: Any


class Echo(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_inputs_in_containers() -> None:
    model = nn.Sequential(Echo())
    keep(model, "0", cast_back=True)
    low, count = torch.ones(1, dtype=BF16), torch.ones(1, dtype=torch.int64)
    given = Pair(low, {"x": [low, (count, None)], "y": 3})
    ((back,), kwargs) = model[0](given, flag=True, extra=low)
    assert isinstance(back, Pair)
    assert (back.first.dtype, back.rest["x"][0].dtype) == (BF16, BF16)
    assert back.rest["x"][1] == (count, None)
    assert kwargs == {"flag": True, "extra": low}
    keep(model, "0")
    ((back,), kwargs) = model[0](given, extra=low)
    assert (back.first.dtype, back.rest["x"][0].dtype, kwargs["extra"].dtype) == (FP32,) * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    """Compiled before or after it is kept; the graph is whole."""
    torch.compiler.reset()
    model = make()
    keep(model, "*.norm")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    grads = []
    for run in (model, compiled):
        x = torch.ones(2, 4, requires_grad=True)
        with autocast("cpu", BF16):
            run(x).float().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *grads))
    with keep(compiled, "head"), autocast("cpu", BF16):
        assert compiled(torch.ones(2, 4)).dtype is FP32
    with autocast("cpu", BF16):
        assert compiled(torch.ones(2, 4)).dtype is BF16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant: bool) -> None:
    model = make()
    keep(model, "*.norm")
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        x = torch.ones(2, 4, requires_grad=True)
        with autocast("cpu", BF16):
            loss = run(x).float().sum()
        loss.backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *grads))


def test_copies_and_replicas_run_their_own_weights() -> None:
    model = make()
    keep(model, "head")
    other = copy.deepcopy(model)
    other.head.weight.data.zero_()
    other.head.bias.data.fill_(3.0)
    assert in_fp32(other) == ["head"]
    with autocast("cpu", BF16):
        assert other(torch.ones(1, 4)).tolist() == [[3.0, 3.0]]
    replica = model.head._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 4), torch.full((2,), 5.0)
    results = []

    def run() -> None:
        with autocast("cpu", BF16):
            results.append(replica(torch.ones(1, 4, dtype=BF16)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (results[0].tolist(), results[0].dtype) == ([[5.0, 5.0]], FP32)


def test_a_module_that_fsdp2_has_wrapped(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for comes_first in (True, False):
            model = make()
            if comes_first:
                keep(model, "head")
            fully_shard(model.head, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if not comes_first:
                keep(model, "head")
            assert in_fp32(model) == ["head"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m: keep(m, "hed"),
            ValueError,
            r"no module .* is named like 'hed'; did you mean 'h",
        ),
        (lambda m: keep(m, "zzz*"), ValueError, r"'zzz\*'; its modules are blocks, blocks.0, "),
        (lambda m: keep(m), ValueError, r"say which modules to keep"),
        (
            lambda m: keep(m, "head", dtype=BF16),
            ValueError,
            r"parameter weight is torch.float32",
        ),
        (lambda m: keep(m, "head", dtype=torch.int8), TypeError, r"pass a floating dtype"),
        (lambda m: keep("head", m), TypeError, r"keep\(str\): pass the model"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    model = make()
    with pytest.raises(error, match=message):
        call(model)
    assert in_fp32(model) == []


def test_names_without_what_wrappers_add() -> None:
    model = torch.compile(make(), backend="eager")
    with keep(model, "head"), autocast("cpu", BF16):
        assert model(torch.ones(2, 4)).dtype is FP32
