"""Modules that stay in one dtype under autocast."""

import abc
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE, seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._autocast import autocast, keep

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dtypes(model: nn.Module, run: Callable[..., Any] | None = None) -> dict[str, torch.dtype]:
    """The dtype that every linear layer computes in under bfloat16 autocast."""
    seen: dict[str, torch.dtype] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with autocast(DEVICE, BF16):
        (run or model)(torch.ones(2, 4))
    for hook in hooks:
        hook.remove()
    return seen


def in_fp32(model: nn.Module, **kwargs: Any) -> list[str]:
    return [name for name, dtype in dtypes(model, **kwargs).items() if dtype is FP32]


def test_as_long_as_a_block_and_for_good() -> None:
    model = Net()
    with keep(model, "*.norm", "head"):
        assert in_fp32(model) == ["blocks.0.norm.0", "blocks.1.norm.0", "head"]
    assert in_fp32(model) == []
    assert {type(module) for module in model.modules()} == {
        *(Net, nn.ModuleList, Block, nn.Linear, nn.Sequential)
    }

    kept = keep(model, "blocks.0")
    assert in_fp32(model) == ["blocks.0.fc", "blocks.0.norm.0"]
    assert repr(kept) == "<1 module kept in torch.float32>"
    kept.remove()
    assert in_fp32(model) == []


def test_an_exception_ends_the_block() -> None:
    model = Net()
    with pytest.raises(RuntimeError, match="shapes"), keep(model, "head"), autocast(DEVICE, BF16):
        model.head(torch.ones(2, 3))
    assert not torch.is_autocast_enabled(DEVICE)
    assert in_fp32(model) == []


def test_the_values_are_those_of_float32() -> None:
    model = Net()
    expected = model.head(torch.ones(2, 4, dtype=BF16).float())
    keep(model, "head")
    for context in (autocast(DEVICE, BF16), autocast(DEVICE, enabled=False)):
        with context:
            assert torch.equal(model.head(torch.ones(2, 4, dtype=BF16)), expected)


def test_the_model_looks_as_before() -> None:
    model = Net()
    before, names = repr(model), list(model.state_dict())
    keep(model, "*.norm", "head")
    assert repr(model) == before
    assert list(model.state_dict()) == names
    assert isinstance(model.head, nn.Linear)


def test_the_last_one_holds_and_order_of_removal_does_not_matter() -> None:
    model = Net()
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
    model = Net()
    keep(model, "blocks.*")
    with autocast(DEVICE, BF16):
        assert model.blocks[0].fc(torch.ones(2, 4)).dtype is FP32  # matched by itself, too
    assert in_fp32(model) == [*("blocks.0.fc", "blocks.0.norm.0", "blocks.1.fc", "blocks.1.norm.0")]


@pytest.mark.parametrize("cast_back", [False, True])
def test_outputs_are_cast_back_if_asked(cast_back: bool) -> None:
    model = Net()
    keep(model, "blocks.0", cast_back=cast_back)
    with autocast(DEVICE, BF16):
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    """Compiled before or after it is kept; the graph is whole."""
    torch.compiler.reset()
    model = Net()
    keep(model, "*.norm")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    grads = []
    for run in (model, compiled):
        x = torch.ones(2, 4, requires_grad=True)
        with autocast(DEVICE, BF16):
            run(x).float().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *grads))
    with keep(compiled, "head"), autocast(DEVICE, BF16):
        assert compiled(torch.ones(2, 4)).dtype is FP32
    with autocast(DEVICE, BF16):
        assert compiled(torch.ones(2, 4)).dtype is BF16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant: bool) -> None:
    model = Net()
    keep(model, "*.norm")
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        x = torch.ones(2, 4, requires_grad=True)
        with autocast(DEVICE, BF16):
            loss = run(x).float().sum()
        loss.backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *grads))


