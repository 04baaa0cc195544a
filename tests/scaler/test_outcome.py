"""What scaler.outcome, counts and history say of each step."""

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from tests.training import fused_or_not
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._scaler import GradScaler
from halfstep._scaler.journal import HISTORY_LENGTH
from halfstep._scaler.outcome import Culprit
from halfstep.errors import CallOrderError


class Setup:
    def __init__(self, fused: bool, *, watch: bool = True, **kwargs: Any) -> None:
        self.model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        module = {"module": self.model} if watch else {}
        self.scaler = GradScaler(init_scale=8.0, **module, **kwargs)

    def backward(self, bad: float | None = None, *, bad_loss: bool = False) -> None:
        self.optimizer.zero_grad()
        x = torch.tensor([[3.0, 4.0]])
        loss = (self.model["a"](x) + 2 * self.model["b"](x)).sum()
        self.scaler.scale(loss * math.nan if bad_loss else loss).backward()
        if bad is not None:
            self.model["b"].weight.grad[0, 1] = bad

    def step(self, bad: float | None = None, **kwargs: Any) -> Any:
        self.backward(bad)
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()
        return self.scaler.outcome(self.optimizer)


NORMS = {"a.weight": 5.0, "a.bias": 1.0, "b.weight": 10.0, "b.bias": 2.0}
NORM = math.sqrt(130.0)


@fused_or_not
@pytest.mark.parametrize("how", ["plain", "max_norm", "measured", "unscale_"])
def test_taken(fused: bool, how: str) -> None:
    setup = Setup(fused)
    setup.backward()
    if how == "unscale_":
        setup.scaler.unscale_(setup.optimizer)
    max_norm = {"max_norm": 1.0, "measured": math.inf}.get(how)
    setup.scaler.step(setup.optimizer, max_norm=max_norm)
    outcome = setup.scaler.outcome(setup.optimizer)
    with pytest.raises(CallOrderError, match=r"scale_after before update\(\)"):
        _ = outcome.scale_after
    setup.scaler.update()
    assert outcome.taken
    assert not outcome.skipped
    assert outcome.reason is None
    assert (outcome.scale, outcome.scale_after) == (8.0, 8.0)
    assert outcome.norm == pytest.approx(NORM)
    assert outcome.norms == pytest.approx(NORMS)
    assert outcome.culprits == []
    assert repr(outcome).startswith("Outcome(SGD: taken; scale 2^3 -> 2^3")


@fused_or_not
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_skipped(fused: bool, unscale: bool, bad: float) -> None:
    setup = Setup(fused)
    setup.backward(bad)
    if unscale:
        setup.scaler.unscale_(setup.optimizer)
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    outcome = setup.scaler.outcome(setup.optimizer)
    assert outcome.skipped
    assert outcome.reason == "overflow"
    assert (outcome.scale, outcome.scale_after) == (8.0, 4.0)
    assert not math.isfinite(outcome.norm)
    assert outcome.culprits == ["b.weight"]
    good = {name: norm for name, norm in outcome.norms.items() if name != "b.weight"}
    assert good == pytest.approx({name: NORMS[name] for name in good})


def test_a_culprit_has_a_largest_finite_magnitude_if_an_entry_is_finite() -> None:
    assert str(Culprit("a", 0, 2400, 2400)) == "a: 2,400 NaN of 2,400 entries"
    assert str(Culprit("a", 1, 0, 2, 3.0)) == "a: 1 inf of 2 entries, largest finite magnitude 3"


@fused_or_not
def test_names_without_a_module(fused: bool) -> None:
    setup = Setup(fused, watch=False)
    outcome = setup.step(math.inf)
    assert outcome.culprits == ["param_groups[0]['params'][2]"]
    setup.optimizer = torch.optim.SGD(setup.model.named_parameters(), lr=0.1, fused=fused)
    assert setup.step(math.inf).culprits == ["b.weight"]
    setup.scaler.watch(setup.model["b"])
    assert setup.step(math.inf).culprits == ["weight"]


def test_names_of_a_compiled_module() -> None:
    setup = Setup(fused=False, watch=False)
    setup.scaler.watch(torch.compile(setup.model, backend="eager"))
    compiled = torch.compile(setup.model, backend="eager")
    setup.scaler.watch(compiled)
    assert setup.step(math.inf).culprits == ["b.weight"]


def test_a_watched_module_is_held_weakly() -> None:
    setup = Setup(fused=False)
    seen = weakref.ref(setup.model)
    scaler = setup.scaler
    del setup
    gc.collect()
    assert seen() is None
    assert scaler.get_scale() == 8.0


class NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("waiting_device")
def test_making_outcomes_reads_nothing_and_reading_is_late() -> None:
    setup = Setup(fused=True)
    outcomes = []
    with NoReading():
        for bad in (None, math.inf, None):
            setup.backward()
            if bad is not None:
                setup.model["b"].weight.grad.fill_(bad)
            setup.scaler.step(setup.optimizer, max_norm=1.0)
            setup.scaler.update()
            outcomes.append(setup.scaler.outcome(setup.optimizer))
    # Read long after: each has the values of its own time.
    assert [outcome.taken for outcome in outcomes] == [True, False, True]
    assert [outcome.scale for outcome in outcomes] == [8.0, 8.0, 4.0]
    assert [outcome.scale_after for outcome in outcomes] == [8.0, 4.0, 4.0]
    assert outcomes[0].norm == outcomes[2].norm == pytest.approx(NORM)
    with pytest.raises(CallOrderError, match="kept for the last step of each optimizer only"):
        _ = outcomes[1].culprits


@pytest.mark.parametrize("what", ["zero_grad", "new backward", "written"])
def test_gradients_that_are_gone_are_not_taken_for_those_of_the_step(what: str) -> None:
    setup = Setup(fused=False)
    for _ in range(4):  # the first steps measure their norms anyway
        setup.step()
    outcome = setup.scaler.outcome(setup.optimizer)
    if what == "written":
        setup.model["a"].weight.grad.zero_()
    else:
        setup.optimizer.zero_grad()
    if what == "new backward":
        setup.backward()
    for name in ("norm", "norms", "culprits"):
        with pytest.raises(CallOrderError, match=r"are gone: read norm, norms and culprits"):
            getattr(outcome, name)
    assert outcome.taken
    assert math.isnan(setup.scaler.history()[-1].norm)


@fused_or_not
def test_the_memory_of_gradients_is_not_held(fused: bool) -> None:
    setup = Setup(fused)
    setup.step()
    seen = weakref.ref(setup.model["a"].weight.grad)
    setup.optimizer.zero_grad()
    gc.collect()
    assert seen() is None


def test_counts_and_history() -> None:
    setup = Setup(fused=True)
    for bad in (None, math.inf, math.inf, None, math.inf):
        setup.step(bad)
    assert setup.scaler.counts() == (2, 3, 1, 5)
    history = setup.scaler.history()
    assert [entry.step for entry in history] == [1, 2, 3, 4, 5]
    assert [entry.taken for entry in history] == [True, False, False, True, False]
    assert [entry.scale for entry in history] == [8.0, 8.0, 4.0, 2.0, 2.0]
    assert [str(entry.reason) for entry in history[:2]] == ["None", "overflow"]
    assert {entry.optimizer for entry in history} == {"SGD"}
    assert history[0].norm == pytest.approx(NORM)
    # The counts are saved, and go on.
    copied = GradScaler()
    copied.load_state_dict(setup.scaler.state_dict())
    assert copied.counts() == (2, 3, 1, 5)


@pytest.mark.slow
def test_history_is_bounded() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0, fused=True)
    scaler = GradScaler()
    scaler.scale(param.sum()).backward()
    for _ in range(HISTORY_LENGTH + 10):
        scaler.step(optimizer)
        scaler.update()
    history = scaler.history()
    assert len(history) == HISTORY_LENGTH
    assert history[-1].step == HISTORY_LENGTH + 10


def test_outcome_before_step() -> None:
    setup = Setup(fused=False)
    with pytest.raises(CallOrderError, match=r"outcome\(SGD\): no step of this optimizer"):
        setup.scaler.outcome(setup.optimizer)


def test_repr_of_the_scaler() -> None:
    assert repr(GradScaler()).startswith(
        "GradScaler(scale=2^16, schedule=Dynamic(growth_factor=2.0"
    )


# --- gates ----------------------------------------------------------------------------------------


@fused_or_not
def test_a_schedule_that_waits(fused: bool) -> None:
    """A4; PyTorch's warning about the order of calls, an error here, does not come."""
    setup = Setup(fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    for bad in (math.inf, math.inf, None):
        setup.step(bad)
        if setup.scaler.outcome(setup.optimizer).taken:
            scheduler.step()
    assert scheduler.last_epoch == 1
    assert setup.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5)


def test_an_outcome_is_not_copied_and_its_entry_is() -> None:
    setup = Setup(fused=False)
    setup.step(math.inf)
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"pass on what you read from it, or .*history\(\)"):
            copied(setup.scaler.outcome(setup.optimizer))
    (entry,) = setup.scaler.history()
    assert pickle.loads(pickle.dumps(entry)) == entry
