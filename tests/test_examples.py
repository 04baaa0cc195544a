"""Every script in examples/ runs, learns, and does what its docstring says.

Each is run as a user runs it, in a process of its own with warnings as errors, and again in this
process, where the calls it makes and the gradients its optimizers see are watched.
"""

import contextlib
import functools
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import halfstep

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"train_text"})
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Expected:
    """What is known of an example.

    Attributes:
        arguments: for a run that is short, but long enough to learn.
        measure: a pattern whose group is an error; first and last match are compared.
        falls_by: the factor between the two; of the first five seeds the worst has 1.3 times that
            (epochs_dataloader: 1.07 times).
        iteration: the calls of the scaler in one iteration.
        dtype: what the linear layers return.
        others: what they also return, autocast or not.
        states: the dtypes of parameters and gradients that optimizers see.
    """

    arguments: str
    measure: str
    falls_by: float
    iteration: str = "scale step update"
    dtype: torch.dtype = torch.float16
    others: frozenset[torch.dtype] = frozenset()
    states: frozenset[torch.dtype] = frozenset({torch.float32})


LOSS = r"loss +(-?\d\S*)"
EXPECTED = {
    "accumulate": Expected("--steps 400 --parts 2", LOSS, 3, "scale scale scale scale step update"),
    "basic_loop": Expected("--steps 250", LOSS, 10),
    "by_hand": Expected("--steps 100", LOSS, 2),
    "clip_gradients": Expected(
        "--steps 400", r"(?:step +1 +loss|squared error) +(\S+)", 2, "scale unscale_ step update"
    ),
    "clip_per_layer": Expected("--steps 120", LOSS, 30, "scale unscale_ step update"),
    "cpu_bf16": Expected("--steps 120", LOSS, 1.5, "", torch.bfloat16),
    "epochs_dataloader": Expected("--epochs 3 --steps 40", LOSS, 1.05),
    "gradient_penalty": Expected("--steps 150", LOSS, 10, "scale scale step update"),
    "half_parameters": Expected(
        "--steps 1000",
        r" error (\S+),",
        2,
        "",
        torch.bfloat16,
        frozenset({torch.float32}),
        frozenset({torch.float32, torch.bfloat16}),
    ),
    "skipped_steps": Expected("--steps 300", LOSS, 3),
    "two_optimizers": Expected(
        "--steps 600", r"off the circle by (\S+)", 3, "scale step scale step update"
    ),
    "why_is_it_slow": Expected("--steps 100", r"step +\d+ +loss +(\S+)", 2, "", torch.bfloat16),
}


# --- running them ---------------------------------------------------------------------------------


@dataclass
class Watched:
    """What one run in this process did.

    Attributes:
        calls: methods of the scaler that the script called, in order.
        gradients: those that the optimizer saw, for each of its steps.
        zeroed, stepped: the optimizers whose `zero_grad` and `step` were called, in order.
        outputs: dtypes that linear layers returned.
        states: dtypes of the parameters and gradients that optimizers saw.
        wrongly_inside: what was called inside autocast and must not be.
        printed: standard output.
    """

    calls: list[str] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)
    zeroed: list[torch.optim.Optimizer] = field(default_factory=list)
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    outputs: set[torch.dtype] = field(default_factory=set)
    states: set[torch.dtype] = field(default_factory=set)
    wrongly_inside: list[str] = field(default_factory=list)
    printed: str = ""


