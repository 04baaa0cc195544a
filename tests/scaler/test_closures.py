"""step(optimizer, closure), against training without a scaler.

Everything is float32 and every scale a power of two, so that nothing is rounded by scaling: what is
trained must be the same bit for bit.
"""

import copy
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.scaler.containers import Wrapper
from tests.training import (
    Overflow,
    assert_same,
    batches,
    closure_of,
    mlp,
    one_parameter,
    quiet,
    take_step,
)

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError

SCALE = 2.0**10

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5),
    "LBFGS wolfe": lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([w for w in p if w.dim() == 2]),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
    "Twice": lambda p: Twice(p),
}
SEVERAL_EVALUATIONS = ("LBFGS", "LBFGS wolfe", "Twice")
KINDS = ("scales", "unscales")

every_optimizer = pytest.mark.parametrize("maker", MAKERS)
every_kind = pytest.mark.parametrize(
    ("maker", "kind"),
    [
        (maker, kind)
        for kind in KINDS
        for maker in (MAKERS if kind == "scales" else ("SGD", "Adam fused", *SEVERAL_EVALUATIONS))
    ],
)


class Twice(torch.optim.Optimizer):
    """Steps away, evaluates again, steps back and down; with state and with counts in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0, "temperature": torch.ones(())})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        closure()
        (group,) = self.param_groups
        group["count"] += 1
        group["temperature"] *= 0.9
        for param in group["params"]:
            state = self.state[param]
            state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
            state["here"] = param.clone()
            param.add_(state["sum"], alpha=group["count"] * float(group["temperature"]))
        loss = closure()
        for param in group["params"]:
            param.copy_(self.state[param]["here"]).sub_(param.grad, alpha=group["lr"])
        return loss


class Training:
    """A small model trained with closures, with a scaler or without one.

    Attributes:
        kind: What the closure does besides evaluating the model.
    """

    def __init__(self, maker: str, kind: str = "scales", with_scaler: bool = True) -> None:
        self.model: torch.nn.Module = mlp(3, 4, 1)
        if maker == "SparseAdam":
            self.model = torch.nn.EmbeddingBag(5, 3, sparse=True)
        self.optimizer = MAKERS[maker](list(self.model.parameters()))
        self.scaler = quiet(init_scale=SCALE)
        self.kind = kind if with_scaler else "backward"
        self.num_evaluations = 0

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if isinstance(self.model, torch.nn.EmbeddingBag):
            batch = (batch * 100).long() % 5
        return self.model(batch).square().mean()

    def step(
        self,
        batch: torch.Tensor,
        bad: tuple[int, str] | None = None,
        max_norm: float = math.inf,
        **kwargs: Any,
    ) -> Any:
        """One iteration. ``bad``: the number of an evaluation, and what is wrong with it."""
        before = self.num_evaluations

        def closure() -> torch.Tensor:
            self.num_evaluations += 1
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            if bad == (self.num_evaluations - before, "gradient"):
                loss = Overflow.apply(loss)
            if bad == (self.num_evaluations - before, "loss"):
                loss = loss * math.nan
            self.backward(loss, max_norm)
            return loss

        if self.kind == "backward":
            return self.optimizer.step(closure)
        if self.kind == "max_norm":
            kwargs["max_norm"] = max_norm
        result = self.scaler.step(self.optimizer, closure, **kwargs)
        self.scaler.update()
        return result

    def backward(self, loss: torch.Tensor, max_norm: float) -> None:
        scaler, optimizer = self.scaler, self.optimizer
        if self.kind == "backward":
            loss.backward()
            clip_(self.optimizer.param_groups[0]["params"], max_norm)
        else:
            scaler.scale(loss).backward()
        if self.kind == "unscales":
            scaler.unscale_(optimizer)

    def everything(self) -> list[torch.Tensor]:
        """A copy of all that a step may change."""
        found: list[Any] = [*self.model.parameters()]
        for key in ("param_groups", "state"):
            saved = self.optimizer.state_dict()[key]
            found += torch.utils._pytree.tree_leaves(copy.deepcopy(saved))
        return [torch.as_tensor(x).detach().clone() for x in found if not isinstance(x, str | None)]


def clip_(params: list[torch.Tensor], max_norm: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, which takes no sparse gradients."""
    norm = math.hypot(*(param.grad.to_dense().norm().item() for param in params))
    for param in params:
        param.grad.mul_(min(max_norm / (norm + 1e-6), 1.0))