def test_copies_and_replicas_run_their_own_weights() -> None:
    model = Net()
    keep(model, "head")
    other = copy.deepcopy(model)
    other.head.weight.data.zero_()
    other.head.bias.data.fill_(3.0)
    assert in_fp32(other) == ["head"]
    with autocast(DEVICE, BF16):
        assert other(torch.ones(1, 4)).tolist() == [[3.0, 3.0]]
    replica = model.head._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(2, 4), torch.full((2,), 5.0)
    results = []

    def call_replica() -> None:
        with autocast(DEVICE, BF16):
            results.append(replica(torch.ones(1, 4, dtype=BF16)))

    thread = threading.Thread(target=call_replica)
    thread.start()
    thread.join()
    assert (results[0].tolist(), results[0].dtype) == ([[5.0, 5.0]], FP32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m: keep(m, "hed"),
            ValueError,
            r"no module .* is named like 'hed'; did you mean 'h",
        ),
        (lambda m: keep(m, "zzz*"), ValueError, r"'zzz\*'; its modules are blocks, blocks.0, "),
        (
            lambda m: keep(m, "blocks"),
            ValueError,
            r"blocks is a ModuleList, which has no forward .* the modules in it are 'blocks\.\*'",
        ),
        (lambda m: keep(m), ValueError, r"say which modules to keep"),
        (lambda m: keep(m, "head", dtype=torch.int8), TypeError, r"pass a floating dtype"),
        (lambda m: keep("head", m), TypeError, r"keep\(str\): pass the model"),
        (
            lambda m: keep(m, m.blocks[1].fc),
            TypeError,
            r"keep\(Net, Linear\): pass the names of modules, .*: keep\(model, 'blocks.1.fc'\)$",
        ),
        (lambda m: keep(m, "head", nn.Linear(4, 4)), TypeError, r": keep\(model, '\*.norm'\)$"),
        (lambda m: keep(m, ["head"]), TypeError, r"keep\(Net, list\): pass the names of modules"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    model = Net()
    with pytest.raises(error, match=message):
        call(model)
    assert in_fp32(model) == []


def test_a_forward_on_the_instance() -> None:
    """As accelerate's hooks put it there."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    original = model[0].forward
    model[0].forward = lambda x: original(x) + 1
    expected, before = model(x), dict(vars(model[0]))
    with autocast(DEVICE, torch.bfloat16):
        with keep(model, "0"):
            assert torch.equal(model(x), expected)
        assert model(x).dtype is torch.bfloat16
    assert torch.equal(model(x), expected)
    assert vars(model[0]) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_is_told() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), (torch.ones(1, 4),)))
    with pytest.raises(ValueError, match=r"runs TorchScript, .* the Python module that calls it"):
        keep(model, "0")
    keep(nn.Sequential(model), "0")


def test_names_without_what_wrappers_add() -> None:
    model = torch.compile(Net(), backend="eager")
    with keep(model, "head"), autocast(DEVICE, BF16):
        assert model(torch.ones(2, 4)).dtype is FP32


# --- classes of every kind ------------------------------------------------------------------------

Kind = TypeVar("Kind")
REGISTERED: list[type] = []


class Runs(Protocol):
    def runs(self) -> int: ...


class Slotted:
    __slots__ = ("note",)


class Registering:
    def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTERED.append(cls)


class Asking(type):
    def __new__(mcs, name: str, bases: Any, namespace: Any, *, asked: bool) -> Any:
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, *args: Any, asked: bool) -> None:
        super().__init__(*args)


class AbstractFirst(abc.ABC, nn.Linear): ...


class GenericFirst(Generic[Kind], nn.Linear): ...


class ProtocolFirst(Runs, nn.Linear): ...


class SlottedFirst(Slotted, nn.Linear): ...


class WithSlots(nn.Linear):
    __slots__ = ("note",)


class RegisteringFirst(Registering, nn.Linear, name="linear"): ...


class AskingForArguments(nn.Linear, metaclass=Asking, asked=True): ...


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("no class may be derived from this one")


class Fixed(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("in_features", "out_features", "weight", "bias", "training"):
            raise AttributeError(name)
        super().__setattr__(name, value)


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: Any) -> "CopiesItself":
        return CopiesItself(self.in_features, self.out_features)

    def __reduce__(self) -> Any:
        return CopiesItself, (self.in_features, self.out_features)


CLASSES = [
    *(AbstractFirst, GenericFirst, ProtocolFirst, SlottedFirst, WithSlots, RegisteringFirst),
    *(AskingForArguments, Final, Fixed, CopiesItself),
]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_module_of_any_class(cls: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), cls(4, 2))
    looks = repr(model), list(model.state_dict())
    kept = keep(model, "1")
    assert in_fp32(model) == ["1"]
    assert isinstance(model[1], cls)
    assert (repr(model), list(model.state_dict())) == looks
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert in_fp32(other) == ["1"]
    kept.remove()
    assert type(model[1]) is cls
    assert in_fp32(model) == []
    assert len(REGISTERED) == 1
    assert not isinstance(model[0], type(keep(model, "1") and model[1]))  # caches of ABCMeta


def test_a_compiled_module_of_a_class_with_another_layout() -> None:
    model = nn.Sequential(nn.Linear(4, 4), AbstractFirst(4, 2))
    keep(model, "1")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert in_fp32(model, run=compiled) == ["1"]


# --- parameters in another dtype ------------------------------------------------------------------


class Custom(nn.Module):
    """Uses a weight without a layer, a buffer, and the dtype of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((4,), 1.3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype) / 3
        return (x @ self.weight * self.scale).matmul(self.weight)


class Checkpointing(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(4, 4), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: self.inner(x).exp(), x, use_reentrant=self.use_reentrant)
        return y


class First(nn.Module):
    """A layer that returns a tuple, alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        is_attention = isinstance(self.layer, nn.MultiheadAttention)
        result: Tensor = (self.layer(x, x, x) if is_attention else self.layer(x))[0]
        return result


ROW, SEQUENCE = torch.randn(6, 4), torch.randn(3, 5, 4)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 4), ROW),
    "custom": (Custom, ROW),
    "submodules": (lambda: nn.Sequential(Custom(), nn.LayerNorm(4), nn.Linear(4, 2)), ROW),
    "batch norm": (lambda: nn.BatchNorm1d(4), ROW),
    "instance norm": (lambda: nn.InstanceNorm1d(5, track_running_stats=True), SEQUENCE),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2)), SEQUENCE),
    "lstm": (lambda: First(nn.LSTM(4, 4)), SEQUENCE),
    "conv": (lambda: nn.Conv1d(5, 2, 3), SEQUENCE),
    "embedding": (lambda: nn.Embedding(9, 4, max_norm=0.5), torch.tensor([1, 3])),
    "checkpoint": (lambda: Checkpointing(False), ROW),
    "reentrant checkpoint": (lambda: Checkpointing(True), ROW),
}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("way", ["keep", "rule", "compiled"])
@pytest.mark.parametrize("lower", [BF16, FP16])
@pytest.mark.parametrize("layer", LAYERS)
def test_an_island_with_parameters_in_lower_precision(layer, lower, way):
    """It computes what a float32 copy of it computes; what it stores keeps its dtype."""
    if way == "compiled" and ("checkpoint" in layer or layer == "lstm" or lower is FP16):
        pytest.skip("torch.compile cannot trace it" if lower is BF16 else "as in bfloat16")
    torch.manual_seed(0)
    make_layer, x = LAYERS[layer]
    model = nn.Sequential(make_layer()).to(lower)
    reference = copy.deepcopy(model).float()
    if x.is_floating_point():
        x = x.to(lower)
    policy = "standard; @0:fp32" if way == "rule" else None
    if policy is None:
        keep(model, "0")
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model

    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in "ab"]
    with autocast(DEVICE, lower, policy=policy, module=model if policy else None):
        result = run(inputs[0])
    expected = reference(inputs[1].float() if x.is_floating_point() else x)
    for each in (result, expected):
        each.square().sum().backward()

    assert result.dtype is FP32
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.dtype is lower
        assert torch.equal(ours, theirs.to(lower))  # an embedding with max_norm writes to it
        assert (ours.grad.float() - theirs.grad).norm() <= 1e-2 * theirs.grad.norm() + 1e-5
    for own, other in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(own, other.to(own.dtype))


def test_a_head_tied_to_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lm_head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.lm_head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.lm_head(self.embedding(tokens))
            return logits

    model = Tied().to(BF16)
    with autocast(DEVICE, BF16, policy="standard; @lm_head:fp32", module=model):
        logits = model(torch.tensor([1, 2]))
        hidden = model.embedding(torch.tensor([1, 2]))
    weight = model.embedding.weight
    assert torch.equal(logits, hidden.float() @ weight.float().t())
    logits.sum().backward()
    assert model.lm_head.weight is weight
    assert weight.grad.dtype is BF16


def test_replicas_in_lower_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 2)).to(BF16)
    keep(model, "0")
    replica = model[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = (each.detach() for each in model.parameters())
    with autocast(DEVICE, BF16):
        assert torch.equal(replica(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_the_dtype_of_an_island_need_not_be_that_of_its_parameters() -> None:
    model = Net()
    keep(model, "head", dtype=BF16)
    result = model.head(torch.ones(1, 4))
    result.sum().backward()
    assert (result.dtype, model.head.weight.grad.dtype) == (BF16, FP32)


def test_a_parameter_of_an_island_is_cast_once() -> None:
    model = nn.Sequential(Custom()).to(BF16)
    keep(model, "0")
    with halfstep.trace(model) as t, autocast(DEVICE, BF16), torch.no_grad():
        model(torch.ones(1, 4))
    casts = [row for row in t.ops if row.op == "_to_copy" and row.inputs[0].shape == (4, 4)]
    assert len(casts) == 1


def test_islands_without_floating_inputs() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor | None = None) -> Tensor:
            words = self.embedding.weight if tokens is None else self.embedding(tokens)
            result: Tensor = self.linear(words)
            return result

    model = nn.Sequential(Encoder())
    for kept in (True, False):
        policy = None if kept else "standard; @0:fp32"
        with autocast(DEVICE, BF16, policy=policy, module=None if kept else model):
            island = keep(model, "0") if kept else None
            assert model(torch.tensor([1])).dtype is FP32
            assert model[0]().dtype is FP32
            if island is not None:
                island.remove()


class Own(nn.Module):
    """Runs a function of itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4, generator=seeded(0)))
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def island(
    function: Callable[[Any, Tensor], Any], dtype: torch.dtype = FP32, params: torch.dtype = BF16
) -> Any:
    model = nn.Sequential(Own(function)).to(params)
    keep(model, "0", dtype=dtype)
    return model


