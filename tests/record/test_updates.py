"""Lost updates in sampled steps, against a loop over the entries."""

import json
import math

import pytest
import torch
from tests.device import DEVICE
from tests.scaler.containers import Parts
from tests.training import step_on, take_step
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

import halfstep
from halfstep._master_weights.lost_updates import StepUpdates
from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize

BF16 = torch.bfloat16


def small() -> nn.Sequential:
    torch.manual_seed(0)
    # Not made in bfloat16: its random numbers are others in each version of PyTorch.
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(BF16)


def random_loss(model: nn.Module, scale: float = 1.0) -> Tensor:
    return (model(scale * torch.randn(5, 6).to(BF16)).float() + 0.5).square().mean()


def counted(before: Tensor, after: Tensor, grad: Tensor) -> list[int]:
    """Return updates and those lost: the slow reference."""
    updates = lost = 0
    for was, now, slope in zip(*(t.flatten().tolist() for t in (before, after, grad)), strict=True):
        updates += slope != 0
        lost += slope != 0 and was == now
    return [updates, lost]


def sampled_weights(folder):
    """Return updates and lost updates of each weight by sampled step, and the shares by step."""
    run = read_run(folder)
    weights = {
        sample.step: {
            each.name: [each.updates, each.lost_updates]
            for each in sample.tensors
            if each.kind == "parameter"
        }
        for sample in run.samples
    }
    return weights, {step.step: step.share_lost_updates for step in run.steps}


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_against_a_loop(tmp_path, has_scaler, fused):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0, enabled=has_scaler)
    expected = {}
    with halfstep.record(tmp_path, model=model, every=3):
        for number in range(1, 8):
            optimizer.zero_grad()
            scaler.scale(random_loss(model)).backward()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            expected[number] = {
                name: counted(before[name], p.detach(), p.grad)
                for name, p in model.named_parameters()
            }
            if number in (3, 4, 6, 7):  # the next step is not sampled
                assert not optimizer_module._global_optimizer_pre_hooks  # costs nothing
    weights, shares = sampled_weights(tmp_path)
    assert weights == {number: expected[number] for number in (1, 2, 3, 6)}
    updates, lost = (sum(pair) for pair in zip(*expected[6].values(), strict=True))
    assert 0 < lost < updates
    assert shares[6] == pytest.approx(lost / updates)
    assert [number for number, share in shares.items() if share is not None] == [1, 2, 3, 6]


@pytest.mark.parametrize("store", ["split", "float32"])
def test_what_is_kept_is_not_lost(tmp_path, store):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    halfstep.master_weights(optimizer, store)
    with halfstep.record(tmp_path, model=model, every=1):
        for _ in range(3):
            optimizer.zero_grad()
            step_on(optimizer, random_loss(model))
    weights, shares = sampled_weights(tmp_path)
    assert shares[3] < 0.2
    assert weights[3]["0.weight"][0] > 0


def test_what_a_container_steps_counts_by_what_it_holds(tmp_path):
    model = small()
    parts = [torch.optim.AdamW(each.parameters(), lr=1e-6) for each in (model[0], model[2])]
    container = Parts([halfstep.master_weights(each) for each in parts])
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0)
    with halfstep.record(tmp_path, model=model, every=1):
        for _ in range(3):
            take_step(scaler, container, random_loss(model))
    weights, shares = sampled_weights(tmp_path)
    assert shares[3] < 0.2
    assert weights[3]["0.weight"][0] > 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_has_no_updates(tmp_path, fused):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0)
    with halfstep.record(tmp_path, model=model, every=1):
        for scale in (1.0, math.inf, 1.0):
            take_step(scaler, optimizer, random_loss(model, scale))
    weights, shares = sampled_weights(tmp_path)
    assert [share is None for share in shares.values()] == [False, True, False]
    assert weights[2]["0.weight"] in ([None, None], [0, 0])


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_learning_rate_of_zero_loses_nothing(tmp_path, rate):
    model = small()
    groups = [{"params": model[0].parameters(), "lr": rate}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=1e-9, foreach=False)
    with halfstep.record(tmp_path, model=model), halfstep.lost_updates(optimizer, model) as lost:
        step_on(optimizer, random_loss(model))
    weights, shares = sampled_weights(tmp_path)
    assert weights[1]["0.weight"] == [0, 0]
    assert weights[1]["2.weight"] == [32, 32]
    assert shares[1] == 1.0
    assert math.isnan(lost.shares["0.weight"])


