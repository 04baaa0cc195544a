"""Recording beside other code: nothing of it breaks, and nothing false is said."""

import copy
import io
import math
import os
import warnings
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.device import DEVICE
from tests.record.training import Net, train
from tests.training import step_on
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._tools.record.files import LineWriter, file_of
from halfstep._tools.record.read import read_run
from halfstep.errors import RecordError


def sgd(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]


# --- other code goes on as without a record -------------------------------------------------------


def test_an_optimizer_that_steps_inside_of_backward(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with halfstep.record(tmp_path, every=1) as record:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
    assert record.num_steps == 3


def test_lazy_modules_are_measured_once_they_have_seen_a_batch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path, model=model, every=1) as record:
        for _ in range(3):
            step_on(optimizer, model(torch.ones(2, 3)).sum())
            optimizer.zero_grad()
    assert record.num_steps == 3


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*(deprecated|not supported)"
)
def test_tracing_a_model_in_a_sampled_step(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    with halfstep.record(tmp_path, model, every=1):
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert not read_run(tmp_path).notes


def test_fake_tensors_have_nothing_to_measure(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with halfstep.record(tmp_path, every=1), FakeTensorMode():
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    assert not read_run(tmp_path).samples


def test_float64_as_the_default_dtype(tmp_path: Path) -> None:
    scaler = halfstep.GradScaler(DEVICE, init_scale=2.0**10)
    torch.set_default_dtype(torch.float64)
    try:
        with halfstep.record(tmp_path, every=1):
            losses = train(Net().float().double(), 3, scaler=scaler)
    finally:
        torch.set_default_dtype(torch.float32)
    steps = read_run(tmp_path).steps
    assert [step.scale for step in steps] == [1024.0] * 3
    assert [step.loss for step in steps] == pytest.approx(losses)


def test_a_compiled_model_can_be_copied_and_saved_in_a_sampled_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].compile(backend="eager")
    with halfstep.record(tmp_path, model, every=1):
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
    twin(torch.ones(1, 2))  # its hooks do nothing


def test_warnings_as_errors_do_not_end_a_run_whose_record_fails(tmp_path: Path) -> None:
    class Broken:
        def log(self, step: int, scalars: object) -> None:
            raise ConnectionError

    with halfstep.record(tmp_path, sinks=[Broken()]), warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Net(), 3, dtype=torch.bfloat16)
    assert len(read_run(tmp_path).steps) == 3


def test_a_warning_is_shown_as_often_as_without_a_record(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    (optimizer,) = sgd(model)
    context = halfstep.autocast(DEVICE, torch.bfloat16, policy="standard; linear:fp32")
    with warnings.catch_warnings(record=True) as shown, halfstep.record(tmp_path, every=1):
        warnings.simplefilter("default")
        for _ in range(4):
            warnings.warn("one place", stacklevel=1)
            with context:  # its added rule is counted
                loss = model(torch.ones(1, 2)).sum()
            step_on(optimizer, loss)
    assert len(shown) == 1


class CountOps(TorchDispatchMode):
    """Count the ops below autograd."""

    num = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.num += 1
        return op(*args, **(kwargs or {}))


class CountFunctions(TorchFunctionMode):
    """Count the functions that are called."""

    num = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.num += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountOps, CountFunctions])