def test_every_optimizer_is_here() -> None:
    theirs = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert theirs - {name.split()[0] for name in MAKERS} == {"Optimizer"}


@every_kind
def test_trains_as_without_a_scaler(maker: str, kind: str) -> None:
    mine, theirs = Training(maker, kind), Training(maker, with_scaler=False)
    for batch in batches(4, 6, 3):
        returned, expected = mine.step(batch), theirs.step(batch)
        if expected is not None:
            assert torch.equal(torch.as_tensor(returned), expected)
        assert_same(mine.everything(), theirs.everything())
    assert mine.num_evaluations == theirs.num_evaluations
    assert mine.scaler.get_scale() == SCALE
    assert mine.scaler.counts() == (4, 0, 0, None)
    assert [entry.taken for entry in mine.scaler.history()] == [True] * 4


@every_optimizer
def test_where_a_closure_is_evaluated(maker: str) -> None:
    """Of PyTorch's optimizers all but LBFGS evaluate once, before they change anything."""
    training = Training(maker, with_scaler=False)
    for batch in batches(4, 6, 3):
        before = training.everything()
        evaluations = []

        def closure(batch: torch.Tensor = batch, before: Any = before, seen: Any = evaluations):
            training.optimizer.zero_grad()
            loss = training.loss(batch)
            loss.backward()
            now = training.everything()
            seen.append(len(now) == len(before) and all(map(torch.equal, now, before)))
            return loss

        training.optimizer.step(closure)
        assert (evaluations == [True]) == (maker not in SEVERAL_EVALUATIONS)


@every_kind
def test_a_bad_batch_leaves_no_trace(maker: str, kind: str) -> None:
    """The loss is not finite in the last two bad batches of four, else only a gradient."""
    mine, theirs = Training(maker, kind), Training(maker, with_scaler=False)
    for number, batch in enumerate(batches(4, 6, 3)):
        theirs.step(batch)
        mine.step(batch)
        before = mine.everything()
        last = 3 if maker.startswith("LBFGS") else 2
        when = last if maker in SEVERAL_EVALUATIONS and number % 2 else 1
        fault = "gradient" if number < 2 else "loss"
        counted = mine.num_evaluations
        assert mine.step(torch.ones(2, 3), bad=(when, fault)) is None
        assert mine.num_evaluations == counted + when
        assert_same(mine.everything(), before)
        outcome = mine.scaler.outcome(mine.optimizer)
        assert outcome.reason == {"gradient": "overflow", "loss": "loss"}[fault]
        # After a loss the earlier scale is tried again.
        assert mine.scaler.get_scale() == SCALE / 2 ** (1, 2, 3, 3)[number]
    assert_same(mine.everything(), theirs.everything())
    assert mine.scaler.counts() == (4, 4, 1, 8)


class Spy(torch.optim.LBFGS):
    """Compares the gradients of every evaluation with those of the plain loss, clipped."""

    expected: Callable[[], list[torch.Tensor]]
    num_compared = 0

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        def compare() -> Any:
            loss = closure()
            found = [param.grad for param in self.param_groups[0]["params"]]
            torch.testing.assert_close(found, self.expected(), rtol=1e-5, atol=1e-9)
            self.num_compared += 1
            return loss

        return super().step(compare)


@pytest.mark.parametrize("kind", [*KINDS, "max_norm"])
@pytest.mark.parametrize("max_norm", [0.01, math.inf])
def test_every_evaluation_of_lbfgs(kind: str, max_norm: float) -> None:
    """Not their steps: LBFGS divides by differences of gradients that are almost equal."""
    training = Training("LBFGS", kind)
    params = list(training.model.parameters())
    training.optimizer = Spy(params, max_iter=5, line_search_fn="strong_wolfe")
    for batch in batches(4, 6, 3):

        def expected(batch: torch.Tensor = batch) -> list[torch.Tensor]:
            model = copy.deepcopy(training.model)
            model.zero_grad()
            with torch.enable_grad():
                model(batch).square().mean().backward()
            if kind == "max_norm":
                clip_(list(model.parameters()), max_norm)
            return [param.grad for param in model.parameters()]

        training.optimizer.expected = expected
        training.step(batch, max_norm=max_norm)
    assert training.optimizer.num_compared == training.num_evaluations > 12