def test_each_optimizer_has_its_own_share_and_the_run_that_of_all_entries(tmp_path):
    model = small()
    some = torch.optim.SGD([model[0].bias], lr=1e-6)  # 8 entries, beside 84
    others = torch.optim.SGD([model[0].weight, *model[2].parameters()], lr=1.0)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0)
    with halfstep.record(tmp_path, model=model, every=2) as recording:
        for _ in range(4):
            scaler.scale(random_loss(model)).backward()
            scaler.step(some)
            scaler.step(others)
            scaler.update()
        seen = recording._recorder.seen
    run = read_run(tmp_path)
    first, second = (step.share_lost_updates for step in run.steps if step.step == 4)
    assert first > 0.9
    assert second < 0.3
    counts = [[*of_step.values()] for of_step in sampled_weights(tmp_path)[0].values()]
    updates, lost = torch.tensor(counts).sum((0, 1)).tolist()
    curve = summarize(run).lost_updates
    assert curve.mean == curve.recent == pytest.approx(lost / updates)
    assert seen.lost_updates / seen.updates == pytest.approx(lost / updates)


def test_a_large_weight_is_looked_at_in_part_and_counts_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr("halfstep._master_weights.lost_updates.LOOKED_AT", 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128, bias=False), nn.Linear(128, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with halfstep.record(tmp_path, model=model, every=1):
        model(torch.randn(4, 32)).square().mean().backward()
        model[1].weight.data += 1.0
        assert model[1].weight.grad is not None
        optimizer.param_groups.append(dict(optimizer.param_groups[0]))
        optimizer.param_groups[0]["params"] = [model[0].weight]
        optimizer.param_groups[1] |= {"params": [model[1].weight], "lr": 1.0}
        optimizer.step()
    weights, shares = sampled_weights(tmp_path)
    updates, lost = weights[1]["0.weight"]
    assert updates == lost < 32 * 128
    assert shares[1] == pytest.approx(32 * 128 / (32 * 128 + 128), abs=0.01)


@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_closure_counts_by_its_own_gradients(tmp_path, has_scaler):
    torch.manual_seed(0)
    model = nn.Embedding(30, 4)  # each step has gradients in rows of its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0, enabled=has_scaler)
    with halfstep.record(tmp_path, model=model, every=1):
        for step in range(3):
            rows = torch.arange(10 * step, 10 * step + 10)

            def closure():
                optimizer.zero_grad()
                loss = model(rows).square().sum()  # noqa: B023
                scaler.scale(loss).backward()
                return loss

            scaler.step(optimizer, closure)
            scaler.update()
    weights, shares = sampled_weights(tmp_path)
    assert weights == {step: {"weight": [40, 0]} for step in (1, 2, 3)}
    assert set(shares.values()) == {0.0}


@pytest.mark.parametrize("is_first", [False, True])
def test_what_a_step_does_around_that_of_its_base_class_counts(tmp_path, is_first):
    class Decaying(torch.optim.SGD):
        def decay(self):
            for param in self.param_groups[0]["params"]:
                param.data.mul_(0.5)

        def step(self, closure=None):
            if is_first:
                self.decay()
            super().step(closure)
            if not is_first:
                self.decay()

    model = nn.Linear(2, 2)
    torch.optim.SGD(model.parameters())  # from now on its step has hooks
    optimizer = Decaying(model.parameters(), lr=1e-30)
    with halfstep.record(tmp_path, model=model, every=1):
        step_on(optimizer, model(torch.ones(1, 2)).sum())
    assert sampled_weights(tmp_path)[0][1] == {"weight": [4, 0], "bias": [2, 0]}


def test_a_parameter_of_another_shape_does_not_count(tmp_path):
    class Shrinking(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].data = torch.ones(1, 2)

    model = nn.Linear(2, 2)
    optimizer = Shrinking(model.parameters(), lr=1e-30)
    with halfstep.record(tmp_path, model=model, every=1):
        step_on(optimizer, model(torch.ones(1, 2)).sum())
    assert sampled_weights(tmp_path)[0][1] == {"weight": [None, None], "bias": [2, 2]}


def test_ranks_add_their_counts(tmp_path):
    for rank in range(2):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
        with halfstep.record(tmp_path / str(rank), model=model, every=1):
            step_on(optimizer, random_loss(model))
        if rank:
            text = (tmp_path / "1" / "rank0.jsonl").read_text()
            (tmp_path / "0" / "rank1.jsonl").write_text(text)
    alone, _ = sampled_weights(tmp_path / "1")
    both, shares = sampled_weights(tmp_path / "0")
    assert both[1]["0.weight"] == [2 * count for count in alone[1]["0.weight"]]
    assert shares[1] == 1.0


@pytest.mark.parametrize("name", ["__init__", "counted"])
@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_count_that_fails_is_a_note(tmp_path, monkeypatch, name, error):
    def fail(*_):
        raise error("out of memory")

    monkeypatch.setattr(StepUpdates, name, fail)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, model=model, every=1) as run:
        step_on(optimizer, random_loss(model))
    assert run.num_steps == 1
    assert "lost updates cannot be counted: out of memory" in (tmp_path / "rank0.jsonl").read_text()


