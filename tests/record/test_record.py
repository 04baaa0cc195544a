"""What a record holds, and that recording changes nothing."""

import io
import math
import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.device import DEVICE
from tests.record.training import Net, train
from tests.scaler.containers import Facade, Parts
from tests.training import assert_same, step_on
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._pytorch.dispatch import has_onednn
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Run
from halfstep._tools.report.summarize import summarize
from halfstep.errors import HalfstepWarning
from halfstep.events import observers


def tensors(run: Run, number: int = 0) -> dict[tuple[str, str], object]:
    return {(t.kind, t.name): t for t in run.samples[number].tensors}


def net_and_scaler(scale: float = 2.0**10, **kwargs: object) -> tuple[Net, halfstep.GradScaler]:
    torch.manual_seed(0)
    return Net(), halfstep.GradScaler(DEVICE, init_scale=scale, **kwargs)  # type: ignore[arg-type]


# --- nothing changes ------------------------------------------------------------------------------


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.TransformerEncoder(layer, 2), nn.Flatten())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("make_model", [Net, transformer], ids=["net", "transformer"])
@pytest.mark.parametrize("is_scaled", [True, False], ids=["fp16", "bf16"])
def test_training_is_the_same_bit_for_bit(make_model, is_scaled, tmp_path: Path) -> None:
    def trained(is_recorded: bool) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = make_model()
        scaler = halfstep.GradScaler(DEVICE, init_scale=2.0**24) if is_scaled else None
        dtype = torch.float16 if is_scaled else torch.bfloat16
        if is_recorded:
            with halfstep.record(tmp_path, every=1):
                losses = train(model, dtype=dtype, scaler=scaler, max_norm=1.0)
        else:
            losses = train(model, dtype=dtype, scaler=scaler, max_norm=1.0)
        model.eval()
        with torch.no_grad():
            out = model(torch.ones(2, 6))
        return losses, [*model.state_dict().values(), out], torch.get_rng_state()

    plain, recorded = trained(False), trained(True)
    assert plain[0] == recorded[0]
    assert_same(plain[1], recorded[1])
    assert torch.equal(plain[2], recorded[2])
    assert len(read_run(tmp_path).samples) == 6


