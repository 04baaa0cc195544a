"""Loops in a block of ``added``, against the same loops with the calls written by hand."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import batches, loss_of, step_on, train_plainly
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import halfstep
from halfstep._tools.record.read import read_run
from halfstep._tools.run.masters import Additions, added
from halfstep._tools.run.stand_ins import replaced
from halfstep.errors import CallOrderError, SkippedStepsWarning

BF16, FP16 = torch.bfloat16, torch.float16
MASTERS = Additions(has_masters=True)
BOTH = Additions(has_masters=True, is_guarding=True, max_norm=1.0)

ADAMW = partial(torch.optim.AdamW, lr=1e-4)

Prepare = Callable[[torch.optim.Optimizer], None]
"""What the hand does to an optimizer; nothing in an unmodified script."""


def unmodified(_: torch.optim.Optimizer) -> None:
    pass


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))


def data(num: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [x.to(dtype) for x in batches(num, 8, 16)]


def trained(
    prepare: Prepare,
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer] = ADAMW,
    given: list[Tensor] | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Make the optimizer of a model, prepare it and train."""
    optimizer = make(model.parameters())
    prepare(optimizer)
    train_plainly(model, optimizer, data(4) if given is None else given, **kwargs)
    return state_of(model, optimizer)


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return loss


def set_grads(model: nn.Module, x: Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, x), params), strict=True):
        param.grad = grad


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all that must be equal bit for bit: parameters, and the states of optimizers."""
    found = dict(model.state_dict())
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{index}.{key}": value for key, value in state.items()}
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def run_with(script: Callable[[Prepare], Any], additions: Additions) -> tuple[Any, list[str]]:
    """Run an unmodified script with the option; return its result and what is said."""
    said: list[str] = []
    with added(additions, said.append):
        result = script(unmodified)
    return result, said


def by_hand(script: Callable[[Prepare], Any], additions: Additions) -> Any:
    def prepare(optimizer: torch.optim.Optimizer) -> None:
        if additions.has_masters:
            dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
            halfstep.master_weights(optimizer, "float32" if FP16 in dtypes else "split")
        if additions.is_guarding:
            halfstep.guard(optimizer, max_norm=additions.max_norm)

    return script(prepare)


# --- bit for bit as by hand -----------------------------------------------------------------------


def plain(prepare: Prepare) -> dict[str, Tensor]:
    make = partial(torch.optim.AdamW, lr=1e-5)
    return trained(prepare, net().to(BF16), make, data(6), max_norm=0.1)


def cast_later(prepare: Prepare) -> dict[str, Tensor]:
    """The optimizer and its schedule are made before the model is cast."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    model.to(BF16)
    prepare(optimizer)
    for x in data(6):
        train_plainly(model, optimizer, [x])
        schedule.step()
    return state_of(model, optimizer)


def with_state(prepare: Prepare) -> dict[str, Tensor]:
    """Adagrad makes its state, in bfloat16, when it is made."""
    return trained(prepare, net().to(BF16), partial(torch.optim.Adagrad, lr=1e-3))


def some_in_float32(prepare: Prepare) -> dict[str, Tensor]:
    model = net().to(BF16)
    model[2].float()
    model[2].register_forward_pre_hook(lambda _, args: args[0].float())
    model[2].register_forward_hook(lambda *args: args[-1].to(BF16))
    return trained(prepare, model, partial(torch.optim.AdamW, lr=1e-4, fused=True))


def two_optimizers(prepare: Prepare) -> dict[str, Tensor]:
    """A GAN: the loss of the generator leaves gradients in the discriminator."""
    torch.manual_seed(0)
    generator = nn.Linear(16, 16, dtype=BF16)
    discriminator = nn.Linear(16, 1, dtype=BF16)
    first = torch.optim.Adam(generator.parameters(), lr=1e-4)
    second = torch.optim.RMSprop(discriminator.parameters(), lr=1e-4)
    prepare(first)
    prepare(second)
    for x in data(4):
        second.zero_grad()
        fake = generator(x)
        step_on(second, (discriminator(fake.detach()) - discriminator(x)).float().sigmoid().mean())
        first.zero_grad()
        step_on(first, (-discriminator(fake)).float().sigmoid().mean())
    return state_of(nn.ModuleList([generator, discriminator]), first, second)


def closure(prepare: Prepare) -> dict[str, Tensor]:
    """No backward pass comes before the first step, as in Lightning."""
    model = net().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepare(optimizer)
    for x in data(4):
        optimizer.step(partial(evaluate, model, optimizer, x))
    return state_of(model, optimizer)


