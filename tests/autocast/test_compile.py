"""Inside and around torch.compile, with the eager result as the reference."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tests import forked
from tests.device import DEVICE, seeded
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import halfstep
from halfstep._autocast import (
    Policy,
    Rule,
    autocast,
    custom_bwd,
    custom_fwd,
    keep,
    kernels,
    preset,
    scopes,
    use_policy,
)
from halfstep._autocast.policy import fingerprint
from halfstep._pytorch import amp, compiler

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW_SOFTMAX = preset("standard") | Rule("softmax", "lower")
GLOBAL_CONTEXT = autocast(DEVICE, FP16)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own
]
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert scopes.current().outer is None
    assert scopes.nesting_depth() == 0
    assert not torch.is_autocast_enabled(DEVICE)
    assert torch._functorch.config.backward_pass_autocast == "same_as_forward"
    assert torch.is_grad_enabled()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, generator=seeded(0))


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(8, 8, generator=seeded(1)).requires_grad_()


def body(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, weight)
    return hidden, F.softmax(hidden, -1)


def agree(
    function: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    weight: Tensor,
    backend: str,
    *,
    fullgraph: bool = True,
) -> None:
    """Compiled and eager: the same dtypes and values, forward and backward."""

    def outputs_and_gradients(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        outputs = function(x, weight)
        total = torch.stack([out.float().square().sum() for out in outputs]).sum()
        return [*outputs, *torch.autograd.grad(total, weight)]

    expected = outputs_and_gradients(function)
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    for _ in range(2):  # once traced, once from the cache
        for got, want in zip(outputs_and_gradients(compiled), expected, strict=True):
            assert got.dtype == want.dtype
            # A weight that is cast twice has its gradient summed in another order.
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-5)


@backends
@pytest.mark.parametrize("policy", [None, "torch", LOW_SOFTMAX])
def test_inside_a_full_graph(x, weight, backend, policy):
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        with autocast(DEVICE, BF16, policy=policy):
            hidden, low = body(x, weight)
        return hidden, low, F.linear(x, weight), F.softmax(hidden, -1)

    agree(function, x, weight, backend)


@backends
def test_around_a_full_graph(x: Tensor, weight: Tensor, backend: str) -> None:
    compiled = torch.compile(body, backend=backend, fullgraph=True)
    with autocast(DEVICE, BF16):
        hidden, probabilities = compiled(x, weight)
    assert (hidden.dtype, probabilities.dtype) == (BF16, FP32)


def nested(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    with autocast(DEVICE, FP16, policy=LOW_SOFTMAX):
        with autocast(DEVICE, enabled=False):
            first = F.linear(x, weight)
        with autocast(DEVICE, BF16):
            second = F.softmax(F.linear(x, weight), -1)  # the policy outside, in bfloat16
        with autocast(DEVICE, BF16, policy="standard"):
            third = F.softmax(F.linear(x, weight), -1)
        return first, second, third, F.softmax(F.linear(x, weight), -1)


def one_inside_itself(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    context = autocast(DEVICE, BF16)
    with context:
        with context:
            first = F.linear(x, weight)
        second = F.linear(x, weight)
    return first, second, F.linear(x, weight)


def decorated_inside(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return autocast(DEVICE, BF16)(body)(x, weight)


def with_a_graph_break(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    with autocast(DEVICE, FP16):
        hidden, probabilities = body(x, weight)
        torch._dynamo.graph_break()
        return hidden, probabilities, F.softmax(hidden, -1), F.linear(x, weight)


def made_outside(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """torch.compile does not enter it within a full graph, but runs such a block as it is."""
    with GLOBAL_CONTEXT:
        return body(x, weight)


@backends
@pytest.mark.parametrize(
    ("function", "fullgraph"),
    [
        *[(autocast(DEVICE, BF16, policy=LOW_SOFTMAX)(body), True), (nested, True)],
        *[(one_inside_itself, True), (decorated_inside, True)],
        *[(with_a_graph_break, False), (made_outside, False)],
    ],
)
def test_contexts(x: Tensor, weight: Tensor, backend: str, function: Any, fullgraph: bool) -> None:
    agree(function, x, weight, backend, fullgraph=fullgraph)


@backends
@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_inside_leaves_nothing_behind(x, weight, backend, fullgraph):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
            return F.linear(x, weight[:, :3])

    with pytest.raises(Exception, match=r"size|shape|dim"):
        torch.compile(function, backend=backend, fullgraph=fullgraph)(x, weight)
    with torch.autocast(DEVICE, BF16):
        assert F.softmax(x.to(BF16), -1).dtype == BF16
    with autocast(DEVICE, BF16):
        assert F.softmax(x.to(BF16), -1).dtype == FP32


# --- exceptions when the graph runs ---------------------------------------------------------------


@torch.library.custom_op("halfstep_tests::interrupted", mutates_args=())
def interrupted(x: Tensor) -> Tensor:
    raise KeyboardInterrupt


interrupted.register_fake(torch.empty_like)


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(0, torch.full((1,), 99))


def in_a_context(x: Tensor) -> Tensor:
    with autocast(DEVICE, FP16, policy=LOW_SOFTMAX):
        return Selecting()(x @ x.t())


def in_nested_contexts(x: Tensor) -> Tensor:
    with autocast(DEVICE, BF16), torch.autocast(DEVICE, FP16), autocast(DEVICE, enabled=False):
        return Selecting()(x)


def by_an_interrupt(x: Tensor) -> Tensor:
    with autocast(DEVICE, FP16):
        return interrupted(x @ x.t())


def in_a_generator(x: Tensor) -> Tensor:
    def values() -> Iterator[Tensor]:
        with autocast(DEVICE, FP16):
            yield x @ x.t()
            yield Selecting()(x)

    return list(values())[-1]


def on_an_island(x: Tensor) -> Tensor:
    with torch.autocast(DEVICE, FP16):
        return ISLAND(x @ x.t())


MODEL = nn.Sequential(Selecting())
keep(MODEL, "0")
ISLAND = MODEL[0]


def switches_and_marks() -> tuple[object, ...]:
    guard = torch.is_autocast_enabled("ipu"), torch.get_autocast_dtype("ipu")
    tag = torch.compiler.config.cache_key_tag
    return amp.autocast_switches(DEVICE), scopes.nesting_depth(), scopes.current(), guard, tag


@pytest.mark.parametrize(
    "function", [in_a_context, in_nested_contexts, by_an_interrupt, in_a_generator, on_an_island]
)
@pytest.mark.parametrize("around", [False, True])
def test_an_exception_in_a_graph_leaves_autocast_as_it_was(x, function, around):
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with autocast(DEVICE, BF16, enabled=around):
        before = switches_and_marks()
        for _ in range(2):  # the second call finds the compiled code
            with pytest.raises((IndexError, KeyboardInterrupt)):
                compiled(x)
            assert switches_and_marks() == before


def test_an_exception_in_a_backend_leaves_autocast_as_it_was(x: Tensor) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        graph(*map(torch.zeros_like, inputs))

    before = switches_and_marks()
    with pytest.raises(IndexError):
        torch.compile(in_a_context, backend=backend, fullgraph=True)(x)
    assert switches_and_marks() == before


# --- gradients ------------------------------------------------------------------------------------


class FullPrecision(nn.Linear):
    """Computes in float32 inside of autocast, in plain PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return F.linear(x.float(), self.weight, self.bias)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), FullPrecision(8, 8)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.mix, self.inner(x), use_reentrant=False)
        hidden = self.head(hidden @ F.softmax(hidden.t() @ hidden, -1))
        return F.cross_entropy(hidden, torch.arange(len(x)))


