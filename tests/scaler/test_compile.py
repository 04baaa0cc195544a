"""torch.compile traces ``scale`` and runs all else eagerly; CUDA graphs capture a step.

``step`` and the calls like it end the graph, as those of ``torch.amp.GradScaler`` do, run as they
are, and do not let anything be compiled again.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.device import seeded
from torch._dynamo.utils import counters

from halfstep._gradients.gradients import collect
from halfstep._scaler import GradScaler, step
from halfstep._scaler.engine import scale_on
from halfstep._scaler.iteration import Step
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.ranks import ALONE
from halfstep._scaler.scale_state import Dynamic, ScaleState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code:UserWarning"),
    # Wherever a graph ends, dynamo asks the loss for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
]
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


# --- the scaler -----------------------------------------------------------------------------------

OURS = "it updates Python state"

THEIRS = (
    "Tensor.backward()",
    "Optimizer.",
    "don't trace into fused optimizer",
    "torch._dynamo.graph_break()",  # in the hooks around every step
)


class Training:
    """A model, whatever optimizes it, and a scaler; in the fourth iteration a gradient is inf."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=0.9, **{kind: True})
        self.scaler = GradScaler(init_scale=SCALE, growth_interval=2, **kwargs)
        self.weight = torch.tensor(1.0)

    def loss(self) -> torch.Tensor:
        first, second = self.params
        return (first * first).sum() * self.weight + second.sin().sum()

    def scaled_loss(self) -> torch.Tensor:
        scaled: torch.Tensor = self.scaler.scale(self.loss())
        return scaled

    def no_clip(self) -> None:
        self.scaler.step(self.optimizer)

    def clip_in_step(self) -> None:
        self.scaler.step(self.optimizer, max_norm=1.0)

    def clip_with_torch(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def prepare(self, number: int) -> None:
        self.weight.fill_(math.inf if number == 3 else 1.0)
        self.optimizer.zero_grad()

    def results(self) -> tuple[Any, ...]:
        outcome = self.scaler.outcome(self.optimizer)
        norm = repr(outcome.norm) if outcome.taken else None
        params = [param.tolist() for param in self.params]
        return self.scaler.get_scale(), outcome.taken, outcome.reason, norm, params


def breaks() -> list[str]:
    """The reasons of all graph breaks that are not ours and not PyTorch's own."""
    return [
        reason
        for reason in counters["graph_break"]
        if OURS not in reason and not any(theirs in reason for theirs in THEIRS)
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_loss_is_scaled_in_the_graph(backend: str) -> None:
    """However many micro-batches there are."""
    ours, eager = Training("fused"), Training("fused")
    for training in (ours, eager):
        training.scaler.scale(torch.ones(()))  # now the scale is on its device
        training.scaler.update(SCALE)
    compiled = torch.compile(ours.scaled_loss, backend=backend, fullgraph=True)
    for number in range(6):
        for training, scaled_loss in ((ours, compiled), (eager, eager.scaled_loss)):
            training.prepare(number)
            for _ in range(5):
                scaled_loss().backward()
            training.no_clip()
            training.update()
        assert ours.results() == eager.results()
    assert num_graphs() == 2  # the first micro-batch, all others
    assert ours.scaler.outcome(ours.optimizer).scale == SCALE * 2


def test_the_first_loss_of_all_ends_the_graph() -> None:
    """The tensors that hold the scale have to outlive the graph."""
    training = Training("fused")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=OURS):
        torch.compile(training.scaled_loss, backend="eager", fullgraph=True)()
    torch.compiler.reset()
    counters.clear()
    assert torch.compile(training.scaled_loss, backend="eager")() == training.loss() * SCALE
    assert breaks() == []


STEPS = ["no_clip", "clip_in_step", "clip_with_torch"]


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("step", STEPS)
def test_steps_in_compiled_functions(kind: str, step: str) -> None:
    ours, eager = Training(kind), Training(kind)
    methods = ("scaled_loss", step, "update")
    compiled = [torch.compile(getattr(ours, name), backend="eager") for name in methods]
    for number in range(6):
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            for training, calls in (
                (ours, compiled),
                (eager, [getattr(eager, name) for name in methods]),
            ):
                training.prepare(number)
                calls[0]().backward()
                calls[1]()
                calls[2]()
        assert ours.results() == eager.results()
    assert breaks() == []
    assert repr(ours.scaler.history()) == repr(eager.scaler.history())  # NaN is not NaN


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("step", ["no_clip", "clip_in_step"])
def test_a_whole_iteration_in_one_compiled_function(kind: str, step: str) -> None:
    ours, eager = Training(kind), Training(kind)

    def iterate(training: Training) -> torch.Tensor:
        loss = training.loss()
        training.scaler.scale(loss).backward()
        getattr(training, step)()
        training.scaler.update()
        return loss

    compiled = torch.compile(iterate, backend="aot_eager")
    for number in range(6):
        ours.prepare(number)
        eager.prepare(number)
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            assert torch.equal(compiled(ours), iterate(eager))
        assert ours.results() == eager.results()
    assert breaks() == []


def test_compiled_code_runs_inside_a_step() -> None:
    """A closure may call a compiled model."""
    training = Training("foreach")
    model = torch.compile(training.loss, backend="eager", fullgraph=True)
    seen = []

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = model()
        seen.append(num_graphs())
        training.scaler.scale(loss).backward()
        return loss

    step = torch.compile(lambda: training.scaler.step(training.optimizer, closure), backend="eager")
    for _ in range(3):
        step()
        training.scaler.update()
    assert seen == [1, 1, 1]
    assert training.scaler.outcome(training.optimizer).taken


@pytest.mark.parametrize("enabled", [True, False])
def test_other_calls_in_compiled_code(enabled: bool) -> None:
    ours, eager = Training("foreach", enabled=enabled), Training("foreach", enabled=enabled)

    def iterate(training: Training) -> Any:
        scaler, optimizer = training.scaler, training.optimizer
        for _ in range(2):
            scaler.scale(training.loss() / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        counts, outcome = scaler.counts(), scaler.outcome(optimizer)
        return scaler.get_scale(), outcome.taken, outcome.scale, counts

    compiled = torch.compile(iterate, backend="eager")
    for number in range(8):
        for training in (ours, eager):
            training.prepare(number if enabled else 0)
        assert compiled(ours) == iterate(eager)
        if number == 4:  # after the one that is skipped
            graphs = num_graphs()
    assert num_graphs() == graphs
    assert all(map(torch.equal, ours.params, eager.params))


@pytest.mark.parametrize("calls_retry", [False, True])
def test_outcomes_and_retries_in_compiled_code(calls_retry: bool) -> None:
    """However the scale changes, nothing of ours is compiled."""
    training = Training("foreach")

    def iterate() -> tuple[bool, float, float]:
        for _ in training.scaler.retry(training.optimizer, 1) if calls_retry else range(1):
            training.optimizer.zero_grad()
            training.scaler.scale(training.loss()).backward()
            training.scaler.step(training.optimizer)
            training.scaler.update()
        outcome = training.scaler.outcome(training.optimizer)
        return outcome.taken, outcome.scale_after, outcome.norm

    compiled = torch.compile(iterate, backend="eager")
    graphs = []
    for number in range(8):
        training.weight.fill_(math.inf if number == 5 else 1.0)
        assert compiled()[0] == (number != 5)
        graphs.append(num_graphs())
    assert graphs[2:] == graphs[2:3] * 6


# --- CUDA graphs ----------------------------------------------------------------------------------

Part = Callable[[LossScale, list[torch.nn.Parameter]], list[torch.Tensor]]


def prepare(scale: LossScale, params: list[torch.nn.Parameter]) -> Step:
    number = scale.number()
    return Step(None, scale, collect(params), number, number, ranks=ALONE)


def finish(checked: Step) -> torch.Tensor:
    skip = checked.decide().skip
    assert isinstance(skip, torch.Tensor)
    assert checked.own is not None
    return skip


def plain(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [finish(step.unscale_(prepare(scale, params)))]


def plain_with_clip(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    checked = step.measure(prepare(scale, params))
    step.multiply_(checked, step.clip_coefficient_of(checked, 1.0))
    assert isinstance(checked.norms.norm, torch.Tensor)
    return [finish(checked), checked.norms.norm]


def fused_with_clip(scale: LossScale, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    checked = step.measure(prepare(scale, params))
    divisor = step.divisor_of(checked.multiplier, step.clip_coefficient_of(checked, 1.0))
    assert isinstance(divisor, torch.Tensor)
    sums = (sums for _, sums in checked.norms.on_device.values())
    return [finish(checked), divisor, *sums]


PARTS: list[Part] = [plain, plain_with_clip, fused_with_clip]


def params_with_gradients(number: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Gradients of several shapes and dtypes; the fourth time one entry is inf."""
    generator = seeded(number)
    grads = [
        torch.randn(3, 4, generator=generator),
        torch.randn(3, 4, generator=generator),
        torch.randn(5, generator=generator).bfloat16(),
        torch.randn((), generator=generator),
        torch.randn(4, 2, generator=generator).t(),
    ]
    if number == 3:
        grads[0][1, 1] = math.inf
    params = []
    for grad in grads:
        params.append(torch.nn.Parameter(torch.zeros_like(grad, device=device)))
        params[-1].grad = (grad * SCALE).to(device)
    return params


def iterations(
    part: Part, device: torch.device
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor], ScaleState]]:
    scale = scale_on(device, LossScale(ScaleState.first(SCALE, DYNAMIC)))
    for number in range(6):
        params = params_with_gradients(number, device)
        found = part(scale, params)
        scale.update([found[0]])
        yield found, [param.grad for param in params], scale.read()


assert_close = partial(torch.testing.assert_close, atol=0.0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_a_cuda_graph_of_it_can_be_replayed(part: Part) -> None:
    """The gradients stay where they are; what is in them decides in each replay."""
    cuda = torch.device("cuda")
    state = ScaleState.first(SCALE, DYNAMIC)
    scale = scale_on(cuda, LossScale(state))
    params = params_with_gradients(0, cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scale.update(part(scale, params)[:1])  # warms up
    torch.cuda.current_stream().wait_stream(stream)
    scale.load(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = part(scale, params)
        scale.update(found[:1])
    for number, (expected, grads, after) in enumerate(iterations(part, cuda)):
        for param, fresh in zip(params, params_with_gradients(number, cuda), strict=True):
            assert fresh.grad is not None
            param.grad.copy_(fresh.grad)
        graph.replay()
        assert_close(found, expected, rtol=1e-6)
        assert_close([param.grad for param in params], grads, rtol=1e-6)
        now = scale.read()  # the host counts no replays
        assert (now.scale, now.growth_tracker) == (after.scale, after.growth_tracker)
    assert after.num_skipped == 1
