"""fastai: a Learner with halfstep's callback for mixed precision."""

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.integrations import by_hand

import halfstep
from halfstep._tools.record.read import read_run

pytestmark = [
    *by_hand.needs("fastai"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # of its own
]
NAME = "fastai_digits"


def trained(num: int) -> by_hand.Trained:
    from fastai.optimizer import Adam

    example = by_hand.load(NAME)
    model = example["make_model"]()
    # That of fastai: the defaults of a Learner.
    optimizer = Adam([*model.parameters()], lr=3e-3)
    for param in (model[0].bias, model[2].bias):
        optimizer.state[param]["do_wd"] = False
    return by_hand.train(
        model,
        example["make_batches"](num)[0],
        optimizer,
        0.5,
        loss_fn=lambda predicted, classes: F.cross_entropy(predicted.float(), classes),
    )


def test_the_example_is_the_loop_by_hand() -> None:
    printed = by_hand.printed_by(NAME, "--steps 60")
    by_hand.assert_printed(printed, trained(60))


def test_a_run_records_the_same(tmp_path: Path) -> None:
    run = by_hand.recorded(NAME, "--steps 30", tmp_path / "run")
    by_hand.assert_recorded(run, trained(30))
    assert [model.name for model in run.models] == ["Sequential"]


# --- a Learner ------------------------------------------------------------------------------------


def learner(*callbacks, num: int = 6, broken: int | None = None, wrapped: bool = False):
    """Return a Learner whose batch of this number is broken."""
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD, OptimWrapper

    batches = by_hand.large_batches(num)
    if broken is not None:
        batches[broken - 1][0][0, 0] = torch.nan
    optimizer = partial(OptimWrapper, opt=torch.optim.SGD) if wrapped else SGD
    return Learner(
        DataLoaders(batches, batches[:1]),
        by_hand.small(),
        F.cross_entropy,
        opt_func=optimizer,
        lr=0.5,
        cbs=list(callbacks),
    )


def fit(learn) -> None:
    with learn.no_logging(), learn.no_bar():
        learn.fit(1)


def watching(event: str, seen: list[object], look=lambda learn: learn.iter, order: int = 20):
    """Return a callback that notes what it sees at an event."""
    from fastai.callback.core import Callback

    def note(callback) -> None:
        seen.append(look(callback.learn))

    made = type("Watching", (Callback,), {event: note, "order": order, "run_valid": False})
    return made()


def raising(event: str, error: type[BaseException], order: int = 20):
    """Return a callback that raises in the third batch."""
    from fastai.callback.core import Callback

    def stop(callback) -> None:
        if callback.learn.iter == 2:
            raise error

    return type("Raising", (Callback,), {event: stop, "order": order, "run_valid": False})()


@pytest.mark.parametrize("wrapped", [False, True], ids=["fastai's", "PyTorch's"])
def test_a_bad_batch_is_cancelled(wrapped: bool) -> None:
    from halfstep.integrations.fastai import MixedPrecision

    cancelled, weights, states = [], [], []
    learn = learner(
        MixedPrecision(),
        watching("after_cancel_step", cancelled),
        watching("before_batch", weights, lambda learn: by_hand.weights(learn.model)),
        watching("before_batch", states, lambda learn: copy.deepcopy(learn.opt.state_dict())),
        broken=4,
        wrapped=wrapped,
    )
    fit(learn)
    assert cancelled == [3]
    torch.testing.assert_close(weights[3], weights[4], rtol=0, atol=0)
    torch.testing.assert_close(states[3]["state"], states[4]["state"], rtol=0, atol=0)
    assert not torch.equal(weights[2][0], weights[3][0])
    assert not torch.equal(weights[4][0], weights[5][0])
    scaler = learn.mixed_precision.scaler
    assert scaler.counts()[:2] == (5, 1)
    assert [entry.taken for entry in scaler.history()] == [True] * 3 + [False] + [True] * 2
    assert all(param.isfinite().all() for param in learn.model.parameters())


def test_a_broken_learner_without_it_is_harmed() -> None:
    learn = learner(broken=4)
    fit(learn)
    assert not all(param.isfinite().all() for param in learn.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clipping_in_one_pass_is_that_of_fastai(dtype: torch.dtype) -> None:
    from fastai.callback.training import GradientClip

    from halfstep.integrations.fastai import MixedPrecision

    learners = [
        learner(MixedPrecision(dtype, max_norm=0.05)),
        learner(MixedPrecision(dtype), GradientClip(0.05)),
        learner(MixedPrecision(dtype)),
    ]
    for learn in learners:
        fit(learn)
    by_hand.assert_close(learners[0].model, learners[1].model)
    assert not torch.allclose(learners[0].model[0].weight, learners[2].model[0].weight, rtol=1e-3)
    if dtype == torch.float16:
        assert learners[0].mixed_precision.outcome.norm > 0.05


def test_gradients_accumulate() -> None:
    from fastai.callback.training import GradientAccumulation

    from halfstep.integrations.fastai import MixedPrecision

    learn = learner(MixedPrecision(), GradientAccumulation(64))
    fit(learn)
    scaler = halfstep.GradScaler()
    other = learner()
    optimizer = torch.optim.SGD(other.model.parameters(), lr=0.5)
    for number, (x, y) in enumerate(other.dls.train, 1):
        with halfstep.autocast("cpu", torch.float16):
            loss = F.cross_entropy(other.model(x).float(), y)
        scaler.scale(loss / 2).backward()
        if number % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    by_hand.assert_close(learn.model, other.model)
    assert learn.mixed_precision.scaler.counts().taken == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_policy_and_dtype_are_those_of_the_callback(dtype: torch.dtype) -> None:
    from halfstep.integrations.fastai import MixedPrecision

    seen, predicted = [], []
    learn = learner(
        MixedPrecision(dtype, policy="standard; @0:fp32"),
        watching("after_pred", predicted, lambda learn: learn.pred.dtype),
    )
    for module in (learn.model[0], learn.model[2]):
        module.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    fit(learn)
    assert seen[:2] == [torch.float32, dtype]
    assert set(predicted) == {torch.float32}
    del seen[:]
    with learn.no_logging(), learn.no_bar():
        learn.validate()
    assert seen == [torch.float32, dtype]


def test_bfloat16_skips_bad_batches_with_a_scaler_of_a_fixed_scale() -> None:
    from halfstep.integrations.fastai import MixedPrecision

    scaler = halfstep.GradScaler(init_scale=1.0, schedule=halfstep.Static())
    learn = learner(MixedPrecision(torch.bfloat16, scaler=scaler), broken=4)
    fit(learn)
    assert scaler.counts()[:2] == (5, 1)
    assert all(param.isfinite().all() for param in learn.model.parameters())


# --- what is broken off ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Batch", "Train", "Epoch", "Fit"])
@pytest.mark.parametrize("event", ["before_batch", "after_pred", "before_backward"])
def test_no_autocast_is_left_behind(name: str, event: str) -> None:
    import fastai.callback.core

    from halfstep.integrations.fastai import MixedPrecision

    error = getattr(fastai.callback.core, f"Cancel{name}Exception")
    inside, outside = [], []
    learn = learner(
        MixedPrecision(),
        raising(event, error),
        watching("after_pred", inside, lambda _: torch.is_autocast_enabled("cpu"), order=11),
        watching("after_batch", outside, lambda _: torch.is_autocast_enabled("cpu")),
    )
    fit(learn)
    assert set(inside) == {True}
    assert set(outside) == {False}
    assert not torch.is_autocast_enabled("cpu")
    assert learn.mixed_precision.scaler.counts().taken == (5 if name == "Batch" else 2)


def test_the_fit_after_an_interrupted_one_is_as_any() -> None:
    from halfstep.integrations.fastai import MixedPrecision

    stop = raising("after_pred", KeyboardInterrupt)
    learn = learner(MixedPrecision(), stop)
    with pytest.raises(KeyboardInterrupt):
        fit(learn)
    learn.remove_cb(stop)
    fit(learn)
    assert not torch.is_autocast_enabled("cpu")
    assert learn.mixed_precision.scaler.counts().taken == 8


def test_a_step_that_another_callback_cancels() -> None:
    from fastai.callback.core import CancelStepException

    from halfstep.integrations.fastai import MixedPrecision

    learn = learner(MixedPrecision(), raising("before_step", CancelStepException, order=5))
    fit(learn)
    assert learn.mixed_precision.scaler.counts() == (5, 0, 0, None)


# --- what lasts -----------------------------------------------------------------------------------


def test_a_second_fit_goes_on_with_the_scale_and_a_copy_has_it() -> None:
    from halfstep.integrations.fastai import MixedPrecision

    scaler = halfstep.GradScaler(init_scale=2.0**10, growth_interval=4)
    learn = learner(MixedPrecision(scaler=scaler))
    fit(learn)
    fit(learn)
    assert scaler.get_scale() == 2.0**13
    assert scaler.counts().taken == 12
    saved = scaler.state_dict()

    loaded = MixedPrecision()
    loaded.scaler.load_state_dict(saved)
    assert loaded.scaler.state_dict() == saved
    learn.opt = learn.dls = None  # as learn.export() does
    copied = pickle.loads(pickle.dumps(learn.mixed_precision.scaler))
    assert copied.state_dict() == saved
    assert pickle.loads(pickle.dumps(learn)).mixed_precision.scaler.state_dict() == saved


def test_a_search_of_the_learning_rate_leaves_the_scale_as_it_was(tmp_path: Path) -> None:
    from fastai.callback.schedule import LRFinder

    from halfstep.integrations.fastai import MixedPrecision

    scales, scaler = [], halfstep.GradScaler(init_scale=2.0**10, growth_interval=4)
    watch = watching("after_batch", scales, lambda _: scaler.get_scale())
    learn = learner(MixedPrecision(scaler=scaler), watch, num=20)
    learn.path = tmp_path
    fit(learn)
    before = scaler.state_dict()
    del scales[:]
    with learn.no_logging(), learn.no_bar(), learn.added_cbs([LRFinder(num_it=10)]):
        learn.fit(1)
    assert max(scales) > before["scale"]
    assert scaler.state_dict() == before


@pytest.mark.parametrize("wrapped", [False, True], ids=["fastai's", "PyTorch's"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_record_sees_the_steps_of_the_optimizer(wrapped: bool, clip: bool, tmp_path) -> None:
    from fastai.callback.training import GradientClip

    from halfstep.integrations.fastai import MixedPrecision

    learn = learner(MixedPrecision(), *([GradientClip(0.05)] * clip), broken=4, wrapped=wrapped)
    with halfstep.record(tmp_path, every=1):
        fit(learn)
    steps = read_run(tmp_path).steps
    assert [step.taken for step in steps] == [True] * 3 + [False] + [True] * 2
    assert [step.loss is not None for step in steps] == [True] * 6
    assert all(step.norm > 0.05 for step in steps if step.taken)
    # fastai's optimizers are not PyTorch's, and tell nobody of their steps.
    assert [step.share_lost_updates is not None for step in steps if step.taken] == [wrapped] * 5