# --- how it is called --------------------------------------------------------------------------


class Recorder(torch.optim.SGD):
    """Takes its closure by name only, and more arguments; never turns gradients on."""

    def step(self, *args: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.seen = args, kwargs
        with torch.no_grad():
            loss = closure()
        super().step()
        return "answer", loss


def with_scaler(make: Any = torch.optim.SGD, **kwargs: Any) -> Any:
    param = torch.nn.Parameter(torch.ones(2))
    scaler = quiet(init_scale=SCALE, **kwargs)
    return param, make([param], lr=1.0), scaler


def assert_usable(param: Any, optimizer: Any, scaler: GradScaler, scale: float = SCALE) -> None:
    """One more iteration, with a closure and without, takes exactly the steps it should."""
    before = param.detach().clone()
    scaler.step(optimizer, closure=closure_of(scaler, param.sum))
    scaler.update()
    take_step(scaler, optimizer, param.sum())
    assert torch.equal(param, before - 2.0)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_arguments(outer: Any) -> None:
    param, optimizer, scaler = with_scaler(Recorder)
    with outer():
        closure = closure_of(scaler, param.sum)
        returned = scaler.step(optimizer, 1, closure=closure, max_norm=0.5, extra=2)
    assert returned == ("answer", 2.0)
    assert not returned[1].requires_grad
    assert optimizer.seen == ((1,), {"extra": 2})
    torch.testing.assert_close(param.detach(), torch.full((2,), 1.0 - 0.5 / math.sqrt(2)))
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_may_be_given_by_place_and_by_name(fused: bool) -> None:
    param, optimizer, scaler = with_scaler()
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    with torch.no_grad():
        assert scaler.step(optimizer, closure_of(scaler, param.sum)) == 2.0
    scaler.update()
    assert scaler.step(optimizer, closure=closure_of(scaler, param.sum)) == 0.0
    scaler.update()
    assert torch.equal(param, torch.full((2,), -1.0))
    # accelerate passes None.
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer, None) is None
    scaler.update()
    assert torch.equal(param, torch.full((2,), -2.0))


def test_gradients_of_the_evaluation_before_are_dropped() -> None:
    """If the closure leaves them."""
    param, optimizer, scaler = with_scaler(lambda params, lr: Twice(params))
    seen = []

    def closure() -> torch.Tensor:
        seen.append(param.grad)
        scaler.scale(param.sum()).backward()
        return param.sum()

    scaler.step(optimizer, closure)
    scaler.update()
    assert seen == [None, None]
    assert torch.equal(param.grad, torch.ones(2))


def test_a_first_argument_that_is_no_closure() -> None:
    class Takes(torch.optim.SGD):
        def step(self, number: int, closure: Any = None) -> Any:  # type: ignore[override]
            return number, closure and closure()

    param, optimizer, scaler = with_scaler(Takes)
    assert scaler.step(optimizer, 5, closure=closure_of(scaler, param.sum)) == (5, 2.0)
    scaler.update()
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer, 5) == (5, None)


def test_a_state_that_refers_to_parameters() -> None:
    """It refers to the same ones when it is restored."""
    param, optimizer, scaler = with_scaler(lambda params, lr: Twice(params))
    optimizer.state[param]["owner"] = param
    scaler.step(optimizer, closure_of(scaler, lambda: Overflow.apply(param.sum())))
    assert optimizer.state[param] == {"owner": param}
    assert optimizer.state[param]["owner"] is param


def test_a_state_of_what_is_no_parameter() -> None:
    param, optimizer, scaler = with_scaler(lambda params, lr: Twice(params))
    key = object()
    optimizer.state[key] = {"steps": 3}
    scaler.step(optimizer, closure_of(scaler, lambda: Overflow.apply(param.sum())))
    assert optimizer.state[key] == {"steps": 3}


@pytest.mark.parametrize("maker", SEVERAL_EVALUATIONS)
def test_a_first_step_that_is_bad(maker: str) -> None:
    """There is no state before it, and none after it."""
    training = Training(maker)
    before = training.everything()
    training.step(batches(4, 6, 3)[0], bad=(2, "gradient"))
    assert_same(training.everything(), before)
    assert not training.optimizer.state