EXACT = torch.tensor([[1.0, 2.0, -3.0, 4.0]])


def test_writes_through_views_of_buffers_and_local_tensors_arrive() -> None:
    def write(own: Any, x: Tensor) -> Tensor:
        own.cache[:, 1:2].copy_(x[0, :, None])
        own.cache[0].add_(1)
        own.cache.view(-1)[-1:].fill_(9)
        local = torch.zeros_like(own.weight).bfloat16()
        local[0].copy_(x[0])
        return local

    model = island(write)
    assert model(EXACT)[0].tolist() == EXACT[0].tolist()
    assert model[0].cache[0].tolist() == [1, 2, 1, 1]
    assert model[0].cache[:, 1].tolist() == [2, 2, -3, 4]
    assert model[0].cache[3, 3] == 9


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_functions_in_place_change_their_argument(dtype: torch.dtype) -> None:
    def relu(own: Any, x: Tensor) -> Tensor:
        h = x.to(dtype).clone()
        F.relu(h, inplace=True)
        return h

    result = island(relu)(EXACT)
    assert (result.tolist(), result.dtype) == (EXACT.relu().tolist(), dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("params", [BF16, FP32])
@pytest.mark.parametrize(("outer", "inner"), [(FP32, BF16), (BF16, FP32)])
def test_an_island_inside_an_island_of_another_dtype(outer, inner, params, compiled):
    model = island(lambda own, x: (own.inner(x @ own.weight), x @ own.weight), outer, params)
    keep(model, "0.inner", dtype=inner)
    x, own = torch.randn(3, 4), model[0]
    between = x.to(outer) @ own.weight.to(outer)
    linear = own.inner.weight.to(inner), own.inner.bias.to(inner)
    torch.compiler.reset()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for ours, expected in zip(run(x), (F.linear(between.to(inner), *linear), between), strict=True):
        assert ours.dtype is expected.dtype
        assert torch.equal(ours, expected)


def test_gradients_inside_an_island() -> None:
    def of_local(own: Any, x: Tensor) -> Any:
        h = x @ own.weight
        return torch.autograd.grad(h.square().sum(), (h, own.weight)), h

    def of_function(own: Any, x: Tensor) -> Any:
        return torch.func.grad(lambda h: (h @ own.weight).sum())(x), x @ own.weight

    model = island(of_local)
    (of_h, of_weight), h = model(EXACT)
    assert torch.equal(of_h, 2 * h)
    assert torch.equal(of_weight, (EXACT.t() @ (2 * h)).to(BF16))
    grad, _ = island(of_function)(EXACT)
    assert torch.equal(grad, model[0].weight.float().sum(1)[None])


def test_parameters_in_functional_calls_are_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 2)).to(BF16)
    keep(model, "0")
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        result = torch.func.functional_call(model, params, (EXACT,))
        assert result.dtype is FP32
        return result.sum()

    assert torch.equal(torch.func.grad(loss)(params)["0.weight"], EXACT.expand(2, 4).to(BF16))