def test_evaluation_inside_a_sampled_step_keeps_its_fast_path(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = layer(x)
        with halfstep.record(tmp_path, layer, every=1):
            assert torch.equal(layer(x), expected)


def test_everything_is_put_back_after_an_error(tmp_path: Path) -> None:
    backward, norm = torch.autograd.backward, nn.utils.clip_grad._get_total_norm
    model, scaler = net_and_scaler()

    def fail(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError("a\nb")

    with pytest.raises(ZeroDivisionError), halfstep.record(tmp_path, every=1):
        train(model, 2, scaler=scaler, before_step=fail)
    assert torch.autograd.backward is backward
    assert nn.utils.clip_grad._get_total_norm is norm
    assert not observers()
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert read_run(tmp_path).error == "ZeroDivisionError: a\nb"


# --- steps ----------------------------------------------------------------------------------------


def test_steps_are_those_of_the_scaler(tmp_path: Path) -> None:
    model, scaler = net_and_scaler(2.0**30)
    with halfstep.record(tmp_path, every=0) as record:
        losses = train(model, 20, scaler=scaler, max_norm=1.0)
    run, history = read_run(tmp_path), scaler.history()
    assert record.num_steps == len(run.steps) == 20
    assert 0 < record.num_skipped == len(run.skipped) < 20
    for step, entry in zip(run.steps, history, strict=True):
        assert (step.optimizer, step.taken) == (entry.optimizer, entry.taken)
        assert (step.reason, step.scale) == (entry.reason, entry.scale)
        if entry.taken:
            assert math.isfinite(step.norm)
    assert [step.loss for step in run.steps] == pytest.approx(losses, rel=1e-6)
    assert [step.scale_after for step in run.steps[:-1]] == [s.scale for s in run.steps[1:]]
    assert [step.step for step in run.steps] == [*range(1, 21)]
    assert not run.without_end
    assert run.error is None


def test_the_norm_is_that_of_clipping_whoever_clips(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    norms = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path):
        for how in ("step", "torch", "none"):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
            if how == "torch":
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            scaler.step(optimizer, max_norm=1.0 if how == "step" else None)
            scaler.update()
            if how == "step":
                norms.append(scaler.outcome(optimizer).norm)
    steps = read_run(tmp_path).steps
    assert [step.norm for step in steps[:2]] == pytest.approx(norms)


def test_two_optimizers_that_skip_together_are_one_skipped_step(tmp_path: Path) -> None:
    model, scaler = Net(), halfstep.GradScaler()
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    with halfstep.record(tmp_path, every=0) as record:
        for value in (1.0, math.inf):
            for param in model.parameters():
                param.grad = torch.full_like(param, value)
            scaler.scale(torch.ones(()))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert (record.num_steps, record.num_skipped) == (2, 1)
    assert len(read_run(tmp_path).skipped) == len(optimizers) > 1


def test_without_a_scaler_each_step_of_an_optimizer_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    with halfstep.record(tmp_path, every=4) as record:
        losses = train(model, 5, dtype=torch.bfloat16, max_norm=1.0)
    run = read_run(tmp_path)
    assert (record.num_steps, record.num_skipped) == (5, 0)
    assert [step.loss for step in run.steps] == pytest.approx(losses)
    assert all(step.norm is not None and step.scale is None for step in run.steps)
    assert [sample.step for sample in run.samples] == [1, 2, 4]
    assert [sample.scale for sample in run.samples] == [1.0, 1.0, 1.0]


def test_a_disabled_scaler_is_none(tmp_path: Path) -> None:
    scaler = halfstep.GradScaler(enabled=False)
    with halfstep.record(tmp_path):
        losses = train(Net(), 3, dtype=torch.bfloat16, scaler=scaler)
    steps = read_run(tmp_path).steps
    assert [step.loss for step in steps] == pytest.approx(losses)
    assert steps[0].scale is None


def test_the_loss_of_an_accumulated_step_is_the_sum(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path):
        losses = train(model, 3, scaler=scaler, micro_batches=4)
    assert [step.loss for step in read_run(tmp_path).steps] == pytest.approx(losses)


def test_the_course_of_the_loss_is_of_steps_with_as_many_micro_batches(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path):
        for num, micro_batches in ((1, 1), (4, 3)):
            losses = train(model, num, scaler=scaler, micro_batches=micro_batches)
    course = summarize(read_run(tmp_path)).loss
    assert course is not None
    assert course.first == pytest.approx(losses[0])


@pytest.mark.parametrize("is_scaled", [True, False])
def test_the_loss_of_a_closure_is_that_of_its_last_evaluation(is_scaled, tmp_path: Path) -> None:
    model, scaler = net_and_scaler(schedule=halfstep.Static())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        (scaler.scale(loss) if is_scaled else loss).backward()
        seen.append(loss.item())
        return loss

    model.eval()
    with halfstep.record(tmp_path):
        if is_scaled:
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer, closure)
            scaler.update()
        else:
            optimizer.step(closure)
    (step,) = read_run(tmp_path).steps
    assert len(seen) > 1
    assert step.loss == pytest.approx(seen[-1])


# --- skipped steps --------------------------------------------------------------------------------


def test_a_skipped_step_names_where_it_began(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()

    def overflow(step: int) -> None:
        if step == 3:  # what an overflow in the block's backward pass leaves
            for name, parameter in model.named_parameters():
                if name.startswith(("first", "block")):
                    parameter.grad.fill_(math.inf)

    with halfstep.record(tmp_path, model=model):
        train(model, 4, scaler=scaler, before_step=overflow)
    (culprits,) = read_run(tmp_path).culprits
    assert (culprits.step, culprits.optimizer, culprits.began_in) == (3, "SGD", "block.0")
    assert culprits.parameters == ("first.weight", "first.bias", "block.0.weight", "block.0.bias")
    assert culprits.num_parameters == 4


def test_messages_of_the_scaler_have_names_too(tmp_path: Path) -> None:
    model, scaler = net_and_scaler(max_consecutive_skips=2)

    def overflow(step: int) -> None:
        model.norm.bias.grad.fill_(math.inf)

    with halfstep.record(tmp_path), pytest.warns(UserWarning, match=r"\n  norm\.bias: 16 inf"):
        train(model, 3, scaler=scaler, before_step=overflow)


def test_a_scaler_with_a_watch_of_its_own(tmp_path: Path) -> None:
    """PyTorch's scaler has no such method, and so a script's class may."""

    class Scaler(halfstep.GradScaler):
        def watch(self) -> None:  # type: ignore[override]
            raise AssertionError

    model, _ = net_and_scaler()
    with halfstep.record(tmp_path, model=model):
        train(model, 2, scaler=Scaler())
    assert len(read_run(tmp_path).steps) == 2


def test_a_bad_loss_began_nowhere_in_the_model(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path):
        scaler.scale(model(torch.full((2, 6), math.nan)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    run = read_run(tmp_path)
    assert run.steps[0].reason == "loss"
    assert math.isnan(run.steps[0].loss)
    assert run.culprits[0].began_in is None


# --- samples --------------------------------------------------------------------------------------


def test_a_sampled_step_is_what_is_in_the_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(5, 3)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, every=1):
        with halfstep.autocast(DEVICE, torch.float16):
            out = model(x)
        scaler.scale(out.float().sum()).backward()
        gradient = model[0].weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    run = read_run(tmp_path)
    found = tensors(run)
    assert run.samples[0].scale == 8.0
    weight = found["parameter_gradient", "0.weight"]
    assert weight.amax == gradient.abs().max().item()
    assert found["output", "0"].dtype == "float16"
    assert found["output_gradient", "0"].amax == 8.0  # the scale
    assert found["parameter", "0.weight"].size == 6
    # The container returns what its last module does, and is not told a second time.
    assert ("output", "(model)") not in found


def test_names_order_policy_and_size_of_the_model(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path):
        train(model, 1, scaler=scaler)
    run = read_run(tmp_path)
    assert run.header.device == DEVICE
    assert "thread" in run.header.machine
    (event,) = run.models
    assert event.name == "Net"
    assert event.parameters == sum(p.numel() for p in model.parameters())
    assert event.modules[:3] == ("first", "block.0", "block.1")
    assert event.modules[-2:] == ("head", "")
    (policy,) = run.policies
    assert (policy.device, policy.dtype, policy.text) == (DEVICE, "float16", "standard")
    kinds = {kind for kind, _ in tensors(run)}
    assert kinds == {"parameter", "parameter_gradient", "output", "output_gradient"}


@pytest.mark.parametrize(
    ("every", "expected"),
    [(3, [1, 2, 3, 6]), (5, [1, 2, 4, 5]), (50, [1, 2, 4, 8]), (1, [*range(1, 9)])],
)
def test_which_steps_are_sampled(tmp_path: Path, every: int, expected: list[int]) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path, every=every):
        train(model, 8, scaler=scaler)
    assert [sample.step for sample in read_run(tmp_path).samples] == expected


def test_evaluation_and_recomputation_are_not_measured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, model, every=1):
        with torch.no_grad():
            model(torch.full((9, 3), 1e4))
        x = torch.ones(2, 3)
        x = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=False)
        step_on(optimizer, model[1](x).sum())
    found = tensors(read_run(tmp_path))
    assert found["output", "0"].size == 6
    assert found["output", "0"].amax < 100