@contextmanager
def policy_in_plain_autocast(policy: str, model: nn.Module) -> Iterator[None]:
    with use_policy(policy, module=model), torch.autocast(DEVICE, BF16):
        yield


@pytest.mark.parametrize("islands", [(), ("mix", "inner")])
@pytest.mark.parametrize(
    "context",
    [
        lambda _: autocast(DEVICE, BF16),
        lambda model: autocast(DEVICE, BF16, policy="standard; @mix.2:fp32", module=model),
        lambda model: autocast(DEVICE, FP16, policy="standard; matmul,mm@mix:fp32", module=model),
        lambda _: autocast(DEVICE, BF16, policy="standard; linear:fp32"),
        lambda model: policy_in_plain_autocast("standard; @inner:fp32", model),
    ],
)
def test_gradients_are_those_of_eager_code(x: Tensor, islands: Any, context: Any) -> None:
    """PyTorch would compile the backward pass under the autocast around the forward pass."""
    torch.manual_seed(0)
    model = Loss()
    if islands:
        keep(model, *islands)
    assert_gradients_are_those_of_eager_code(model, x, context)


def assert_gradients_are_those_of_eager_code(model: nn.Module, x: Tensor, context: Any) -> None:
    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with context(model):
            loss = run(x).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, gradients(compiled), expected))