def test_a_parameter_that_changes_between_two_uses() -> None:
    def use(own: Any, x: Tensor) -> list[Tensor]:
        results = [x @ own.weight]
        own.weight.mul_(2)
        results.append(x @ own.weight)
        torch.mul(own.weight, 2, out=own.weight)
        results.append(x @ own.weight)
        own.weight.data = own.weight.data * 2
        results.append(x @ own.weight)
        own.weight.data.mul_(2)
        results.append(x @ own.weight)
        own.weight = nn.Parameter(own.weight * 2)
        return [*results, x @ own.weight]

    with torch.no_grad():
        first, *rest = island(use)(EXACT)
    for power, result in enumerate(rest, 1):
        assert torch.equal(result, first * 2**power)


def test_a_converted_parameter_is_the_programs_own() -> None:
    def scale(own: Any, x: Tensor) -> Tensor:
        before: Tensor = x @ own.weight
        own.weight.float().mul_(2)
        return x @ own.weight - before

    assert not island(scale)(EXACT).any()


def test_writing_through_a_view_of_a_parameter_is_an_error() -> None:
    def write(own: Any, x: Tensor) -> Tensor:
        own.weight.detach()[0].fill_(1)
        return x

    with pytest.raises(RuntimeError, match=r"wrote to a view of a parameter of shape \(4, 4\)"):
        island(write)(EXACT)