def test_samples_wait_once_for_a_backward_pass_that_is_not_seen(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, every=1):
        for _ in range(10):
            (model.weight.grad,) = torch.autograd.grad(model(torch.ones(2)), model.weight)
            optimizer.step()
    assert [each.step for each in read_run(tmp_path).samples] == [5, 6, 7, 8, 9, 10]


def test_the_gradient_of_several_backward_passes_is_their_sum(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, every=1):
        for value in (1.0, 2.0, 4.0):
            model(torch.full((1, 1), value)).sum().backward()
        optimizer.step()
    found = tensors(read_run(tmp_path))
    assert found["parameter_gradient", "weight"].amax == 7.0
    assert found["output", "(model)"].size == 3


@pytest.mark.parametrize(
    ("kind", "is_scaled", "wanted"),
    [
        (Facade, True, [(1, "Facade"), (2, "Facade")]),
        (Parts, True, [(1, "Parts"), (2, "Parts")]),
        (Parts, False, [(1, "Parts"), (2, "Parts")]),
        # PyTorch tells of the steps of those that called its Optimizer.__init__ only.
        (Facade, False, [(1, "SGD"), (1, "AdamW"), (2, "SGD"), (2, "AdamW")]),
    ],
)
def test_steps_of_a_container(kind, is_scaled, wanted, tmp_path):
    model, scaler = net_and_scaler()
    container = kind(
        [torch.optim.SGD(model.first.parameters()), torch.optim.AdamW(model.head.parameters())]
    )
    with halfstep.record(tmp_path):
        for _ in range(2):
            container.zero_grad()
            loss = model(torch.ones(2, 6)).sum()
            if is_scaled:
                scaler.scale(loss).backward()
                scaler.step(container, max_norm=math.inf)
                scaler.update()
            else:
                step_on(container, loss)
    steps = read_run(tmp_path).steps
    assert [(each.step, each.optimizer) for each in steps] == wanted
    assert all(each.norm is not None for each in steps) or not is_scaled
    assert steps[0].share_lost_updates is not None