def test_the_gradients_of_an_island_in_plain_autocast_are_those_of_eager_code(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    keep(model, "2")
    assert_gradients_are_those_of_eager_code(model, x, lambda _: torch.autocast(DEVICE, BF16))


def test_the_policy_torch_has_the_gradients_of_torch_autocast(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), FullPrecision(8, 8))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for context in (torch.autocast(DEVICE, BF16), autocast(DEVICE, BF16, policy="torch")):
        with context:
            loss = compiled(x).sin().sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *found))


@backends
def test_code_compiled_under_one_policy_never_runs_under_another(x, weight, backend):
    compiled = torch.compile(body, backend=backend, fullgraph=True)

    def softmax_dtype(context: autocast | torch.autocast) -> torch.dtype:
        with context:
            return compiled(x, weight)[1].dtype

    for _ in range(2):
        assert softmax_dtype(autocast(DEVICE, BF16)) == FP32
        assert softmax_dtype(autocast(DEVICE, BF16, policy=LOW_SOFTMAX)) == BF16
        assert softmax_dtype(torch.autocast(DEVICE, BF16)) == BF16
        assert softmax_dtype(autocast(DEVICE, FP16)) == FP32
        assert softmax_dtype(autocast(DEVICE, BF16, policy="torch")) == BF16
        assert compiled(x, weight)[0].dtype == FP32


def test_more_policies_than_the_guard_can_tell_apart(x, weight, monkeypatch):
    monkeypatch.setattr(compiler, "NUM_GUARD_VALUES", 2)
    monkeypatch.setattr(scopes, "_marked", [])
    compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
    contexts = [
        autocast(DEVICE, BF16, policy=Policy([Rule("linear", "lower"), Rule("softmax", action)]))
        for action in ("lower", "fp32", "leave")
    ]
    expected = (BF16, FP32, BF16)
    for _ in range(2):
        for context, dtype in zip(contexts, expected, strict=True):
            with context:
                assert compiled(x, weight)[1].dtype == dtype
    with contexts[0]:  # a number that a context outside still holds is not given away
        for context in contexts[1:]:
            with context:
                compiled(x, weight)
        assert compiled(x, weight)[1].dtype == BF16
        with contexts[1]:
            assert compiled(x, weight)[1].dtype == FP32


def test_the_cache_on_disk_tells_policies_apart(tmp_path: Path) -> None:
    """Design's second trap: the first policy of one process is not the first of the next."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys, torch, torch._inductor.compile_fx
torch._inductor.config.fallback_by_default = True  # a graph in the cache without a kernel in C++
for name in sys.argv[1:-1]:  # each in a process of its own, which forks where all is imported
    if os.fork() == 0:
        sys.argv[1:] = [name]
        break
    assert os.wait()[1] == 0
from halfstep import Policy, Rule, autocast, preset
low = preset("standard") | Rule("softmax", "lower")
policy = {"low": low, "standard": "standard"}[sys.argv[-1]]
def inside(x):
    with autocast("cpu", torch.bfloat16, policy=policy):
        return torch.softmax(x @ x, -1) * 2
def around(x):
    return torch.softmax(x @ x, -1) * 2
with torch.no_grad():
    print(torch.compile(inside)(torch.ones(8, 8)).dtype)
    with autocast("cpu", torch.bfloat16, policy=policy):
        print(torch.compile(around)(torch.ones(8, 8)).dtype)
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"])
""")
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = forked.python(script, "low", "standard", "low", cwd=tmp_path, environ=environ)
    expected = [f"{dtype} {dtype} {found}" for dtype, found in ((BF16, 0), (FP32, 0), (BF16, 2))]
    assert done.out.split() == " ".join(expected).split(), done.err