def test_sinks_get_the_share(tmp_path):
    seen = []

    class Seen:
        def log(self, step, scalars):
            seen.append((step, scalars.get("share_lost_updates")))

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with halfstep.record(tmp_path, model=model, every=2, sinks=[Seen()]):
        for _ in range(3):
            optimizer.zero_grad()
            step_on(optimizer, random_loss(model))
    assert (2, 1.0) in seen
    assert (3, None) in seen


def test_records_without_counts_are_read(tmp_path):
    model = small()
    with halfstep.record(tmp_path, model=model, every=1):
        random_loss(model).backward()
        torch.optim.SGD(model.parameters()).step()
    file = tmp_path / "rank0.jsonl"
    lines = []
    for line in map(json.loads, file.read_text().splitlines()):
        line.pop("share_lost_updates", None)
        for each in line.get("tensors", []):
            del each["updates"], each["lost_updates"]
        lines.append(json.dumps(line))
    file.write_text("\n".join(lines) + "\n")
    weights, shares = sampled_weights(tmp_path)
    assert shares == {1: None}
    assert weights[1]["0.weight"] == [None, None]


@pytest.mark.parametrize("every", [3, 4])
def test_optimizers_that_step_in_turn_are_both_sampled(tmp_path, every):
    model = small()
    names = {"AdamW": model[0], "SGD": model[2]}
    optimizers = [getattr(torch.optim, name)(part.parameters()) for name, part in names.items()]
    with halfstep.record(tmp_path, model=model, every=every):
        for _ in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
                step_on(optimizer, random_loss(model))
    steps = read_run(tmp_path).steps
    counted = [(step.step, step.optimizer) for step in steps if step.share_lost_updates is not None]
    assert {name for number, name in counted if number > 1} == {"AdamW", "SGD"}
    numbers = [number for number, _ in counted]
    sampled = [n for n in range(1, 13) if n < 3 or (n >= every and n % every < 2)]
    assert numbers == [(n + 1) // 2 for n in sampled]  # two steps in each iteration