def test_a_wrapper_without_a_state() -> None:
    param, optimizer, scaler = with_scaler()
    wrapper = Wrapper(optimizer)
    for factor in (1.0, math.nan):
        scaler.step(wrapper, closure_of(scaler, lambda factor=factor: param.sum() * factor))
        scaler.update()
    assert torch.equal(param, torch.zeros(2))
    assert scaler.outcome(wrapper).reason == "loss"
    assert_usable(param, optimizer, scaler)


def test_gradients_of_one_evaluation_at_a_time() -> None:
    param, optimizer, scaler = with_scaler(lambda params, lr: Twice(params))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts = []

    def closure() -> torch.Tensor:
        counts.append(len(alive))
        scaler.scale(param.sum()).backward()
        alive.add(param.grad)
        return param.sum()

    scaler.step(optimizer, closure)
    assert counts == [0, 0]


# --- gradients from before the step -------------------------------------------------------------


class Sharpness(torch.optim.Optimizer):
    """Climbs along the gradients of a backward pass before the step, and evaluates there (SAM).

    With ``every=2`` it evaluates in every second step only (LookSAM).
    """

    def __init__(self, params: Any, lr: float = 0.1, every: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.every, self.num_steps = every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            norm = torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                self.state[param]["old"] = param.clone()
                param.add_(param.grad * (0.05 / norm))
            self.zero_grad()
            torch.enable_grad()(closure)()
            for param in params:
                param.copy_(self.state[param]["old"])
        return self.base.step()


EARLY = {
    "SAM": Sharpness,
    "LookSAM": lambda params: Sharpness(params, every=2),
    "the loss of before": lambda params: torch.optim.SGD(params, lr=0.1),
}


class Early:
    """A loop that calls ``backward`` before ``step(closure)``, with a scaler or without one."""

    def __init__(self, which: str, scaler: Any = None, clips: str = "") -> None:
        self.model = mlp(3, 4, 1)
        self.evaluates = which != "the loss of before"
        self.optimizer = EARLY[which](list(self.model.parameters()))
        self.scaler, self.clips = scaler, clips

    def step(self, batch: torch.Tensor, factors: tuple[float, float] = (1.0, 1.0)) -> Any:
        def scaled(loss: torch.Tensor, factor: float) -> torch.Tensor:
            loss = loss if math.isfinite(factor) else Overflow.apply(loss)
            return self.scaler.scale(loss) if self.scaler else loss

        def closure() -> Any:
            if not self.evaluates:
                return loss
            again = self.model(batch).square().mean()
            scaled(again, factors[1]).backward()
            return again

        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        scaled(loss, factors[0]).backward()
        max_norm = {}
        if self.clips and not self.scaler:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        elif self.clips == "torch":
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        elif self.clips == "max_norm":
            max_norm = {"max_norm": 0.1}
        if not self.scaler:
            return self.optimizer.step(closure)
        result = self.scaler.step(self.optimizer, closure, **max_norm)
        self.scaler.update()
        return result

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("which", EARLY)
def test_an_optimizer_that_needs_gradients_from_before(which: str, enabled: bool) -> None:
    """SAM, which evaluates its closure at another place; not one that only wants its value."""
    ours, plain = Early(which, GradScaler(init_scale=SCALE, enabled=enabled)), Early(which)
    if enabled and not ours.evaluates:
        with pytest.raises(CallOrderError, match="A closure must zero the gradients, compute the"):
            ours.step(batches(4, 6, 3)[0])
        assert torch.equal(ours.weights(), plain.weights())
        return
    for batch in batches(4, 6, 3):
        ours.step(batch)
        plain.step(batch)
        assert torch.equal(ours.weights(), plain.weights())


@pytest.mark.parametrize("clips", ["torch", "max_norm"])
def test_gradients_from_before_are_clipped(clips: str) -> None:
    ours, plain = (Early("LookSAM", each, clips) for each in (GradScaler(init_scale=SCALE), None))
    ours.optimizer.every = plain.optimizer.every = 4  # max_norm= clips those of the closure too
    for batch in batches(4, 6, 3)[:3]:
        ours.step(batch)
        plain.step(batch)
        torch.testing.assert_close(ours.weights(), plain.weights())


@pytest.mark.parametrize("factors", [(math.inf, 1.0), (1.0, math.inf)])
def test_gradients_that_are_not_finite_before_or_in_the_closure(factors: Any) -> None:
    scaler = quiet(init_scale=SCALE)
    early = Early("SAM", scaler)
    early.step(batches(4, 6, 3)[0])
    before, state = early.weights(), copy.deepcopy(early.optimizer.base.state_dict())
    assert early.step(batches(4, 6, 3)[1], factors) is None
    assert torch.equal(early.weights(), before)
    assert str(early.optimizer.base.state_dict()) == str(state)
    assert scaler.outcome(early.optimizer).reason == "overflow"
    assert scaler.get_scale() == SCALE / 2
    early.step(batches(4, 6, 3)[2])
    assert not torch.equal(early.weights(), before)


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_step_that_raises_in_a_closure(in_evaluation: bool) -> None:
    """It leaves no gradients, and can be repeated with new ones."""
    param, _, scaler = with_scaler()
    optimizer = Sharpness([param], lr=1.0)
    scaler.scale(param.sum()).backward()

    def closure() -> Any:
        if in_evaluation:
            scaler.scale(param.sum()).backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer, closure)
    assert torch.equal(param, torch.ones(2))
    assert param.grad is None
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer, closure_of(scaler, param.sum))
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.zeros(2))