def without_backward(prepare: Prepare) -> dict[str, Tensor]:
    model = net().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepare(optimizer)
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    for x in data(4):
        set_grads(model, x)
        optimizer.step()
        schedule.step()
    return state_of(model, optimizer)


def resumed(prepare: Prepare) -> dict[str, Tensor]:
    """The state is saved and loaded in the middle, as before the first backward pass of a run."""
    model, saved = net().to(BF16), None
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        prepare(optimizer)
        if saved is not None:
            optimizer.load_state_dict(saved)
        train_plainly(model, optimizer, data(3))
        saved = copy.deepcopy(optimizer.state_dict())
    return state_of(model, optimizer)


def copied(prepare: Prepare) -> dict[str, Tensor]:
    model = net().to(BF16)
    first = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = copy.deepcopy((model, first))
    prepare(optimizer)
    train_plainly(model, optimizer, data(3))
    return state_of(model, optimizer)


def grouped_later(prepare: Prepare) -> dict[str, Tensor]:
    model = net().to(BF16)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-3)
    prepare(optimizer)
    train_plainly(model, optimizer, data(2))
    optimizer.add_param_group({"params": model[3].parameters()})
    train_plainly(model, optimizer, data(2))
    return state_of(model, optimizer)


def kept_step(prepare: Prepare) -> dict[str, Tensor]:
    """The script keeps ``optimizer.step`` before the first backward pass."""
    model = net().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepare(optimizer)
    step = optimizer.step
    train_plainly(model, optimizer, data(4), step=step)
    return state_of(model, optimizer)


def kept_step_of_a_schedule(prepare: Prepare) -> dict[str, Tensor]:
    model = net().to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    prepare(optimizer)
    schedule = LambdaLR(optimizer, lambda number: 0.9**number)
    step = optimizer.step
    for x in data(4):
        train_plainly(model, optimizer, [x], step=step)
        schedule.step()
    return state_of(model, optimizer)


SCRIPTS = [
    *(plain, cast_later, with_state, some_in_float32, two_optimizers, closure),
    *(without_backward, resumed, copied, grouped_later, kept_step, kept_step_of_a_schedule),
]