def test_a_second_model_has_a_prefix(tmp_path: Path) -> None:
    generator, critic = nn.Linear(2, 2), Net()
    critic.first = nn.Linear(2, 16)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    with halfstep.record(tmp_path):
        critic(generator(torch.ones(1, 2))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    run = read_run(tmp_path)
    assert [model.name for model in run.models] == ["Linear", "Net"]
    assert run.models[0].modules == ("",)
    assert "Net[1].block.0" in run.models[1].modules
    assert ("parameter", "weight") in tensors(run)
    assert ("parameter", "Net[1].head.weight") in tensors(run)


@pytest.mark.slow
def test_a_model_that_is_gone_is_freed(tmp_path: Path) -> None:
    import gc
    import weakref

    model, scaler = net_and_scaler()
    ref = weakref.ref(model.head.weight)
    with halfstep.record(tmp_path):
        train(model, 2, scaler=scaler)
        del model
        gc.collect()
        assert ref() is None


# --- compiled models ------------------------------------------------------------------------------


class Part(nn.Module):
    """A part of a model that can be compiled: PyTorch does not compile its own modules alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, recorded or not
@pytest.mark.parametrize("how", ["torch.compile", "in place", "part"])
def test_compiled_models_are_not_compiled_again(how: str, tmp_path: Path) -> None:
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Net().eval()
    if how == "torch.compile":
        model = torch.compile(model, backend=backend, fullgraph=True)
    elif how == "in place":
        model.compile(backend=backend, fullgraph=True)
    else:
        model.block, model.head = Part(model.block), Part(model.head)
        model.block.compile(backend=backend)
        model.head.compile(backend=backend)
    given = model if how == "in place" else None
    with halfstep.record(tmp_path, given, every=2):
        train(model, 6, dtype=torch.bfloat16)
    assert compilations == (2 if how == "part" else 1)
    run = read_run(tmp_path)
    found = tensors(run, 1)
    head = "head.layer.weight" if how == "part" else "head.weight"
    assert ("parameter_gradient", head) in found
    assert (("output", "first") in found) == (how == "part")
    assert "compiled" in run.notes[0].text
    assert len(run.steps) == 6


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), SystemExit(0)])
def test_how_a_run_ended(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), halfstep.record(tmp_path):
        raise error
    expected = {KeyboardInterrupt: "KeyboardInterrupt", SystemExit: "SystemExit: 3"}[type(error)]
    assert read_run(tmp_path).error == (None if error.args == (0,) else expected)


KILLED = Path(__file__).parent / "corpus" / "killed.py"


@pytest.mark.slow
def test_a_killed_run_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = forked.python(KILLED, tmp_path, cwd=tmp_path, environ=environ)
    assert done.code == -signal.SIGKILL, done.err
    run = read_run(tmp_path)
    assert len(run.steps) == 7
    assert [sample.step for sample in run.samples] == [1, 2, 4, 5]
    assert run.without_end
    with halfstep.record(tmp_path):
        train(Net(), 2, scaler=halfstep.GradScaler(DEVICE))
    assert [step.step for step in read_run(tmp_path).steps] == [*range(1, 10)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path) as record:
        train(model, 2, scaler=scaler)
        child = os.fork()
        if child == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step_on(optimizer, model(torch.ones(1, 6)).sum())
            record.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(model, 1, scaler=scaler)
    run = read_run(tmp_path)
    assert len(run.steps) == 3
    assert not run.without_end


def test_the_rank_comes_from_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with halfstep.record(tmp_path):
        pass
    run = read_run(tmp_path)
    assert run.ranks == (2,)
    assert run.header.world_size == 4


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path) as record, open("/dev/full", "wb", buffering=0) as full:
        train(model, 1, scaler=scaler)
        record._recorder._writer._file.close()
        record._recorder._writer._file = full
        with pytest.warns(UserWarning, match=r"can no longer write: .*No space") as warned:
            train(model, 70, scaler=scaler)
    assert record.num_steps == 71
    assert len(warned) == 1
    seen = record._recorder.seen
    assert (seen.num_written, seen.problem) == (1, "No space left on device")


def test_threads_write_one_line_after_another(tmp_path: Path) -> None:
    with halfstep.record(tmp_path) as record, SlowFile(tmp_path / "rank0.jsonl", "ab") as slow:
        record._recorder._writer._file.close()
        record._recorder._writer._file = slow
        say = record._recorder.say
        threads = [threading.Thread(target=say, args=(f"note {i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    notes = [note.text for note in read_run(tmp_path).notes]
    assert sorted(notes) == [f"note {i}" for i in range(4)]
    assert "" not in (tmp_path / "rank0.jsonl").read_text().splitlines()


class SlowFile(io.FileIO):
    def write(self, line):
        time.sleep(0.02)
        return super().write(line)


def test_a_scaler_of_pytorch_is_not_recorded_in_silence(tmp_path: Path) -> None:
    """Its losses are scaled when backward() gets them, and steps it skips are no steps."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40)
    step = torch.amp.GradScaler.step
    with halfstep.record(tmp_path), pytest.warns(HalfstepWarning) as warned:
        train(Net(), scaler=scaler)  # type: ignore[arg-type]
    assert torch.amp.GradScaler.step is step
    (text,) = {note.text for note in read_run(tmp_path).notes if "GradScaler" in note.text}
    assert [str(each.message) for each in warned] == [f"halfstep.record: {text}"]
    assert "recorded multiplied by its scale, and the steps that it skips are missing" in text


def test_a_disabled_scaler_of_pytorch_is_no_matter(tmp_path: Path) -> None:
    with halfstep.record(tmp_path):
        train(Net(), scaler=torch.amp.GradScaler(DEVICE, enabled=False))  # type: ignore[arg-type]
    run = read_run(tmp_path)
    assert len(run.steps) == 6
    assert not run.notes


# --- buffers --------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """A net with running statistics, a mask with -inf, and a range that begins at inf."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
        self.register_buffer("low", torch.tensor(math.inf), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.low = torch.minimum(self.low, x.detach().nan_to_num().min())
        self.seen = x.detach().sum()
        return self.head(self.norm(x) @ self.mask.softmax(-1))


def train_with_a_broken_batch(
    model: nn.Module, broken: int, scaler: halfstep.GradScaler | None = None, num: int = 6
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, num + 1):
        x = torch.ones(4, 6)
        x[0, 0] = math.nan if step == broken else 2.0
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if scaler is None:
            # The loss of a careful loop.
            loss.nan_to_num().backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def buffers_in(folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    return [(each.step, each.names) for each in read_run(folder).buffers]


RUINED = ("norm.running_mean", "norm.running_var")


class WithTables(WithBuffers):
    """A mask that is filled in the first forward pass, and a buffer that begins as NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.is_filled = False
        self.register_buffer("causal", torch.zeros(6, 6))
        self.register_buffer("last", torch.full((3,), math.nan))
        self.register_buffer("unused", torch.full((3,), math.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_filled:
            self.causal.copy_(self.mask)
            self.is_filled = True
        output = super().forward(x)
        self.last.copy_(output.detach()[0])
        return output


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("every", [0, 1, 50])
@pytest.mark.parametrize("is_given", [False, True])
def test_buffers_that_are_filled_in_the_first_forward_pass_are_not_named(
    tmp_path: Path, overflows: bool, every: int, is_given: bool
) -> None:
    model = WithTables()
    model.head.bias.data.fill_(2.0**10 * overflows)
    scaler = halfstep.GradScaler(DEVICE, init_scale=2.0**118 if overflows else 2.0**10)
    with halfstep.record(tmp_path, model if is_given else None, every=every):
        train_with_a_broken_batch(model, 0, scaler)
    assert (scaler.counts().skipped > 0) == overflows
    assert buffers_in(tmp_path) == []


def nan_in_its_statistics() -> nn.Module:
    model = WithBuffers()
    model.norm.running_mean.fill_(math.nan)
    return model


@pytest.mark.parametrize(
    ("make", "options", "is_scaled", "batches", "found"),
    [
        # The first buffer is overwritten by the next batch.
        (WithBuffers, {}, True, (3, 6), [(3, ("seen", *RUINED)), (4, RUINED)]),
        (WithBuffers, {"every": 50}, False, (3, 6), [(4, RUINED)]),  # at the next sample
        (WithBuffers, {"every": 0, "model": True}, False, (3, 6), [(6, RUINED)]),  # at the end
        (WithBuffers, {"every": 1, "restores": True}, True, (3, 6), []),
        (WithTables, {"every": 1}, True, (3, 3), [(3, ("seen", "last", *RUINED))]),
        (nan_in_its_statistics, {"every": 1}, True, (0, 6), [(1, RUINED[:1])]),
    ],
)
def test_buffers_that_a_step_ruins_are_named(make, options, is_scaled, batches, found, tmp_path):
    model, given = make(), dict(options)
    module = {"module": model} if given.pop("restores", False) else {}
    scaler = halfstep.GradScaler(DEVICE, init_scale=2.0**10, **module) if is_scaled else None
    if given.get("model"):
        given["model"] = model
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", HalfstepWarning)
        with halfstep.record(tmp_path, **given):
            train_with_a_broken_batch(model, batches[0], scaler, batches[1])
    assert buffers_in(tmp_path) == found
    texts = [str(each.message) for each in warned if "are inf or NaN" in str(each.message)]
    assert all(f"after step {found[0][0]}" in text for text in texts)
    assert bool(texts) == bool(found)


@pytest.mark.filterwarnings("ignore:halfstep.record. after step 4, buffers")
def test_buffers_that_a_forward_pass_ruins_before_an_error_are_of_the_next_step(tmp_path):
    model = WithBuffers()
    with suppress(ZeroDivisionError), halfstep.record(tmp_path):
        train_with_a_broken_batch(model, 0, num=4)
        1 / bool(model(torch.full((4, 6), math.nan)).isfinite().any())
    assert buffers_in(tmp_path) == [(5, ("seen", *RUINED))]


def test_a_second_segment_with_a_good_checkpoint_begins_with_good_buffers(tmp_path: Path) -> None:
    for broken in (2, 0):
        _, scaler = net_and_scaler()
        with warnings.catch_warnings(action="ignore"), halfstep.record(tmp_path):
            train_with_a_broken_batch(WithBuffers(), broken, scaler, num=3)
    assert buffers_in(tmp_path)[-1] == (3, ())


# --- wrong use ------------------------------------------------------------------------------------


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"record\(model=str\): pass a torch.nn.Module"):
        halfstep.record(tmp_path, model="net")
    for every in (-1, halfstep.GradScaler()):
        with pytest.raises(ValueError, match=r"every=.*: pass the number of steps between samples"):
            halfstep.record(tmp_path, every=every)
    assert not [*tmp_path.iterdir()]


def test_a_record_is_entered_once(tmp_path: Path) -> None:
    with halfstep.record(tmp_path) as record:
        pass
    with pytest.raises(halfstep.CallOrderError, match="make a new one"):
        record.__enter__()


def test_a_record_inside_another(tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    with halfstep.record(tmp_path / "a", every=2):
        with halfstep.record(tmp_path / "b", every=1):
            train(model, 2, scaler=scaler)
        train(model, 1, scaler=scaler)
    assert len(read_run(tmp_path / "a").steps) == 3
    assert len(read_run(tmp_path / "b").steps) == 2


def test_plain_autocast_of_pytorch_is_a_policy(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(torch.randn(8, 6)).float().square().mean()
        step_on(optimizer, loss)
    (policy,) = read_run(tmp_path).policies
    assert (policy.device, policy.dtype, policy.text) == (DEVICE, "bfloat16", "torch")


def test_float16_is_measured_under_an_autocast_to_bfloat16(tmp_path: Path) -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sums", torch.zeros(6, dtype=torch.float16, device=DEVICE))
            self.cast = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.cast(x.half()).float() + self.sums)

    model = Counts().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, every=1):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(torch.randn(8, 6, device=DEVICE)).float().square().mean()
        step_on(optimizer, loss)
    assert len(read_run(tmp_path).steps) == 1


def test_the_policy_is_that_of_most_calls(tmp_path: Path) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            with halfstep.autocast(DEVICE, torch.bfloat16):
                return self.norm(x @ self.head.weight)

    with halfstep.record(tmp_path):
        train(Mixed(), 2)
    (policy,) = read_run(tmp_path).policies
    assert policy.dtype == "float16"


class AsksItsPart(nn.Module):
    """One that asks its own part for a shape while it is built, inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.width = self.inner(torch.ones(1, 4)).shape[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class AsksItsParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([AsksItsPart(), AsksItsPart()])
        self.head = nn.Linear(4, 1)
        self.width = self(torch.ones(1, 4)).shape[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


def test_parts_that_are_called_while_a_model_is_built_are_no_models(tmp_path: Path) -> None:
    with halfstep.record(tmp_path):
        _other = AsksItsParts()  # such as the one that a trainer builds anew
        model = AsksItsParts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step_on(optimizer, model(torch.ones(2, 4)).mean())
    run = read_run(tmp_path)
    (event,) = run.models
    assert event.name == "AsksItsParts"
    names = {name for kind, name in tensors(run) if kind == "parameter"}
    assert names == {name for name, _ in model.named_parameters()}


# --- several optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "scaled", "skipped"])
def test_each_optimizer_has_the_losses_since_the_step_before(how: str, tmp_path: Path) -> None:
    """As in a GAN: two losses for one optimizer, one for the other, of the same class."""
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in (first, second)]
    scaler = halfstep.GradScaler(DEVICE, enabled=how != "plain")
    seen = []
    with halfstep.record(tmp_path):
        for step in range(3):
            x = torch.full((2, 4), step + 1.0)
            bad = math.inf if how == "skipped" and step == 0 else 1.0
            sums = []
            for optimizer, models in zip(optimizers, ([first, first], [second]), strict=True):
                optimizer.zero_grad()
                losses = [model(x).square().mean() + 1 for model in models]
                for loss in losses:
                    scaler.scale(loss).backward()
                optimizer.param_groups[0]["params"][0].grad.mul_(bad)
                scaler.step(optimizer)
                sums.append(sum(loss.item() for loss in losses))
            scaler.update()
            seen.append(sums)
    steps = read_run(tmp_path).steps
    assert [step.number for step in steps] == [1, 2] * 3
    assert [step.loss for step in steps] == pytest.approx([x for sums in seen for x in sums])


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_loss_is_multiplied_by_the_gradient_of_its_pass(is_scaled, tmp_path: Path) -> None:
    """As the score of real examples that the critic of a Wasserstein GAN maximises."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = halfstep.GradScaler(DEVICE, enabled=is_scaled)
    with halfstep.record(tmp_path), torch.device(DEVICE):  # a function mode: backward sees it twice
        real, fake = model(torch.ones(4)) * 0 + 5, model(torch.zeros(4)) * 0 + 2
        half = torch.tensor([0.5])
        scaler.scale(real).backward(torch.tensor([-1.0]))
        scaler.scale(fake.mean()).backward(torch.tensor(1.0))
        torch.autograd.backward([scaler.scale(model(torch.ones(4)) * 0 + 10)], [half])
        scaler.step(optimizer)
        scaler.update()
    assert [step.loss for step in read_run(tmp_path).steps] == pytest.approx([-5 + 2 + 5])


@pytest.mark.parametrize(
    ("combined", "loss"),
    [
        (lambda a, b: (a + b) / 2, 3.5),
        (lambda a, b: 0.25 * a + b, 3.25),
        (lambda a, b: torch.stack([a, b]).mean(), 3.5),
        (lambda a, b: a + b, 7.0),
    ],
)
def test_a_pass_of_several_scaled_losses_is_what_its_root_says(combined, loss, tmp_path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = halfstep.GradScaler(DEVICE)
    with halfstep.record(tmp_path):
        for _ in range(2):
            losses = [model(torch.ones(4)).sum() * 0 + value for value in (5, 2)]
            combined(*map(scaler.scale, losses)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [step.loss for step in read_run(tmp_path).steps] == pytest.approx([2 * loss])


def test_without_a_scaler_an_iteration_has_one_step_of_each_optimizer(tmp_path: Path) -> None:
    models = [nn.Linear(4, 1) for _ in range(3)]
    first, second, late = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    of = dict(zip((first, second, late), models, strict=True))
    # A GAN; its critic alone; a generator after two steps of the critic; another optimizer, later.
    order = [first, second] * 3 + [first] * 2 + [first, second] + [late] * 2
    with halfstep.record(tmp_path, every=2) as record:
        current = []
        for optimizer in order:
            current.append(record.current_step)
            step_on(optimizer, of[optimizer](torch.ones(2, 4)).mean())
            optimizer.zero_grad()
    run = read_run(tmp_path)
    numbers = [1, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert [step.step for step in run.steps] == numbers
    assert record.num_steps == run.num_steps == 8
    # Of two optimizers, the next is expected: the critic's second step in a row is not.
    assert current == [1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 7]
    sampled = {(sample.step, tensor.name) for sample in run.samples for tensor in sample.tensors}
    assert {name for _, name in sampled} >= {"weight", "bias"}


@pytest.mark.parametrize("how", ["plain", "one update", "an update each", "a scaler each"])
def test_a_step_of_a_gan_is_counted_once_however_it_is_scaled(how: str, tmp_path: Path) -> None:
    models = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in models]
    scalers = [halfstep.GradScaler(DEVICE, enabled=how != "plain") for _ in models]
    if how != "a scaler each":
        scalers[1] = scalers[0]
    with halfstep.record(tmp_path) as record:
        for _ in range(20):
            for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
                scaler.step(optimizer)
                if how != "one update":
                    scaler.update()
            if how == "one update":
                scaler.update()
    run = read_run(tmp_path)
    assert record.num_steps == run.num_steps == summarize(run).steps.num == 20
    assert len(run.steps) == 40


def products_seen(record: halfstep.record) -> dict[str, int]:
    return record._recorder.seen.products


class Lowered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0].float()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return 2 * x  # a loss that multiplies by the head itself has a result in float32 too

    @staticmethod
    def backward(ctx, *gradients):
        return 2 * gradients[0]


# A CPU without kernels for bfloat16 computes convolutions in float32.
LOWERS_CONVOLUTIONS = DEVICE != "cpu" or has_onednn(torch.bfloat16)
OF_CONVOLUTIONS = "bfloat16" if LOWERS_CONVOLUTIONS else "float32"


@pytest.mark.parametrize(
    ("make", "dtype", "products"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), None, {"float32": 2}),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.float16, {"float16": 2}),
        (lambda: nn.Linear(4, 1).double(), torch.float16, {"float64": 1}),
        (lambda: nn.Linear(4, 1).bfloat16(), None, {"bfloat16": 1}),
        (lambda: nn.Bilinear(4, 4, 1), None, {"float32": 1}),
        (lambda: nn.LSTM(4, 1), None, {"float32": 1}),
        (lambda: nn.Conv1d(1, 1, 2), torch.bfloat16, {OF_CONVOLUTIONS: 1}),
        (lambda: nn.MultiheadAttention(4, 1), None, {"float32": 4}),
        (lambda: nn.LayerNorm(4), torch.bfloat16, {}),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.ReflectionPad1d(1)),
            torch.bfloat16,
            {"bfloat16": 1},
        ),
    ],
)
def test_products_are_counted_by_the_dtype_in_which_they_ran(make, dtype, products, tmp_path):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 1, 4, dtype=next(model.parameters()).dtype)
    num = {nn.Bilinear: 2, nn.MultiheadAttention: 3}.get(type(model), 1)
    with halfstep.record(tmp_path) as record:
        for _ in range(3):  # two are sampled
            with halfstep.autocast(DEVICE, dtype, enabled=dtype is not None):
                y = model(*[x] * num)
            step_on(optimizer, (y[0] if isinstance(y, tuple) else y).sum())
    assert products_seen(record) == {name: 2 * num for name, num in products.items()}
    assert [each.num for each in read_run(tmp_path).products] == [products] * (2 * bool(products))


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (torch.compile(nn.Linear(4, 4), backend="aot_eager"), {"hidden": 1}),
        (lambda x: Lowered.apply(x @ x), {"hidden": 1, "float32": 1}),
        (lambda x: Doubled.apply(x @ x), {"custom": 1, "float32": 1}),
        (partial(checkpoint, lambda x: x @ x, use_reentrant=True), {"float32": 1}),
        (partial(checkpoint, lambda x: x @ x, use_reentrant=False), {"float32": 1}),
        (lambda x: torch.lgamma(x) + x.cummax(0)[0], {}),
    ],
)
def test_functions_that_hide_products_are_counted_apart(function, products, tmp_path):
    weight = nn.Parameter(torch.ones(4, 4))
    with halfstep.record(tmp_path) as record:
        function(weight).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
    assert products_seen(record) == products


def test_two_optimizers_of_one_backward_pass_have_its_loss(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = halfstep.GradScaler(DEVICE)
    with halfstep.record(tmp_path):
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    first, other, *_ = read_run(tmp_path).steps
    assert first.loss == other.loss
    assert first.loss is not None


def test_an_optimizer_that_is_made_anew_has_the_number_of_the_old_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    with halfstep.record(tmp_path):
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step_on(optimizer, model(torch.ones(2, 4)).mean())
            del optimizer
    assert [step.number for step in read_run(tmp_path).steps] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["a parameter", "after accumulation", "a module", "none"])
def test_hooks_that_see_the_scale_are_noted(kind: str, tmp_path: Path) -> None:
    model, scaler = net_and_scaler()
    match kind:
        case "a parameter":
            next(model.parameters()).register_hook(lambda g: g.clamp(-1, 1))
        case "after accumulation":
            next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
        case "a module":
            [*model.children()][-1].register_full_backward_hook(lambda m, g, o: None)
    with halfstep.record(tmp_path, every=1):
        train(model, dtype=torch.float16, scaler=scaler)
    noted = [n.text for n in read_run(tmp_path).notes if "are multiplied by the scale" in n.text]
    assert len(noted) == (kind != "none")


# --- what it costs --------------------------------------------------------------------------------


def test_a_sample_of_many_tensors_has_the_worst_some_by_name_and_sums(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(300)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.record(tmp_path, every=1, model=model):
        for _ in range(2):
            sum(
                (p * (torch.nan if n == 221 else 1e-9 if n == 233 else 1)).sum()
                for n, p in enumerate(model)
            ).backward()  # type: ignore[union-attr]
            optimizer.step()
    run = read_run(tmp_path)
    names = [{t.name for t in s.tensors if t.kind == "parameter_gradient"} for s in run.samples]
    assert {"221", "233", "0", "(others)"} <= names[0] == names[1]
    assert len(names[0]) == 257
    gradients = [t for t in run.samples[0].tensors if t.kind == "parameter_gradient"]
    assert sum(t.size for t in gradients) == 600
    assert any("at most 256 of a kind one by one" in note.text for note in run.notes)
    assert (tmp_path / "rank0.jsonl").stat().st_size / 2 < 400_000


@pytest.mark.slow
def test_a_tiny_step_makes_few_calls(tmp_path: Path) -> None:
    """There were 223: the numbers of each step went through a tensor to its line."""
    script = Path(__file__).parent / "corpus" / "tiny_steps.py"
    done = forked.python(script, tmp_path / "out", cwd=tmp_path)
    assert float(done.out) < 160, done.err


def test_numbers_of_float64_that_float32_has_not_stay_finite(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones((), dtype=torch.float64, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with halfstep.record(tmp_path, model=nn.ParameterList([weight])):
        for _ in range(3):
            optimizer.zero_grad()
            (weight * 1e47).backward()
            optimizer.step()
    steps = read_run(tmp_path).steps
    assert [step.loss for step in steps] == [1e47] * 3
    assert steps[0].norm == pytest.approx(1e47)  # the one that was sampled
