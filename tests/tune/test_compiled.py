"""Compiled code beside eager code: planted faults are named, healthy models pass."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from tests.device import DEVICE
from tests.tune.models import VOCAB, Overflows, cnn, gpt, gpt2, with_inner
from tests.tune.test_progress import Terminal
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Interpreter

from halfstep import self_check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own
]

EAGER = "aot_eager"  # everything but the code that Inductor generates, which takes long


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- planted faults -------------------------------------------------------------------------------


def around(kind: type[nn.Module]) -> nn.Module:
    """A model that has one of the layers in it, as 1.0."""
    inner = nn.Sequential(kind(16, 24), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 16), inner, nn.Linear(24, 4))


class OtherDtype(nn.Linear):
    """A bad decomposition: compiled, it computes in the other lower precision."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)
        low = [each.bfloat16() for each in (x, self.weight, self.bias)]
        return F.linear(*low).half()


class DropsCast(nn.Linear):
    """Float32 to the end; compiled, a cast is left out on the way."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            y = super().forward(x.float())
            return y.half().float() if torch.compiler.is_compiling() else y


class ForgetsCast(nn.Linear):
    """Compiled, it returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.float() if torch.compiler.is_compiling() else y


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class DoublesGradient(nn.Linear):
    """Compiled, its output is right and its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return _Double.apply(y) if torch.compiler.is_compiling() else y


@pytest.mark.parametrize("kind", [OtherDtype, DropsCast, ForgetsCast, DoublesGradient])
def test_a_planted_fault_is_named(kind: type[nn.Linear]) -> None:
    check = self_check(around(kind), torch.randn(32, 8), compiled=EAGER)
    assert not check.passed, check
    assert check.origins == ("1.0",), check
    assert check.rows[0].module == "1.0"
    assert str(check).startswith("FAILED: ")
    assert "; it begins in 1.0" in str(check).splitlines()[0]


def test_what_compiled_code_returns_is_told() -> None:
    check = self_check(around(ForgetsCast), torch.randn(32, 8), compiled=EAGER)
    assert check.rows[0].problem == "returns fp32[32, 24], eager code fp16[32, 24]"
    assert "begins here: returns fp32[32, 24], eager code fp16[32, 24]" in str(check)


class FullPrecision(nn.Linear):
    """Computes in float32 inside of autocast, in plain PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return x.float() @ self.weight.float().T + self.bias


@pytest.mark.parametrize(
    ("policy", "setting", "passes"),
    [
        ("standard", "same_as_forward", True),
        ("standard", [{"device_type": "cpu"}], False),
        ("torch", "same_as_forward", False),
        ("torch", "off", True),
    ],
)
def test_a_backward_pass_under_autocast(policy: str, setting: Any, passes: bool) -> None:
    """A fault of PyTorch itself, and its cure (pytorch#153044, pytorch#179804)."""
    model, batch = around(FullPrecision), torch.randn(32, 8)
    with torch._functorch.config.patch(backward_pass_autocast=setting):
        check = self_check(model, batch, dtype=torch.bfloat16, policy=policy, compiled=EAGER)
    assert check.passed is passes, check
    assert check.origins == (() if passes else ("1.0",))