@pytest.mark.parametrize("additions", [MASTERS, BOTH], ids=["masters", "both"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unmodified_script_computes_as_with_the_calls(script, additions):
    before = torch.optim.Optimizer.__init__
    found, _ = run_with(script, additions)
    assert torch.optim.Optimizer.__init__ is before
    assert same(found, by_hand(script, additions))
    assert not same(found, script(unmodified))


@pytest.mark.parametrize("additions", [MASTERS, BOTH], ids=["masters", "both"])
def test_a_compiled_step_runs_as_it_is(additions: Additions) -> None:
    compiled = []

    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = net().to(BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        prepare(optimizer)
        is_by_hand = prepare is not unmodified
        step = optimizer.step if is_by_hand else torch.compile(optimizer.step, backend=backend)
        train_plainly(model, optimizer, data(4), step=step)
        return state_of(model, optimizer)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    assert same(run_with(script, additions)[0], by_hand(script, additions))
    assert compiled == []


def test_a_step_that_is_kept_and_put_back_is_an_error() -> None:
    """As by accelerate with a scaler, if the master weights come after ``prepare``."""
    model = net().to(BF16)
    with added(MASTERS, lambda _: None):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        kept = optimizer.step
        loss_of(model, data(1)[0]).backward()
        optimizer.step = lambda: kept()  # type: ignore[assignment]
        gc.collect()
        with pytest.raises(CallOrderError, match="Other code stored it"):
            optimizer.step()


def test_parameters_in_bfloat16() -> None:
    found, said = run_with(plain, MASTERS)
    assert same(found, by_hand(plain, MASTERS))
    assert said[0] == "--masters: AdamW steps 6 bfloat16 parameters in float32 (store: split)"


def test_parameters_in_float16_get_the_store_for_them_and_float32_gradients() -> None:
    seen = []

    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = net().to(FP16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        prepare(optimizer)
        for _ in range(2):  # gradients are added up, and their norm is measured
            for x in data(3, FP16):
                loss_of(model, x).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        seen.append(model[0].weight.grad.dtype)
        return state_of(model, optimizer)

    found, said = run_with(script, MASTERS)
    assert same(found, by_hand(script, MASTERS))
    assert seen == [torch.float32] * 2
    assert said[0].endswith("steps 6 float16 parameters in float32 (store: float32)")


def test_a_step_takes_chunks_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 copies of all weights at once would take four bytes more for each."""
    from halfstep._master_weights import master_weights

    chunked = []
    step_in_chunks = master_weights.step_in_chunks
    monkeypatch.setattr(
        master_weights,
        "step_in_chunks",
        lambda *args, **kwargs: chunked.append(1) or step_in_chunks(*args, **kwargs),
    )
    run_with(plain, BOTH)
    run_with(cast_later, MASTERS)
    assert len(chunked) == 12


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as in https://github.com/davda54/sam."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=1e-3, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["old"] = param.data.clone()
                param.add_(param.grad, alpha=group["rho"])
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                param.data = self.state[param]["old"]
        self.base.step()


def around_another(prepare: Prepare) -> dict[str, Tensor]:
    model = net().to(BF16)
    optimizer = SAM(model.parameters())
    prepare(optimizer)
    for x in data(3):
        evaluate(model, optimizer, x)
        optimizer.step(partial(evaluate, model, optimizer, x))
    return dict(model.state_dict())


def test_an_optimizer_around_another() -> None:
    """It gets the master weights, and the one inside the guard: it evaluates a closure late."""
    found, said = run_with(around_another, Additions(has_masters=True, is_guarding=True))
    assert same(found, by_hand(around_another, MASTERS))
    assert [text.split(" steps")[0] for text in said[:1]] == ["--masters: SAM"]
    assert said[1] == "--guard: SGD skips steps with inf or NaN gradients"


# --- what is said, and what is left alone ---------------------------------------------------------


def test_a_step_with_nan_is_left_out() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        given = data(5)
        given[2] = given[2] * float("nan")
        return trained(prepare, net().to(BF16), given=given)

    with pytest.warns(SkippedStepsWarning, match="update 3 was skipped"):
        found, said = run_with(script, BOTH)
    with pytest.warns(SkippedStepsWarning):
        assert same(found, by_hand(script, BOTH))
    assert all(value.isfinite().all() for value in found.values())
    assert said[1] == (
        "--guard: AdamW skips steps with inf or NaN gradients, and clips the norm of the "
        "others to 1"
    )


def test_an_optimizer_without_16_bit_parameters_is_named_once_and_guarded() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        return trained(prepare, net(), given=data(3, torch.float32))

    found, said = run_with(script, MASTERS)
    assert said == ["--masters: AdamW has no bfloat16 or float16 parameters"]
    assert same(found, script(unmodified))
    _, said = run_with(script, Additions(has_masters=True, is_guarding=True))
    assert "--guard: AdamW skips steps with inf or NaN gradients" in said


def test_a_model_that_is_cast_after_its_first_steps() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        train_plainly(model, optimizer, data(2, torch.float32))
        model.to(BF16)
        prepare(optimizer)
        train_plainly(model, optimizer, data(3))
        return state_of(model, optimizer)

    found, said = run_with(script, MASTERS)
    assert same(found, by_hand(script, MASTERS))
    assert len(said) == 2


def test_parameters_that_share_memory_keep_their_gradients_in_float16() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = net().to(FP16)
        model[2].bias.data = model[2].weight.data
        return trained(prepare, model, partial(torch.optim.SGD, lr=1e-2), data(3, FP16))

    found, said = run_with(script, MASTERS)
    assert same(found, script(unmodified))
    assert len(said) == 1
    assert said[0].startswith("--masters: SGD steps without masters: master_weights(SGD): ")
    assert "share their memory" in said[0]


def test_gradients_in_float16_have_no_guard() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        model, given = net().to(FP16), data(3, FP16)
        return trained(prepare, model, partial(torch.optim.SGD, lr=1e-2), given)

    found, said = run_with(script, Additions(is_guarding=True))
    assert same(found, script(unmodified))
    assert said == [
        "--guard: SGD steps without a guard: it has gradients in float16; --masters makes them "
        "float32"
    ]
    _, said = run_with(script, BOTH)
    assert said[1].startswith("--guard: SGD skips")


def test_lbfgs_has_no_guard() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = net().to(BF16)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3)
        prepare(optimizer)
        for _ in range(2):
            optimizer.step(partial(evaluate, model, optimizer, data(1)[0]))
        return dict(model.state_dict())

    found, said = run_with(script, BOTH)
    assert same(found, by_hand(script, MASTERS))
    assert said[1].startswith("--guard: LBFGS steps without a guard: guard(LBFGS): it evaluates")


def poisoned(
    make_scaler: Callable[[nn.Module], Any], optimize: Callable[[Any, Any], object], early: int = 0
) -> tuple[dict[str, Tensor], float]:
    """Train with a batch norm and 30 batches of NaN; return the model and the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = None if early else make_scaler(model)
    for number in range(60):
        x = torch.full((8, 4), math.nan) if 10 <= number < 40 else torch.randn(8, 4)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if number < early:
            step_on(optimizer, loss)
            continue
        scaler = scaler or make_scaler(model)
        scaler.scale(loss).backward()
        optimize(scaler, optimizer)
        scaler.update()
    return dict(model.state_dict()), scaler.get_scale()


def torchs_scaler(_: nn.Module) -> Any:
    return torch.amp.GradScaler("cpu")


def step_of(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)


@pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")
@pytest.mark.parametrize("early", [0, 3])
def test_a_scaler_of_the_script_is_as_halfsteps_with_a_module(early: int) -> None:
    by_hand = poisoned(lambda model: halfstep.GradScaler("cpu", module=model), step_of, early)
    assert all(each.isfinite().all() for each in by_hand[0].values())
    with replaced(halfstep.preset("torch"), is_guarding=True):
        found, said = run_with(
            lambda _: poisoned(torchs_scaler, step_of, early), Additions(is_guarding=True)
        )
    assert same(found[0], by_hand[0])
    assert found[1] == by_hand[1] == 2.0**16
    assert said[-1].startswith("--guard: the script's GradScaler skips steps with inf or NaN")


@pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")
@pytest.mark.parametrize("is_guarding", [False, True])
def test_a_loss_of_millions_is_trained_at_a_scale_below_1(is_guarding: bool) -> None:
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    with replaced(halfstep.preset("torch"), is_guarding=is_guarding):
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale((weight.half().float() * 1e6).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**-4
    assert weight.max() < 1.0


@pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")
def test_steps_past_the_scaler_of_the_script_never_use_nan() -> None:
    def unscale(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        optimizer.step()

    with replaced(halfstep.preset("torch"), is_guarding=True):
        (model, _), _ = run_with(
            lambda _: poisoned(torchs_scaler, unscale), Additions(is_guarding=True)
        )
    assert all(each.isfinite().all() for name, each in model.items() if "weight" in name)


@pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")
def test_without_a_scaler_a_guard_restores_buffers_from_the_first_batch_on() -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(optimizer)
        for value in (math.nan, 1.0, math.nan):
            optimizer.zero_grad()
            step_on(optimizer, model(torch.full((8, 4), value)).mean())
        torch.jit.script(model)  # it cannot compile the hook of a module
        return dict(model.state_dict())

    found, _ = run_with(script, Additions(is_guarding=True))
    assert all(each.isfinite().all() for each in found.values())
    assert found["0.num_batches_tracked"] == 1


def test_pytorchs_own_scaler_is_not_guarded() -> None:
    _, said = run_with(lambda _: poisoned(torchs_scaler, step_of), Additions(is_guarding=True))
    assert said == ["--guard: the script's GradScaler is PyTorch's own; nothing is guarded"]


@pytest.mark.parametrize(
    ("stores", "additions", "what"),
    [
        (("float32",), BOTH, "--guard: SGD steps without a guard: guard(SGD): it has a guard"),
        ((), MASTERS, "--masters: SGD steps without masters: master_weights(SGD): it has a guard"),
    ],
)
def test_a_script_with_the_calls_is_left_alone(stores, additions, what) -> None:
    def script(prepare: Prepare) -> dict[str, Tensor]:
        model = net().to(BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for store in stores:
            halfstep.master_weights(optimizer, store)
        halfstep.guard(optimizer)
        train_plainly(model, optimizer, data(3))
        return state_of(model, optimizer)

    found, said = run_with(script, additions)
    assert same(found, script(unmodified))
    assert what in "".join(said)


def test_optimizers_are_freed_with_what_was_added() -> None:
    def script(prepare: Prepare) -> list[weakref.ref[Any]]:
        freed = []
        for _ in range(2):
            model = net().to(BF16)
            optimizer = torch.optim.AdamW(model.parameters())
            train_plainly(model, optimizer, data(2))
            freed.append(weakref.ref(optimizer))
        del model, optimizer
        gc.collect()
        assert [ref() for ref in freed] == [None, None]
        return freed

    run_with(script, BOTH)


WITH_WORKERS = """
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(16, 8, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for epoch in range(2):
    for x in DataLoader(torch.randn(8, 16).to(torch.bfloat16), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
"""


def test_a_run_says_it_once_and_records_it(halfstep_run: Any, tmp_path: Path) -> None:
    """Not in the workers of a data loader, which are forks."""
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    done = halfstep_run("--masters", "--guard", "-o", "out", "train.py")
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [
        *("--masters", "--guard"),
        "4 steps recorded, 0 skipped; all products with gradients ran in bfloat16",
    ]
    notes = [note.text for note in read_run(tmp_path / "out").notes]
    assert [f"halfstep: {text}" for text in notes] == lines[:-1]
    quiet = halfstep_run("--masters", "-q", "-o", "quiet", "train.py")
    assert quiet.err == f"{lines[0]}\n"