def test_gradients_of_an_earlier_iteration_are_dropped() -> None:
    """They have been used, so that they are neither unscaled again nor a reason to wait."""
    param, optimizer, scaler = with_scaler(lambda params, lr: Twice(params))
    reads = []
    for _ in range(2):
        scaler.step(optimizer, closure_of(scaler, lambda: reads.append(param.grad) or param.sum()))
        scaler.update()
    assert reads == [None] * 4


@pytest.mark.parametrize("plain_step", [False, True])
def test_gradients_that_a_step_has_used_are_dropped_after_another_loss(plain_step: bool) -> None:
    """Also where only another optimizer had a loss since."""
    param, optimizer, scaler = with_scaler(lambda params, lr: Twice(params))
    scaler.scale(param.sum()).backward()
    if plain_step:
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler.step(optimizer)
    else:
        scaler.step(optimizer, closure_of(scaler, param.sum))
    scaler.update()
    scaler.scale(torch.nn.Parameter(torch.ones(2)).sum()).backward()
    seen = []
    scaler.step(optimizer, closure_of(scaler, lambda: seen.append(param.grad) or param.sum()))
    assert seen[0] is None
    assert torch.equal(param.grad, torch.ones(2))


def two_optimizers(make: Any, spike: float) -> GradScaler:
    """30 iterations of two optimizers, the second with a closure and one spike."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    first = torch.optim.SGD(models[0].parameters(), lr=0.01)
    second = make(models[1].parameters())
    scaler = quiet()
    for number in range(30):
        x = torch.randn(4, 2)

        def closure(x: torch.Tensor = x, factor: float = spike if number == 12 else 1.0) -> Any:
            second.zero_grad()
            loss = models[1](x).square().mean() * factor
            scaler.scale(loss).backward()
            return loss

        first.zero_grad()
        scaler.scale(models[0](x).square().mean()).backward()
        scaler.step(first)
        scaler.step(second, closure)
        scaler.update()
        assert scaler.outcome(second).taken == (number != 12)
    return scaler


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.LBFGS(params, max_iter=2),
        lambda params: torch.optim.SGD(params, lr=0.01),
        lambda params: Twice(params),
    ],
)
def test_one_bad_batch_is_one_skip_beside_another_optimizer(make: Any) -> None:
    two_optimizers(make, math.nan)


@pytest.mark.parametrize("zeroes", [True, False])
def test_an_optimizer_that_leaves_out_its_closure_beside_another_optimizer(zeroes: bool) -> None:
    """It steps with new gradients as in float32, and never again with the last ones."""

    def trained(scaler: Any) -> torch.Tensor:
        torch.manual_seed(0)
        a, b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        other, optimizer = torch.optim.SGD(a.parameters()), Sharpness(b.parameters(), every=2)

        def backward(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            return loss

        for x in batches(6, 6, 3):
            other.zero_grad()
            backward(a, x)
            if zeroes:
                optimizer.zero_grad()
                backward(b, x)
            for each, *closure in ((other,), (optimizer, lambda x=x: backward(b, x))):
                scaler.step(each, *closure) if scaler else each.step(*closure)
            if scaler:
                scaler.update()
        return b.weight

    if zeroes:
        assert torch.equal(trained(GradScaler(init_scale=SCALE)), trained(None))
    else:
        with pytest.raises(CallOrderError, match="the optimizer did not call the closure"):
            trained(GradScaler(init_scale=SCALE))


# --- gradients that the closure does not zero -----------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_step(set_to_none: bool) -> None:
    param, optimizer = one_parameter(torch.ones(2))
    scaler = GradScaler(init_scale=SCALE)
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        scaler.scale(torch.nn.Parameter(torch.ones(2)).sum()).backward()

        def closure() -> torch.Tensor:
            loss = param.sum()
            scaler.scale(loss).backward()
            return loss

        scaler.step(optimizer, closure)
        scaler.update()
    assert torch.equal(param, torch.full((2,), -2.0))


@pytest.mark.parametrize("maker", ["SGD", "Adam fused", "LBFGS"])
def test_gradients_from_before_that_no_step_has_used(maker: str) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = MAKERS[maker]([param])
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(param.sum()).backward()
    closure = closure_of(scaler, lambda: param.square().sum())
    with pytest.raises(CallOrderError) as caught:
        scaler.step(optimizer, closure)
    assert str(caught.value) == (
        f"step({type(optimizer).__name__}, closure): there are gradients from before the step, and "
        "the closure keeps them or adds to them. A closure must zero the gradients, compute the "
        "loss, call scaler.scale(loss).backward() and return the loss. To use gradients from "
        "before, leave the closure out"
    )
    assert torch.equal(param, torch.ones(2))
    assert param.grad is None
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer, lambda: optimizer.zero_grad() or closure())
    scaler.update()
    assert scaler.outcome(optimizer).taken


# --- several optimizers --------------------------------------------------------


def test_one_closure_for_each_optimizer() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    scaler = quiet(init_scale=SCALE)

    def loss(index: int, factor: float) -> torch.Tensor:
        found = params[index].sum()
        return found if math.isfinite(factor) else Overflow.apply(found)

    for factor in (1.0, math.inf):
        for index, optimizer in enumerate(optimizers):
            value = partial(loss, index, factor if index else 1.0)
            scaler.step(optimizer, closure_of(scaler, value))
        scaler.update()
    assert torch.equal(params[0], torch.full((2,), -1.0))
    assert torch.equal(params[1], torch.zeros(2))
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("shared", [False, True])
def test_another_optimizer_steps_with_what_the_closure_left(shared: bool) -> None:
    """Its gradients are divided by the scale of the loss in the closure, and once."""
    mine, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([mine], lr=1.0)
    second = torch.optim.SGD([other, mine] if shared else [other], lr=1.0)
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(torch.ones(()))
    scaler.update(4.0)

    def closure() -> torch.Tensor:
        loss = mine.sum() + other.sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.step(second)
    scaler.update()
    assert torch.equal(other, torch.zeros(2))
    assert torch.equal(mine, torch.full((2,), -1.0 if shared else 0.0))


# --- wrong use ---------------------------------------------------------------------------------


def backward_by_itself(param: Any, optimizer: Any, scaler: GradScaler) -> Any:
    loss = param.sum()
    loss.backward()
    return loss


def no_backward(param: Any, optimizer: Any, scaler: GradScaler) -> Any:
    return scaler.scale(param.sum())


def only_returns_the_loss(param: Any, optimizer: Any, scaler: GradScaler) -> Any:
    return param.sum()


def update_inside(param: Any, optimizer: Any, scaler: GradScaler) -> Any:
    scaler.scale(param.sum()).backward()
    scaler.update(2.0)
    scaler.update(SCALE)
    return param.sum()


def raising(param: Any, optimizer: Any, scaler: GradScaler) -> Any:
    scaler.scale(param.sum()).backward()
    raise KeyboardInterrupt("in the closure")


WRONG = {
    backward_by_itself: (CallOrderError, "the closure scaled no loss. A closure must zero the"),
    only_returns_the_loss: (CallOrderError, "the closure scaled no loss. A closure must zero the"),
    no_backward: (CallOrderError, "none of its 1 parameter has a gradient"),
    update_inside: (CallOrderError, r"the closure called step\(\) or update\(\)"),
    raising: (KeyboardInterrupt, "in the closure"),
}


@pytest.mark.parametrize("make", ["SGD", "Adam fused", "LBFGS", "Twice"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_closure_that_fails(wrong: Any, first: bool, make: str) -> None:
    """In the first evaluation or in the second one; parameters and state are restored."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = MAKERS[make]([param])
    scaler = GradScaler(init_scale=SCALE)
    good = closure_of(scaler, lambda: param.square().sum())
    scaler.step(optimizer, good)  # some state
    scaler.update()
    before = copy.deepcopy((param.detach(), optimizer.state_dict()))
    results = iter([True, False] if first or make in ("SGD", "Adam fused") else [False, True])

    def closure() -> Any:
        if next(results):
            return wrong(param, optimizer, scaler)
        return good()

    error, words = WRONG[wrong]
    with pytest.raises(error, match=words):
        scaler.step(optimizer, closure)
    assert str(before) == str((param.detach(), optimizer.state_dict()))
    with pytest.raises(CallOrderError, match="no gradients were checked"):
        scaler.update()
    assert len(scaler.history()) == 1
    assert_usable(param, torch.optim.SGD([param], lr=1.0), scaler)