@pytest.fixture
def watch(monkeypatch, capsys):
    def run(name: str, arguments: str, init_scale: float | None = None) -> Watched:
        watched = Watched()

        def outside_only(what: str) -> None:
            if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
                watched.wrongly_inside.append(what)

        zero_grad = torch.optim.Optimizer.zero_grad

        def see_zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            watched.zeroed.append(optimizer)
            zero_grad(optimizer, *args, **kwargs)

        running = []  # functions of `before`: step calls unscale_ itself

        def before(owner: Any, attribute: str, notice: Callable[[str], None]) -> None:
            function = getattr(owner, attribute)

            @functools.wraps(function)
            def noticed(*args: Any, **kwargs: Any) -> Any:
                if not running:
                    notice(attribute)
                running.append(attribute)
                try:
                    return function(*args, **kwargs)
                finally:
                    running.pop()

            context.setattr(owner, attribute, noticed)

        construct = halfstep.GradScaler.__init__

        def construct_at_scale(*args: Any, **kwargs: Any) -> None:
            construct(*args, **kwargs | {"init_scale": init_scale})

        def see_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            outside_only("step")
            watched.stepped.append(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            watched.states.update(t.dtype for p in params for t in (p, p.grad))
            watched.gradients.append([p.grad.clone() for p in params])

        def see_output(module: nn.Module, _: object, output: Tensor) -> None:
            if isinstance(module, nn.Linear):
                watched.outputs.add(output.dtype)

        with monkeypatch.context() as context, contextlib.ExitStack() as hooks:
            source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            for method in ("scale", "unscale_", "step", "update"):
                if f".{method}(" in source:  # a scaler with another unscale_ refuses max_norm
                    before(halfstep.GradScaler, method, watched.calls.append)
            for function in ("backward", "grad"):
                before(torch.autograd, function, outside_only)
            context.setattr(torch.optim.Optimizer, "zero_grad", see_zero_grad)
            if init_scale:
                context.setattr(halfstep.GradScaler, "__init__", construct_at_scale)
            hooks.callback(register_optimizer_step_pre_hook(see_step).remove)
            hooks.callback(register_module_forward_hook(see_output).remove)
            context.setattr(sys, "argv", [name, *arguments.split()])
            capsys.readouterr()
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        watched.printed = capsys.readouterr().out
        return watched

    return run


@functools.cache
def run_alone(name: str) -> str:
    script, arguments = FOLDER / f"{name}.py", EXPECTED[name].arguments.split()
    return printed_by(script, *arguments, cwd=Path.cwd(), warnings="error")


def printed_by(*arguments: object, cwd: Path, warnings: str = "") -> str:
    """Return what a script prints that fails in nothing and warns of nothing."""
    done = forked.python(*arguments, cwd=cwd, warnings=warnings)
    assert (done.code, done.err) == (0, "")
    return done.out


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_and_learns(name: str) -> None:
    expected, printed = EXPECTED[name], run_alone(name)
    assert printed.splitlines()[-1].startswith("result: ")
    errors = [float(error) for error in re.findall(expected.measure, printed)]
    assert len(errors) >= 2
    assert errors[-1] < errors[0] / expected.falls_by


# --- what holds for all of them -------------------------------------------------------------------


def test_each_example_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+)\.py\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(EXPECTED) == EXAMPLES, "give a new example its line in EXPECTED"
    assert sorted(listed) == EXAMPLES, "give a new example its line in examples/README.md"