def test_statistics_that_are_kept_in_lower_precision() -> None:
    """A fault of PyTorch's decomposition of batch norm on the CPU; eager code has float32."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    batch, backend = torch.randn(4, 3, 16, 16), "aot_eager_decomp_partition"
    check = self_check(model, batch, dtype=torch.bfloat16, compiled=backend)
    if check.passed:
        pytest.skip("PyTorch keeps the statistics in float32")
    (row,) = (row for row in check.rows if row.module == "1")
    assert check.origins == ("1",)
    assert row.is_output_good
    assert row.parameters.error > 1e-4 > row.parameter_tolerance


# --- a backend with faults ------------------------------------------------------------------------

Compiles = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]


class Doubling(Interpreter):
    """Runs a graph, with some of its matrix products doubled."""

    def __init__(self, graph: GraphModule, is_wrong: Callable[[Tensor], bool]) -> None:
        super().__init__(graph)
        self.is_wrong = is_wrong

    def run_node(self, node: torch.fx.Node) -> Any:
        value = super().run_node(node)
        is_product = node.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return value * 2 if is_product and self.is_wrong(value) else value


@pytest.fixture
def backend() -> Iterator[Callable[[Compiles, Compiles], str]]:
    """What registers a backend from what compiles the forward and the backward pass."""
    name = "faulty"

    def register(forward: Compiles, backward: Compiles) -> str:
        made = aot_autograd(fw_compiler=forward, bw_compiler=backward)
        torch._dynamo.register_backend(name=name)(made)
        return name

    yield register
    torch._dynamo.backends.registry._BACKENDS.pop(name, None)
    torch._dynamo.backends.registry._COMPILER_FNS.pop(name, None)


def plain(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


def of_shape(*shape: int) -> Compiles:
    def compiles(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return make_boxed_func(Doubling(graph, lambda value: tuple(value.shape) == shape).run)

    return compiles


def of_many_products(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Wrong only in a graph that spans several modules, as fused code can be."""
    products = [node for node in graph.graph.nodes if "addmm" in str(node.target)]
    return make_boxed_func(Doubling(graph, lambda _: len(products) > 2).run)