def test_step_inside_a_closure() -> None:
    param, optimizer, scaler = with_scaler()

    def closure() -> torch.Tensor:
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        return param.sum()

    with pytest.raises(CallOrderError, match=r"the closure called step\(\) or update\(\)"):
        scaler.step(optimizer, closure)
    assert_usable(param, optimizer, scaler)


def test_an_optimizer_that_does_not_call_the_closure() -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data.add_(1.0)
            super().step()

    param, optimizer, scaler = with_scaler(Deaf)
    with pytest.raises(CallOrderError, match=r"step\(Deaf, closure\): the optimizer did not call"):
        scaler.step(optimizer, lambda: param.sum())
    assert torch.equal(param, torch.ones(2))
    assert_usable(param, torch.optim.SGD([param], lr=1.0), scaler)


@pytest.mark.parametrize("before", ["unscale_", "step"])
def test_after_another_call(before: str) -> None:
    param, optimizer, scaler = with_scaler()
    scaler.scale(param.sum()).backward()
    getattr(scaler, before)(optimizer)
    expected = param.detach().clone()
    words = "step() has already" if before == "step" else "closure): its gradients have already"
    with pytest.raises(CallOrderError) as caught:
        scaler.step(optimizer, lambda: param.sum())
    assert words in str(caught.value)
    assert torch.equal(param, expected)
    if before != "step":
        scaler.step(optimizer)
    scaler.update()
    assert_usable(param, optimizer, scaler)


