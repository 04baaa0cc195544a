"""torch.compile and CUDA graphs: what a step does on the device is one graph, its books are not.

Three layers. What works on gradients and on the scale can be traced, with no break. ``scale`` can,
too, so that a loss may be scaled in compiled code. ``step`` and the calls like it end the graph, as
those of ``torch.amp.GradScaler`` do, run as they are, and do not let anything be compiled again.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from halfstep.scaling import passes, stepping
from halfstep.scaling.gradients import collect
from halfstep.scaling.outliers import NormLimit
from halfstep.scaling.rules import Dynamic, LogMax, Rule
from halfstep.scaling.scale import LossScale
from halfstep.scaling.state import ScaleState

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code:UserWarning"),
    # Wherever a graph ends, dynamo asks the loss for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
]
CPU = torch.device("cpu")
SCALE = 1024.0
DYNAMIC = Dynamic(growth_interval=2)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


# --- what works on gradients and on the scale -----------------------------------------------------

Part = Callable[[LossScale, list[torch.nn.Parameter]], list[torch.Tensor]]


def prepare(scale: LossScale, params: list[torch.nn.Parameter]) -> stepping.Preparation:
    return stepping.Preparation(collect(params), scale, scale.tensor.clone(), [])


def finish(ready: stepping.Preparation) -> torch.Tensor:
    found_inf, look = ready.found_inf(), ready.look
    assert found_inf is not None
    assert look is not None
    ready.loss_scale.update([found_inf], [], [] if look.amax is None else [look.amax])
    return found_inf


def plain(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    ready = prepare(scale, params)
    stepping.unscale_(ready)
    return [finish(ready)]


def plain_with_clip(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    ready = prepare(scale, params)
    stepping.measure(ready)
    stepping.limit(ready, 1.0, None)
    stepping.multiply_(ready)
    assert ready.norm is not None
    return [finish(ready), ready.norm]


def fused_with_clip(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    ready = prepare(scale, params)
    stepping.measure(ready)
    stepping.limit(ready, 1.0, None)
    grad_scale = ready.grad_scale()
    assert grad_scale is not None
    assert ready.norms is not None
    return [finish(ready), grad_scale, *(sums for _, sums in ready.norms.on_device.values())]


def max_norm(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    ready = prepare(scale, params)
    stepping.unscale_(ready)
    return [finish(ready), passes.p_norm(ready.gradients, math.inf, CPU)]


PARTS: list[Part] = [plain, plain_with_clip, fused_with_clip, max_norm]


def params_with_gradients(number: int, device: torch.device = CPU) -> list[torch.nn.Parameter]:
    """Gradients of several shapes and dtypes; the fourth time one entry is inf."""
    generator = torch.Generator().manual_seed(number)
    grads = [
        torch.randn(3, 4, generator=generator),
        torch.randn(3, 4, generator=generator),
        torch.randn(5, generator=generator).bfloat16(),
        torch.randn((), generator=generator),
        torch.randn(4, 2, generator=generator).t(),
    ]
    if device.type == "cpu":  # inductor has no complex numbers; it falls back
        grads.append(torch.randn(2, generator=generator, dtype=torch.complex64))
    if number == 3:
        grads[0][1, 1] = math.inf
    params = []
    for grad in grads:
        params.append(torch.nn.Parameter(torch.zeros_like(grad, device=device)))
        params[-1].grad = (grad * SCALE).to(device)
    return params


def run(
    part: Part, rule: Rule, min_scale: float | None, device: torch.device = CPU
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor], ScaleState]]:
    scale = LossScale(ScaleState.first(SCALE, rule, min_scale))
    scale.create(device)
    for number in range(6):
        params = params_with_gradients(number, device)
        yield part(scale, params), [param.grad for param in params], scale.read()


def assert_same(mine: list[torch.Tensor], theirs: list[torch.Tensor], rtol: float) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(
    ("rule", "min_scale", "backend"),
    [
        (DYNAMIC, None, "eager"),
        (DYNAMIC, None, "aot_eager"),
        (DYNAMIC, 0.5, "aot_eager"),  # what comes out of a division is looked at, too
        (LogMax(growth_interval=2), None, "aot_eager"),  # the largest magnitude is
    ],
)
@pytest.mark.parametrize("part", PARTS)
def test_one_graph(part: Part, rule: Rule, min_scale: float | None, backend: str) -> None:
    compiled = torch.compile(part, backend=backend, fullgraph=True)
    expected = run(part, rule, min_scale)
    for mine, theirs in zip(run(compiled, rule, min_scale), expected, strict=True):
        assert_same(mine[0], theirs[0], 0.0)
        assert_same(mine[1], theirs[1], 0.0)
        assert mine[2] == theirs[2]
    assert num_graphs() == 1
    assert mine[2].num_skipped == 1


def test_one_graph_of_inductor() -> None:
    """It rearranges what it is given: ``x * 0`` is 0 for it, even if x is inf."""
    compiled = torch.compile(plain_with_clip, fullgraph=True)
    expected = run(plain_with_clip, DYNAMIC, None)
    for mine, theirs in zip(run(compiled, DYNAMIC, None), expected, strict=True):
        assert_same(mine[0], theirs[0], 1e-6)
        assert_same(mine[1], theirs[1], 1e-6)
        assert mine[2] == theirs[2]
    assert num_graphs() == 1


def test_a_norm_limit_is_one_graph() -> None:
    norms = [1.0, 2.0, 1.5, 1e3, math.inf, 2.0, math.nan, 30.0]
    limits = [NormLimit(10.0, 4), NormLimit(10.0, 4)]
    for limit in limits:
        limit.is_exceeded(torch.tensor(1.0))  # makes its tensor, which has to outlive a graph
    compiled = torch.compile(limits[0].is_exceeded, backend="aot_eager", fullgraph=True)
    for norm in norms:
        assert compiled(torch.tensor(norm)) == limits[1].is_exceeded(torch.tensor(norm))
    assert limits[0].to_list() == limits[1].to_list()
    assert num_graphs() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [DYNAMIC, LogMax(growth_interval=2)])
@pytest.mark.parametrize("part", PARTS)
def test_a_cuda_graph_of_it_can_be_replayed(part: Part, rule: Rule) -> None:
    """The gradients stay where they are; what is in them decides in each replay."""
    cuda = torch.device("cuda")
    state = ScaleState.first(SCALE, rule)
    scale = LossScale(state)
    scale.create(cuda)
    params = params_with_gradients(0, cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        part(scale, params)  # warms up
    torch.cuda.current_stream().wait_stream(stream)
    scale.load(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = part(scale, params)
    for number, (expected, grads, after) in enumerate(run(part, rule, None, cuda)):
        for param, fresh in zip(params, params_with_gradients(number, cuda), strict=True):
            assert param.grad is not None
            assert fresh.grad is not None
            param.grad.copy_(fresh.grad)
        graph.replay()
        assert_same(found, expected, 1e-6)
        assert_same([param.grad for param in params], grads, 1e-6)
        assert scale.read() == after
    assert after.num_skipped == 1