def layers() -> nn.Module:
    inner = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 12))
    return nn.Sequential(nn.Linear(8, 16), inner, nn.Linear(12, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bad_fallback_of_a_backend_is_named(backend, dtype: torch.dtype) -> None:
    name = backend(of_shape(32, 24), plain)
    check = self_check(layers(), torch.randn(32, 8), dtype=dtype, compiled=name)
    assert check.origins == ("1.0",)
    assert [row.module for row in check.rows if not row.passed] == ["1.0", "1", ""]


def test_one_of_the_backward_pass_too(backend) -> None:
    check = self_check(layers(), torch.randn(32, 8), compiled=backend(plain, of_shape(12, 24)))
    assert check.origins == ("1.2",)
    assert all(row.is_output_good for row in check.rows)


def test_the_whole_differs_although_no_part_does(backend) -> None:
    check = self_check(layers(), torch.randn(32, 8), compiled=backend(of_many_products, plain))
    assert check.origins == ("",)
    assert [row.module for row in check.rows if not row.passed] == [""]
    assert "it begins in (the model); no part of (the model) differs alone" in str(check)


def with_dynamic_shapes(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Wrong only where a size is a symbol."""
    if not any(isinstance(each, torch.SymInt) for each in inputs):
        return plain(graph, inputs)
    return of_shape(32, 24)(graph, inputs)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_code_for_dynamic_shapes(backend, is_dynamic: bool) -> None:
    """As docs/tune.md says how to ask for them."""
    name = backend(with_dynamic_shapes, plain)
    with torch._dynamo.config.patch(assume_static_by_default=not is_dynamic):
        check = self_check(layers(), torch.randn(32, 8), compiled=name)
    assert check.origins == (("1.0",) if is_dynamic else ())


class Loss(nn.Module):
    """A model and its loss, which is wrong if it is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        return 1.5 * loss if torch.compiler.is_compiling() else loss


def test_a_loss_in_a_module_is_compared() -> None:
    batch = torch.randn(32, 8), torch.randint(0, 4, (32,))
    check = self_check(Loss(layers()), batch, compiled=EAGER)
    assert check.origins == ("",)
    assert [row.module for row in check.rows if not row.passed] == [""]


# --- no false alarms ------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "dtype"), [(gpt, torch.float16), (cnn, torch.bfloat16)])
def test_healthy_models_pass(make, dtype: torch.dtype) -> None:
    model, batch, loss_fn = make()
    check = self_check(model, batch, loss_fn, dtype, compiled=EAGER)
    assert check.passed, check
    not_called = {"blocks", "positions"}
    assert {row.module for row in check.rows} == dict(model.named_modules()).keys() - not_called
    assert max(row.severity for row in check.rows) < 0.5
    assert not check.not_compared


def test_inductor() -> None:
    """The backend that is used if none is named; with dropout, and a fault that it is given."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU(), DoublesGradient(32, 4))
    check = self_check(model, torch.randn(64, 16), compiled=True)
    assert check.backend == "inductor"
    assert check.origins == ("3",), check
    assert [row.module for row in check.rows if not row.passed] == ["3", ""]
    assert len(check.rows) == 5
    assert not check.not_compared


def test_what_eager_code_loses_is_not_blamed_on_compiled_code() -> None:
    class Cancels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 2e4) - 2e4

    model = nn.Sequential(nn.Linear(16, 16), Cancels())
    check = self_check(model, torch.randn(8, 16), compiled=EAGER)
    assert "the output of its eager code is off from float32 by" in check.not_compared["1"]
    assert check.passed


# --- what cannot be compared ----------------------------------------------------------------------


class Prints(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        print(end="")
        return y


def test_a_graph_break_is_named() -> None:
    check = self_check(around(Prints), torch.randn(32, 8), compiled=EAGER)
    assert check.passed
    assert list(check.breaks) == ["1.0"]
    assert "graph break: 1.0: Failed to trace builtin operator" in str(check)


def test_a_module_that_does_not_compile_is_named(backend) -> None:
    def fails(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if any(
            tuple(node.meta["val"].shape) == (32, 24)
            for node in graph.graph.nodes
            if "addmm" in str(node.target)
        ):
            raise NotImplementedError("no such product\nof mine")
        return plain(graph, inputs)

    check = self_check(layers(), torch.randn(32, 8), compiled=backend(fails, plain))
    assert set(check.not_compared) == {"", "1", "1.0"}
    why = "not compared: 1.0: it does not compile: NotImplementedError: no such product"
    assert why in str(check).splitlines()
    assert check.passed
    assert {row.module for row in check.rows} == {"0", "1.1", "1.2", "2"}


def test_if_nothing_can_be_compared_it_has_not_passed(backend) -> None:
    def fails(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        raise NotImplementedError("nothing")

    check = self_check(nn.Linear(8, 4), torch.randn(2, 8), compiled=backend(fails, plain))
    assert not check.passed
    assert str(check).startswith("FAILED: no module could be compared")


def test_random_numbers_of_its_own() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return x + torch.rand(3).sum() * 0
            return x

    check = self_check(nn.Sequential(nn.Linear(8, 4), Draws()), torch.randn(2, 8), compiled=EAGER)
    assert "draws other random numbers" in check.not_compared["1"]


class Remembers(nn.Module):
    """Its result depends on what it has seen."""

    def forward(self, x: Tensor, seen: "Seen") -> Tensor:
        seen.num += 1
        return x * seen.num


class Seen:
    num = 0


class Calls(nn.Module):
    def __init__(self, kind: type[Seen]) -> None:
        super().__init__()
        self.layer, self.inner, self.kind = nn.Linear(8, 4), Remembers(), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x), self.kind())


def test_an_argument_with_state_is_what_it_was() -> None:
    check = self_check(Calls(Seen), torch.randn(2, 8), compiled=EAGER)
    assert check.passed
    assert not check.not_compared


def test_one_that_cannot_be_copied() -> None:
    class Local(Seen):
        pass

    check = self_check(Calls(Local), torch.randn(2, 8), compiled=EAGER)
    assert "use_cache=False" in check.not_compared["inner"]


def test_a_model_of_transformers() -> None:
    """Its blocks get a cache."""
    ids = torch.randint(0, VOCAB, (2, 12))
    model, batch = gpt2(num_layers=1), {"input_ids": ids, "labels": ids}
    check = self_check(model, batch, dtype=torch.bfloat16, compiled=EAGER)
    assert check.passed, check
    assert not check.not_compared
    assert {"", "transformer.h.0", "transformer.h.0.attn"} < {row.module for row in check.rows}


def test_what_is_not_compiled_at_all_is_named() -> None:
    class Disabled(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    check = self_check(nn.Sequential(Disabled(8, 4)), torch.randn(2, 8), compiled=EAGER)
    assert list(check.breaks) == ["0"]


def test_without_a_cpp_compiler_it_says_what_to_do() -> None:
    lacks = {"cpp.cxx": ("there-is-none",), "fx_graph_cache": False}
    with (
        torch._inductor.config.patch(lacks),
        pytest.raises(RuntimeError, match=r"finds no C\+\+ compiler. Install one .*'aot_eager'"),
    ):
        self_check(nn.Linear(8, 4), torch.randn(2, 8), compiled=True)


@pytest.mark.parametrize(
    ("compiled", "error", "message"),
    [
        (3, TypeError, "compiled must be True or a backend's name, got 3"),
        ("inductr", ValueError, "no backend 'inductr'; torch.compiler.list_backends"),
    ],
)
def test_errors_say_what_to_do(compiled, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        self_check(nn.Linear(8, 4), torch.randn(2, 8), compiled=compiled)


# --- the rest -------------------------------------------------------------------------------------


def test_the_policy_holds_in_modules_alone() -> None:
    """Eager code alone is lowered as in the model: by rules for a module around it, too."""
    model, batch = with_inner(Overflows), torch.randn(32, 8)
    check = self_check(model, batch, compiled=EAGER)
    assert "1.inner" in check.not_compared
    kept = self_check(model, batch, policy="standard; @1:fp32", compiled=EAGER)
    assert not kept.not_compared
    errors = {row.module: row.output_tolerance for row in kept.rows}
    assert errors["1.inner"] < 1e-4 < errors["0"]


def test_a_tolerance_holds_for_all() -> None:
    model, batch = layers(), torch.randn(32, 8)
    assert not self_check(model, batch, tolerance=1e-9, compiled=EAGER).passed
    check = self_check(around(OtherDtype), batch, tolerance=0.1, compiled=EAGER)
    assert check.passed


def test_a_compiled_model_is_compiled_under_its_own_names() -> None:
    model = torch.compile(around(DoublesGradient), backend="eager")
    assert self_check(model, torch.randn(32, 8), compiled=EAGER).origins == ("1.0",)


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x)[:5])

    rows = {r.module: r for r in self_check(Twice(), torch.randn(9, 8), compiled=EAGER).rows}
    assert rows["inner"].output.size == 9 * 8 + 5 * 8


def test_nothing_changes() -> None:
    model, batch, loss_fn = cnn()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    gradients = [parameter.grad for parameter in model.parameters()]
    held = [*model.parameters(), *model.buffers(), *gradients, *batch]
    before = [each.detach().clone() for each in (*held, torch.get_rng_state())]
    python = random.getstate()
    attributes = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        self_check(model, batch, loss_fn, compiled=EAGER)
    assert all(map(torch.equal, before, (*held, torch.get_rng_state())))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert random.getstate() == python
    assert [vars(module) for module in model.modules()] == attributes


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    self_check(nn.Sequential(nn.Linear(8, 4)), torch.randn(2, 8), compiled=EAGER)
    assert "0 measured: (the model), compiled by aot_eager" in terminal.getvalue()
    assert "1 measured: 0, compiled by aot_eager" in terminal.getvalue()


def test_the_text_of_a_good_model() -> None:
    check = self_check(layers(), torch.randn(32, 8), compiled=EAGER)
    summary = "passed: 7 modules, compiled alone by aot_eager, agree with eager code in fp16"
    assert str(check).splitlines()[0] == summary
    assert repr(check) == "<CompiledCheck aot_eager passed, 7 modules>"