def test_other_computations_keep_their_dtype() -> None:
    exact = torch.tensor([1.001])
    in_bf16 = island(lambda own, x: exact * 1, BF16, FP32)(EXACT)
    assert torch.equal(in_bf16, exact)
    assert island(lambda own, x: x.to(BF16))(EXACT).dtype is BF16


def test_init_inside_an_island() -> None:
    def init(own: Any, x: Tensor) -> Tensor:
        nn.init.constant_(own.weight, 2.0)
        nn.init.normal_(own.inner.weight)
        return x @ own.weight

    model = island(init)
    assert model(EXACT).tolist() == [[8.0] * 4]
    assert model[0].weight.dtype is BF16


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral": parametrizations.spectral_norm,
    "weight": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "householder": lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"),
    "hooks": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_the_buffers_of_a_parametrization_are_cast_with_it(name: str) -> None:
    torch.manual_seed(0)
    kept = nn.Sequential(PARAMETRIZED[name](nn.Linear(4, 4))).to(DEVICE, BF16)
    wide = copy.deepcopy(kept).float()
    keep(kept, "0")
    x = torch.randn(2, 4, device=DEVICE)
    for model in (kept, wide):
        model(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(kept(x), wide(x), rtol=2e-2, atol=2e-2)  # _u is rounded
        torch.testing.assert_close(kept.eval()(x), wide.eval()(x), rtol=2e-2, atol=2e-2)
    dtypes = {t.dtype for t in (*kept.parameters(), *kept.buffers())}
    assert dtypes | {param.grad.dtype for param in kept.parameters()} == {BF16}
