import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfstep._demo.train as module
from halfstep._demo.corpus import Corpus
from halfstep._demo.train import (
    PRECISIONS,
    DemoSettings,
    PrecisionRun,
    new_model,
    peak_memory,
    train,
    training_loop,
    zero_share,
)

SETTINGS = DemoSettings(size="tiny", steps=8)


@pytest.fixture(scope="module")
def corpus():
    return Corpus.load(None, context=32)


def trained(name: str, corpus: Corpus, settings: DemoSettings = SETTINGS) -> PrecisionRun:
    run = PrecisionRun(PRECISIONS[name], settings.steps)
    train(run, corpus, settings, lambda run: None, nullcontext())
    return run


@pytest.fixture(scope="module")
def runs(corpus):
    return {name: trained(name, corpus) for name in PRECISIONS}


def test_fp32_repeats_bit_for_bit(runs, corpus):
    torch.rand(7)  # what was drawn before must not matter
    again = trained("fp32", corpus)
    assert again.losses == runs["fp32"].losses
    assert again.held_out_loss == runs["fp32"].held_out_loss


def test_another_seed_is_another_training(runs, corpus):
    other = trained("fp32", corpus, DemoSettings(size="tiny", steps=8, seed=1))
    assert other.losses[0] != runs["fp32"].losses[0]


def test_all_runs_start_from_the_same_weights_and_see_the_same_data(monkeypatch, corpus):
    seen = []

    def spy(model, batches, *rest):
        batches = list(batches)
        weights = [p.clone() for p in model.parameters()]
        seen.append((weights, torch.cat([torch.cat(batch) for batch in batches])))
        return training_loop(model, batches, *rest)

    monkeypatch.setattr(module, "training_loop", spy)
    monkeypatch.setattr(module, "peak_memory", lambda device, work: 0)
    for name in PRECISIONS:
        trained(name, corpus)
    (weights, data), *others = seen
    assert len(others) == 3
    for other_weights, other_data in others:
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
        assert torch.equal(data, other_data)


def test_each_run_computes_in_its_dtype(monkeypatch, corpus):
    seen = {}

    class Spy(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.setdefault(torch.is_autocast_enabled("cpu"), set()).add(out.dtype)
            return out

    for name, precision in PRECISIONS.items():
        seen.clear()
        model = Spy(4, 5)
        data = [(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))]
        list(training_loop(model, data, 0.1, 6, precision.dtype, precision.scaling))
        assert seen == {name != "fp32": {precision.dtype}}


def test_training_learns(runs):
    for name in ("fp32", "bf16", "fp16"):
        run = runs[name]
        assert run.losses[-1] < run.losses[0] - 0.1
        assert run.held_out_loss < math.log(103)


def test_the_first_loss_is_per_character_whatever_it_is_averaged_over(runs, corpus):
    other = trained("fp32", corpus, DemoSettings(size="tiny", steps=1, mean_over=1000))
    assert other.losses[0] == pytest.approx(runs["fp32"].losses[0], rel=1e-5)


def test_fp16_loses_gradients_and_the_scaler_saves_them(runs):
    lost = {name: run.zero_share for name, run in runs.items()}
    assert lost["fp16-unscaled"] > 0.05
    assert lost["fp16"] < 0.001
    assert lost["fp32"] < 0.001
    assert lost["bf16"] < 0.001


def test_what_the_scaler_saves_is_seen_in_the_loss(runs):
    off = {name: abs(run.losses[-1] - runs["fp32"].losses[-1]) for name, run in runs.items()}
    assert off["fp16"] < 0.01 < off["fp16-unscaled"]


def test_only_the_scaled_run_has_a_scale(runs):
    assert runs["fp16"].scales == [2.0**16] * 8
    assert runs["fp16"].final_scale == 2.0**16
    assert [runs[name].scales for name in ("fp32", "bf16", "fp16-unscaled")] == [[], [], []]


def test_skipped_steps_are_noted(monkeypatch, corpus):
    """With a scale that is too large for the first steps."""

    class TooLarge(module.GradScaler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, init_scale=2.0**33, **kwargs)

    monkeypatch.setattr(module, "GradScaler", TooLarge)
    run = trained("fp16", corpus, DemoSettings(size="tiny", steps=4, mean_over=256))
    assert run.skipped == [0, 1, 2, 3]
    assert run.scales == [2.0**32, 2.0**31, 2.0**30, 2.0**29]
    untrained = new_model(corpus, DemoSettings(size="tiny"))
    assert run.held_out_loss == module.evaluate(untrained, corpus, "cpu")


def test_the_callback_sees_every_step_and_may_end_the_run(corpus):
    run = PrecisionRun(PRECISIONS["fp32"], 8)

    def stop(run):
        if len(run.losses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, corpus, SETTINGS, stop, nullcontext())
    assert len(run.losses) == len(run.seconds) == 3
    assert not run.is_finished
    assert run.training_loss == pytest.approx(sum(run.losses) / 3)


def test_lower_precision_needs_less_memory_and_the_count_repeats(runs, corpus):
    assert 0 < runs["bf16"].peak_memory < runs["fp32"].peak_memory
    assert trained("fp32", corpus).peak_memory == runs["fp32"].peak_memory


def test_peak_memory_counts_what_is_alive_together():
    def work():
        first = torch.zeros(1000)  # 4 kB
        second = first + 1  # 8 kB
        del first
        third = second.view(10, 100)  # no memory of its own
        third.add_(1)
        del second, third
        torch.zeros(1500)  # 6 kB alone

    assert peak_memory("cpu", work) == 8000


def test_zero_share_is_over_the_entries_of_all_parameters():
    model = nn.Linear(3, 1)
    model.weight.grad = torch.tensor([[0.0, -0.0, 1e-45]])
    model.bias.grad = torch.tensor([float("nan")])
    assert zero_share(model) == 0.5


def test_losses_and_times_are_robust_summaries():
    run = PrecisionRun(PRECISIONS["fp32"], steps=20)
    run.losses = [9.0] * 18 + [2.0, 4.0] * 10
    run.seconds = [50.0, 60.0] + [1.0] * 10 + [7.0]
    assert run.training_loss == 3.0
    assert run.step_seconds == 1.0


def test_the_model_is_the_same_for_a_seed(corpus):
    a, b = new_model(corpus, SETTINGS), new_model(corpus, SETTINGS)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