@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_mode_of_the_user_does_not_see_the_record(mode, has_scaler, tmp_path):
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    (optimizer,) = sgd(model)

    def count() -> int:
        scaler = halfstep.GradScaler(DEVICE, init_scale=8.0, enabled=has_scaler)
        with mode() as counting:
            for _ in range(2):
                scaler.scale(model(torch.ones(1, 2)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        return counting.num

    count()
    plain = count()
    with halfstep.record(tmp_path, model, every=1):
        assert count() == plain


def test_a_leaf_that_a_module_returns_keeps_no_hooks(tmp_path: Path) -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Parameter(torch.ones(2))

        def forward(self) -> torch.Tensor:
            return self.tokens

    model = Prompt()
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path, every=1):
        for _ in range(3):
            step_on(optimizer, model().sum())
    assert not model.tokens._backward_hooks


# --- loops that are written otherwise -------------------------------------------------------------


def test_a_loop_without_an_optimizer_is_not_sampled_for_ever(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with halfstep.record(tmp_path, every=1) as record:
        for _ in range(300):
            model(torch.ones(1, 2)).sum().backward()
        assert not nn.modules.module._global_forward_hooks
    assert record.num_steps == 0
    assert "no step of an optimizer was seen" in read_run(tmp_path).notes[0].text


@pytest.mark.parametrize("every", [1, 2, 3])
def test_two_optimizers_by_one_backward_pass(every: int, tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = sgd(first, second)
    model = nn.Sequential(first, second)
    losses = []
    with halfstep.record(tmp_path, every=every):
        for _ in range(6):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses += 2 * [loss.item()]
    run = read_run(tmp_path)
    assert [step.loss for step in run.steps] == pytest.approx(losses)
    assert len(run.samples) >= 6 // every
    for sample in run.samples:
        assert {t.kind for t in sample.tensors} >= {"output", "parameter_gradient"}


def test_the_norm_belongs_to_the_optimizer_whose_gradients_were_clipped(tmp_path: Path) -> None:
    models = nn.Linear(2, 1), nn.Linear(3, 1)
    optimizers, norms = sgd(*models), []
    with halfstep.record(tmp_path, every=0):
        for model in models:
            model(torch.full((1, model.in_features), 5.0)).sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for optimizer in optimizers:
            optimizer.step()
        for parameter in models[0].parameters():
            nn.utils.clip_grad_norm_(parameter, 1.0)  # one by one: not the norm of all
        optimizers[0].step()
    steps = read_run(tmp_path).steps
    assert [step.norm for step in steps[:1]] == pytest.approx(norms[:1])
    assert steps[2].norm is None


def test_a_loss_is_what_it_was_when_backward_began(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        value = loss.item()
        loss.detach().add_(100.0)  # a running mean, or all_reduce
        optimizer.step()
    assert read_run(tmp_path).steps[0].loss == pytest.approx(value)


def test_a_reentrant_checkpoint_is_no_loss(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    (optimizer,) = sgd(model)
    x = torch.ones(1, 2, requires_grad=True)
    with halfstep.record(tmp_path):
        loss = 3 * checkpoint(lambda x: model(x).sum(), x, use_reentrant=True)
        step_on(optimizer, loss)
    assert read_run(tmp_path).steps[0].loss == pytest.approx(loss.item())


def test_a_step_that_raises_is_forgotten(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError

    model = nn.Linear(2, 1)
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path):
        with pytest.raises(ArithmeticError):
            Failing(model.parameters(), lr=0.1).step()
        losses = [model(torch.full((1, 2), value)).sum() for value in (1.0, 2.0)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    (step,) = read_run(tmp_path).steps
    assert step.loss == pytest.approx(sum(loss.item() for loss in losses))


def test_an_optimizer_around_another_counts_once(tmp_path: Path) -> None:
    class Around(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = nn.Linear(2, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on its step tells of itself
    optimizer = Around(model.parameters(), lr=0.1)
    with halfstep.record(tmp_path) as record:
        for _ in range(3):
            step_on(optimizer, model(torch.ones(1, 2)).sum())
    assert record.num_steps == 3
    assert read_run(tmp_path).steps[0].optimizer == "Around"


def test_a_step_that_cannot_be_recorded_is_a_note(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, device="meta")  # its loss cannot be read
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path, every=1):
        for _ in range(2):
            model(torch.ones(1, 2, device="meta")).sum().backward()
            optimizer.step()
    (note, *_) = read_run(tmp_path).notes
    assert note.text.startswith("a step could not be recorded: ")


def test_setting_the_scale_is_no_step(tmp_path: Path) -> None:
    scaler = halfstep.GradScaler(DEVICE)
    with halfstep.record(tmp_path) as record:
        train(Net(), 2, scaler=scaler)
        scaler.update(new_scale=4.0)
        train(Net(), 1, scaler=scaler)
    assert record.num_steps == 3
    assert [step.step for step in read_run(tmp_path).steps] == [1, 2, 3]


def test_models_that_are_made_anew(tmp_path: Path) -> None:
    with halfstep.record(tmp_path, every=1):
        for _ in range(3):
            train(Net(), 2, dtype=torch.bfloat16)
    run = read_run(tmp_path)
    assert [model.name for model in run.models] == ["Net"] * 3
    assert all(model.modules for model in run.models)


def test_a_part_that_runs_before_the_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path):
        model[0](torch.ones(1, 2))
        step_on(optimizer, model(torch.ones(1, 2)).sum())
    run = read_run(tmp_path)
    assert [model.name for model in run.models] == ["Sequential"]
    names = [t.name for t in run.samples[0].tensors if t.kind == "parameter"]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


# --- where it began -------------------------------------------------------------------------------


class Owner(nn.Module):
    """Has a parameter of its own beside those of its modules, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(2))
        self.embed, self.fc = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.embed(x * self.gamma)))


@pytest.mark.parametrize(
    ("bad", "began_in"),
    [(("gamma", "fc.weight"), "fc"), (("gamma", "embed.weight", "fc.weight"), "head")],
)
def test_where_it_began(bad: tuple[str, ...], began_in: str, tmp_path: Path) -> None:
    model, scaler = Owner(), halfstep.GradScaler(DEVICE)
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        for name, parameter in model.named_parameters():
            if name in bad:
                parameter.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert read_run(tmp_path).culprits[0].began_in == began_in


def test_gradients_that_a_clip_by_nan_made_nan_began_nowhere(tmp_path: Path) -> None:
    model = Owner()
    (optimizer,) = sgd(model)
    with halfstep.record(tmp_path):
        halfstep.guard(optimizer, on_skips=lambda _: None)
        model(torch.ones(1, 2)).sum().backward()
        model.embed.weight.grad[0, 0] = math.nan
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert read_run(tmp_path).culprits[0].num_parameters == 4
    assert read_run(tmp_path).culprits[0].began_in is None


# --- the file -------------------------------------------------------------------------------------


def test_a_second_record_of_one_process_is_refused(tmp_path):
    with (
        halfstep.record(tmp_path),
        pytest.raises(RecordError, match="writing it already"),
        halfstep.record(tmp_path / ".." / tmp_path.name),
    ):
        pass
    with halfstep.record(tmp_path):  # goes on from the first
        pass
    assert len(read_run(tmp_path).starts) == 2


@pytest.mark.slow
def test_a_second_process_cannot_write_the_same_record(tmp_path: Path) -> None:
    code = f"import halfstep; halfstep.record({str(tmp_path)!r}).__enter__()"
    with halfstep.record(tmp_path):
        done = forked.python("-c", code, cwd=tmp_path)
    assert "RecordError" in done.err
    assert "another process is writing it" in done.err


def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    file_of(tmp_path, 0).write_text('{"loss": 1}\n')
    with pytest.raises(RecordError, match="is not the record of a run"), halfstep.record(tmp_path):
        pass
    assert file_of(tmp_path, 0).read_text() == '{"loss": 1}\n'


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    writer = LineWriter(file_of(tmp_path, 0))
    writer.write({"event": "run", "schema": 1, "started": "2026-01-01T00:00:00+00:00"})
    file = writer._file
    with open("/dev/full", "wb", buffering=0) as full:
        writer._file = full
        with pytest.raises(OSError, match="No space"):
            writer.write({"event": "note", "step": 1, "text": "lost"})
    file.write(b'{"event":"no')  # what had still been room for
    writer._file = file
    writer.write({"event": "note", "step": 2, "text": "kept"})
    writer.close()
    assert "kept" in [note.text for note in read_run(tmp_path).notes]


def test_records_end_in_any_order(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    (optimizer,) = sgd(model)
    backward, measure = torch.autograd.backward, nn.utils.clip_grad._get_total_norm

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    first, second = halfstep.record(tmp_path / "a", model), halfstep.record(tmp_path / "b", model)
    first.__enter__()
    second.__enter__()
    step()
    first.__exit__(None, None, None)
    step()
    second.__exit__(None, None, None)
    assert torch.autograd.backward is backward
    assert nn.utils.clip_grad._get_total_norm is measure
    for folder, num in (("a", 1), ("b", 2)):
        steps = read_run(tmp_path / folder).steps
        assert [None not in (step.loss, step.norm) for step in steps] == [True] * num