def test_float16_gradients() -> None:
    param, _, scaler = with_scaler()
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.LBFGS([half])
    with pytest.raises(ValueError, match="LBFGS has float16 gradients"):
        scaler.step(optimizer, closure_of(scaler, half.sum))
    assert torch.equal(half, torch.ones(2, dtype=torch.float16))
    assert_usable(param, torch.optim.SGD([param], lr=1.0), scaler)


@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_a_scale_below_one(max_norm: float | None) -> None:
    """A gradient that is finite until it is divided by the scale."""
    param, optimizer, scaler = with_scaler()
    with torch.no_grad():
        param.fill_(2.0**-20)
    scaler.update(2.0**-20)
    closure = closure_of(scaler, lambda: (param * 2.0**100).sum() * 2.0**40)
    loss = scaler.step(optimizer, closure, max_norm=max_norm)
    assert loss is None
    assert torch.equal(param, torch.full((2,), 2.0**-20))
    scaler.update()
    assert scaler.outcome(optimizer).reason == "overflow"


def test_no_hook_stays_after_a_closure_that_unscales_before_its_last_loss() -> None:
    param, optimizer, scaler = with_scaler()
    other = torch.nn.Parameter(torch.ones(2))

    def closure() -> None:
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.scale(other.sum()).backward()
        assert param._post_accumulate_grad_hooks

    for _ in range(2):
        scaler.step(optimizer, closure)
        scaler.update()
        assert not param._post_accumulate_grad_hooks