def test_the_tag_tells_versions_of_the_kernels_apart(tmp_path: Path) -> None:
    package = Path(halfstep.__file__).parent
    for room in ("_autocast", "_pytorch"):
        shutil.copytree(package / room, tmp_path / room)
    now = scopes._kernels()
    with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
        assert torch.compiler.config.cache_key_tag.partition(";")[0].endswith(now)
    with patch.object(scopes, "__file__", str(tmp_path / "_autocast" / "scopes.py")):
        assert scopes._kernels.__wrapped__() == now
        for file in ("_autocast/sums.py", "_pytorch/modes.py"):
            with open(tmp_path / file, "a") as kernels:
                kernels.write("# a later version\n")
            assert scopes._kernels.__wrapped__() != now
            shutil.copy(package / file, tmp_path / file)


@backends
@pytest.mark.parametrize("cast_inputs", [None, FP32])
def test_a_custom_function(x, weight, backend, cast_inputs):
    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=DEVICE, cast_inputs=cast_inputs)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @custom_bwd(device_type=DEVICE)
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            # Large enough to be inf in float16: only under the policy's float32 it is not.
            scores = a.to(FP16 if cast_inputs is None else FP32) + 11.5
            one = F.softmax(scores.exp(), -1).sum().to(FP32) / a.shape[0]
            return (gradient @ b.t()).to(a.dtype), (a.t() @ gradient).to(b.dtype) * one

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        with autocast(DEVICE, FP16):
            return (Product.apply(x, weight),)

    agree(function, x, weight, backend)


@pytest.mark.parametrize("strict", [True, False])
def test_export_is_refused_rather_than_exported_without_autocast(x: Tensor, strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast(DEVICE, BF16):
                return x @ x.t()

    with pytest.raises(Exception, match=r"torch\.export cannot keep a halfstep policy"):
        torch.export.export(Model(), (x,), strict=strict)


def test_programs_recorded_before_autocast_are_refused(x: Tensor) -> None:
    def inside(x: Tensor) -> Tensor:
        with autocast(DEVICE, BF16):
            return x @ x.t()

    with pytest.raises(RuntimeError, match=r"make_fx\(pre_dispatch=True\) cannot keep a halfstep"):
        make_fx(inside, pre_dispatch=True)(x)
    with pytest.raises(Exception, match=r"make_fx\(pre_dispatch=True\) cannot keep a halfstep"):
        torch.compile(inside, backend="pre_dispatch_eager", fullgraph=True)(x)
    assert make_fx(inside)(x)(x).dtype == BF16  # recorded after the casts
    around = torch.compile(lambda x: x @ x.t(), backend="pre_dispatch_eager", fullgraph=True)
    with autocast(DEVICE, BF16):
        assert around(x).dtype == BF16


def test_what_runs_without_autocast_can_be_exported(x: Tensor) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast(DEVICE, enabled=False):
                return x @ x.t()

    program = torch.export.export(Model(), (x,), strict=False).module()
    assert torch.equal(program(x), x @ x.t())


def test_the_tag_tells_devices_and_actions_apart() -> None:
    def tag(**policies: Policy) -> str:
        active = scopes.NO_POLICIES
        for device, policy in policies.items():
            active = active.with_policy(kernels.prepared(kernels.prepare(policy, device)))
        scopes.enter(scopes.current(), active)
        found: str = torch.compiler.config.cache_key_tag
        scopes.leave(scopes.current())
        assert torch.compiler.config.cache_key_tag == ""
        return found

    lower, fp32 = Policy([Rule("sin", "lower")]), Policy([Rule("sin", "fp32")])
    tags = [tag(cpu=lower), tag(cpu=fp32), tag(cuda=lower), tag(cpu=lower, cuda=fp32)]
    tags.append(tag(cpu=lower, cuda=lower))
    assert len(set(tags)) == 5
    assert fingerprint(lower) != fingerprint(fp32)