@pytest.mark.parametrize("name", EXAMPLES)
def test_reads_as_promised(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert f"\nRun: python examples/{name}.py" in source
    assert "\nRules to remember:\n- " in source
    assert "torch.amp" not in source
    assert "torch.autocast" not in source
    assert len(source.splitlines()) <= 80


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_runs_where(name: str, watch: Callable[..., Watched]) -> None:
    """Layers in lower precision; parameters, gradients, backward and step outside autocast."""
    expected = EXPECTED[name]
    watched = watch(name, "--steps 2", init_scale=2.0**10)
    assert watched.outputs == {expected.dtype} | expected.others
    assert watched.states <= expected.states
    assert watched.wrongly_inside == []
    assert watched.zeroed == watched.stepped
    iteration = expected.iteration.split()
    iterations = len(watched.calls) // max(1, len(iteration))
    assert watched.calls == iteration * iterations
    assert iterations >= 2 or not iteration


@pytest.mark.parametrize("name", sorted({*EXAMPLES} - {"half_parameters"}))  # it has no autocast
def test_optimizer_sees_the_gradients_of_float32(name, watch, monkeypatch):
    """Whatever is scaled, unscaled, clipped or divided: it comes out as without mixed precision."""
    mixed = watch(name, "--steps 1", init_scale=2.0**12)
    monkeypatch.setattr(halfstep, "autocast", functools.partial(halfstep.autocast, enabled=False))
    plain = watch(name, "--steps 1", init_scale=1.0)
    assert plain.outputs == {torch.float32} | EXPECTED[name].others
    assert len(mixed.gradients) == len(plain.gradients) > 0
    assert relative_error(mixed.gradients[0], plain.gradients[0]) < 0.02


def relative_error(gradients: list[Tensor], wanted: list[Tensor]) -> float:
    one, other = (torch.cat([g.flatten() for g in some]).double() for some in (gradients, wanted))
    return ((one - other).norm() / other.norm()).item()


def norm(gradients: list[Tensor]) -> float:
    return torch.cat([g.flatten() for g in gradients]).norm().item()


# --- and one by one -------------------------------------------------------------------------------


def test_basic_loop_separates_the_spirals() -> None:
    assert float(re.search(r"result: (\S+)%", run_alone("basic_loop"))[1]) > 95  # guessing has 50


def test_epochs_learn_the_held_out_text() -> None:
    assert float(re.search(r"result: (\S+) bits", run_alone("epochs_dataloader"))[1]) < 4.5


def test_epochs_resume_bit_for_bit(watch: Callable[..., Watched], tmp_path: Path) -> None:
    def run(epochs: int, file: Path) -> list[str]:
        arguments = f"--steps 40 --epochs {epochs} --checkpoint {file}"
        return watch("epochs_dataloader", arguments).printed.splitlines()

    whole, resumed = tmp_path / "whole.pt", tmp_path / "resumed.pt"
    lines = run(4, whole)
    assert run(2, resumed)[:2] == lines[:2]
    assert run(4, resumed) == lines[2:]
    wanted, found = torch.load(whole), torch.load(resumed)
    assert found.pop("scaler") == (saved := wanted.pop("scaler"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert saved["scale"] == 2 * 65536  # it grew in epoch 4: the count was resumed
    assert saved["_growth_tracker"] == 4 * 40 - 150
    with pytest.raises(SystemExit, match="has 4 epochs already"):
        run(4, resumed)


def test_clipping_bounds_the_unscaled_norm(watch: Callable[..., Watched]) -> None:
    watched = watch("clip_gradients", "--steps 40")
    norms = [norm(gradients) for gradients in watched.gradients]
    assert max(norms) <= 1.0 + 1e-5
    assert sum(n > 0.99 for n in norms) >= 3  # large ones are clipped to it
    assert min(norms) < 0.9  # and small ones are left alone
    before = [float(n) for n in re.findall(r"norm +(\d\S*)", watched.printed)]
    assert max(before) < 100  # unscaled


def test_each_layer_is_clipped_by_its_own_norm(watch: Callable[..., Watched]) -> None:
    steps = watch("clip_per_layer", "--steps 20").gradients
    layers = [norm(step[i : i + 2]) for step in steps for i in range(0, 8, 2)]
    assert max(layers) <= 1.0 + 1e-5
    assert sum(n > 0.99 for n in layers) > len(layers) / 2
    assert max(norm(step) for step in steps) > 1.5  # all together are not clipped to 1


def test_broken_batches_are_told_retried_and_gated(watch: Callable[..., Watched]) -> None:
    lines = watch("skipped_steps", "--steps 100").printed.splitlines()
    skipped = [line for line in lines if "skipped, loss: 0.weight, 0.bias" in line]
    retried = [line for line in lines if "taken at attempt" in line]
    assert [line.split()[1] for line in skipped] == ["20", "70"]
    assert retried[0].split()[1] == "40"
    taken, missed, moved = map(int, re.findall(r"\d+", lines[-1]))
    assert taken == moved == 98
    assert missed > 2


def test_parts_give_the_gradient_of_the_whole_batch(watch: Callable[..., Watched]) -> None:
    parts = watch("accumulate", "--steps 30")
    whole = watch("accumulate", "--steps 30 --parts 1")
    assert len(parts.gradients) == len(whole.gradients) == 30
    assert relative_error(parts.gradients[0], whole.gradients[0]) < 0.01
    losses = [[float(x) for x in re.findall(LOSS, run.printed)] for run in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_gan_trains_both_models(watch: Callable[..., Watched]) -> None:
    printed = run_alone("two_optimizers")
    share, eighths = re.search(r"result: (\S+)% .* in (\d) eighths", printed).groups()
    assert float(share) > 65
    assert int(eighths) == 8
    shapes = [step[0].shape[1] for step in watch("two_optimizers", "--steps 2").gradients]
    assert shapes == [2, 4, 2, 4]  # discriminator, generator, and again


def test_penalty_is_on_the_unscaled_gradient() -> None:
    printed = run_alone("gradient_penalty")
    estimate, truth = map(float, re.findall(r"\d\.\d{3}", printed.splitlines()[-1]))
    assert estimate == pytest.approx(truth, rel=0.1)
    lengths = [float(x) for x in re.findall(r"gradients (\S+)", printed)]
    assert lengths[-1] == pytest.approx(1 + truth / 20, rel=0.05)  # the minimum of 10 (l-1)^2 - l d


def test_by_hand_equals_the_scaler(watch: Callable[..., Watched]) -> None:
    printed = watch("by_hand", "--steps 60").printed
    for kind in ("static", "dynamic"):
        assert f"result: {kind}: all parameters are equal bit for bit after 60 steps" in printed
    steps = re.findall(r"step +\d+ .*", printed)  # of four runs
    num = len(steps) // 4
    assert steps[:num] == steps[num : 2 * num]
    assert steps[2 * num : 3 * num] == steps[3 * num :]
    scales = [float(step.split()[-1]) for step in steps]
    assert set(scales[: 2 * num]) == {1024.0}
    dynamic = scales[2 * num : 3 * num]
    assert min(dynamic) < dynamic[0]  # it skipped
    assert min(dynamic) < dynamic[-1]  # and grew


def test_by_hand_notices_a_difference(watch, monkeypatch):
    scale = halfstep.GradScaler.scale
    one_bit = 1 + 2.0**-23
    monkeypatch.setattr(halfstep.GradScaler, "scale", lambda *given: scale(*given) * one_bit)
    with pytest.raises(AssertionError, match="static: the runs differ"):
        watch("by_hand", "--steps 20")


def test_half_parameters_shows_what_masters_keep() -> None:
    plain, masters, exact = map(float, re.findall(r" error (\S+),", run_alone("half_parameters")))
    assert plain > 2 * exact
    assert abs(masters - exact) < 0.1 * exact


def test_cpu_bf16_shows_the_dtypes() -> None:
    printed = run_alone("cpu_bf16")
    assert "outputs torch.bfloat16, loss torch.float32" in printed
    assert "weights torch.float32, gradients torch.float32" in printed
    assert float(re.search(r"result: (\S+)%", printed)[1]) > 75  # guessing has 50


# --- under halfstep run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        ("1", r"warning: .*`blocks\.3\.\w+\.weight` .* than 2\^2 would overflow.* Keep `value`, w"),
        ("1e7", r"good: Precision: fine\. "),
    ],
)
def test_the_report_of_the_agent(tmp_path: Path, unit: str, says: str) -> None:
    script = FOLDER / "run" / "agent.py", "--steps", "110", "--unit", unit
    for words in (["run", "-q", "-o", tmp_path, "--every", "20", *script], ["report", tmp_path]):
        told = printed_by("-m", "halfstep", *words, cwd=tmp_path)
    assert re.match(says, told)
    assert ("grown); inf or NaN came first in the gradients of `value`" in told) == (unit == "1")


def test_the_first_command_of_the_readme_prints_its_cure(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(FOLDER)
    readme = (FOLDER.parent / "README.md").read_text()
    first, *shown, cure = re.search(r"\$ (.*\n[^`]+`mul`[^`]+)```", readme)[1].splitlines()
    runs = [forked.python("-m", *shlex.split(line), cwd=tmp_path) for line in (first, cure)]
    assert {*shown[:3], cure} <= {*runs[0].err.splitlines()}  # the numbers are the machine's
    assert [each.out.split()[-1][:4] for each in runs] == ["nan", "0.00"]


# --- and halfstep.tune ----------------------------------------------------------------------------


def test_tune_finds_the_two_modules_and_then_it_learns(tmp_path: Path) -> None:
    script, policy = FOLDER / "tune" / "signals.py", tmp_path / "my.policy"
    told = printed_by(script, "--tune", policy, cwd=tmp_path)
    train = [script, "--policy", policy, "--steps", 120]
    trained = printed_by(*train, cwd=tmp_path, warnings="error")
    assert told.startswith("fp16: 2 modules in fp32 are needed and enough (the model has 11 mod")
    assert halfstep.Policy.load(policy) == halfstep.Policy.parse("standard; @1:fp32; @5:fp32")
    losses = [float(loss) for loss in re.findall(LOSS, trained)]
    assert losses[-1] < losses[0] / 10
    assert int(re.search(r"result: (\d+) of 120 steps were skipped", trained)[1]) < 10


def test_without_the_policy_no_step_is_taken(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["signals", "--steps", "20"])
    with pytest.warns(
        halfstep.errors.SkippedStepsWarning, match="updates 1 to (17|20) were skipped"
    ):
        runpy.run_path(str(FOLDER / "tune" / "signals.py"), run_name="__main__")
    assert "result: 20 of 20 steps were skipped with standard" in capsys.readouterr().out
