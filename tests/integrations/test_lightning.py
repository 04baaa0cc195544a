"""The precision plugin and the callbacks of Lightning, against loops written by hand."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forked
from tests.integrations.by_hand import recorded_by_itself, share_right
from tests.integrations.quiet import quiet_trainer
from tests.training import assert_same, batches, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep._autocast import context
from halfstep._autocast.modules import name_modules
from halfstep._tools.record.read import read_run
from halfstep.errors import CallOrderError, DiagnosisWarning

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from halfstep.integrations.lightning import HalfstepPrecision  # noqa: E402

# Lightning and what it imports warn of versions, loggers and small machines.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
NUM_STEPS = 6
BAD = 2
"""The batch with NaN."""


def samples(bad: int | None = BAD) -> Tensor:
    """Return the samples of all batches, of four each."""
    x = torch.cat(batches(NUM_STEPS, 4, 8))
    if bad is not None:
        x[4 * bad] = math.nan
    return x


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def fused(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def lbfgs(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


class Module(lightning.LightningModule):
    """Notes the dtypes of outputs and the learning rates of its steps."""

    def __init__(self, make: Make = adamw, interval: str = "step") -> None:
        super().__init__()
        self.net, self.make, self.interval = mlp(8, 16, 1, seed=1), make, interval
        self.dtypes: list[torch.dtype] = []
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        y = self.net(x)
        self.dtypes.append(y.dtype)
        return y.float().square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.net.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.interval},
        }


def fit(folder: Path, module: Any, x: Tensor | None = None, **options: Any) -> Any:
    trainer = quiet_trainer(folder, **options)
    data = TensorDataset(samples() if x is None else x)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return trainer


def by_hand(
    make: Make,
    max_norm: float | None = None,
    max_value: float | None = None,
    norms: tuple[float, ...] = (),
    bad: int | None = BAD,
) -> tuple[nn.Module, int]:
    """Train as Lightning does, in a loop; return the model and how many steps were skipped."""
    model = mlp(8, 16, 1, seed=1)
    optimizer, scaler = make(model.parameters()), halfstep.GradScaler()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss_of(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with halfstep.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if make is lbfgs and max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if norms:
            scaler.unscale_(optimizer)
        for norm in norms:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        if max_value is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), max_value)
        return loss

    for x in samples(bad).split(4):
        if make is lbfgs:
            scaler.step(optimizer, lambda x=x: loss_of(x))
        else:
            loss_of(x)
            scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        if scaler.outcome(optimizer).taken:
            scheduler.step()
    return model, scaler.counts().skipped


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    assert_same(a.parameters(), b.parameters())


@pytest.mark.parametrize("make", [adamw, fused, lbfgs])
@pytest.mark.parametrize("max_norm", [None, 0.9])
def test_trains_as_a_loop_does(make: Make, max_norm: float | None, tmp_path: Path) -> None:
    module = Module(make)
    plugin = HalfstepPrecision("16-mixed")
    fit(tmp_path, module, plugins=[plugin], gradient_clip_val=max_norm)
    assert set(module.dtypes) == {torch.float16}
    reference, skipped = by_hand(make, max_norm)
    assert_equal(module.net, reference)
    assert 1 <= plugin.scaler.counts().skipped == skipped < NUM_STEPS
    assert all(param.isfinite().all() for param in module.parameters())


@pytest.mark.parametrize("make", [adamw, fused])
def test_clips_by_value(make: Make, tmp_path: Path) -> None:
    module, plugins = Module(make), [HalfstepPrecision()]
    how = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    fit(tmp_path, module, plugins=plugins, **how)
    assert_equal(module.net, by_hand(make, max_value=0.01)[0])


class Looking(Module):
    """Looks at the norm before the step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def on_fit_start(self) -> None:
        self.norms: list[float] = []


@pytest.mark.parametrize("make", [adamw, fused])
def test_hooks_see_unscaled_gradients(make: Make, tmp_path: Path) -> None:
    module = Looking(make)
    x = samples(bad=None)
    fit(tmp_path, module, x, plugins=[HalfstepPrecision()], gradient_clip_val=0.1)
    plain = mlp(8, 16, 1, seed=1)
    with halfstep.autocast("cpu", torch.float16):
        loss = plain(x[:4]).float().square().mean()
    (loss * 1024).backward()
    norm = torch.nn.utils.get_total_norm([p.grad / 1024 for p in plain.parameters()]).item()
    assert module.norms[0] == pytest.approx(norm, rel=1e-2)
    assert len(module.norms) == NUM_STEPS


class ClippingTwice(Module):
    """Clips in its own way, and looks at the result."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.5, "norm")
        self.clip_gradients(optimizer, 0.01, "norm")
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item()
        assert norm <= 0.0101


@pytest.mark.parametrize("make", [adamw, fused])
def test_own_clipping_is_done_at_once(make: Make, tmp_path: Path) -> None:
    module = ClippingTwice(make)
    fit(tmp_path, module, samples(bad=None), plugins=[HalfstepPrecision()])
    assert_equal(module.net, by_hand(make, norms=(0.5, 0.01), bad=None)[0])


def test_a_schedule_waits_for_a_step(tmp_path: Path) -> None:
    module = Module()
    fit(tmp_path, module, plugins=[HalfstepPrecision()])
    assert module.rates == [0.01, 0.005, 0.0025, 0.0025, 0.00125, 0.000625]  # BAD is 2
    assert "lr_scheduler_step" not in vars(module)
    by_epoch = Module(interval="epoch")
    trainer = fit(tmp_path, by_epoch, plugins=[HalfstepPrecision()], max_epochs=2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0025


def test_autocast_of_the_plugin_after_a_fit(tmp_path: Path) -> None:
    module, plugin = Module(), HalfstepPrecision()
    with pytest.raises(CallOrderError, match="in or after a fit"), plugin.forward_context():
        pass
    fit(tmp_path, module, plugins=[plugin])
    with plugin.forward_context():  # as Lightning's ModelSummary does
        assert module.net(samples(None)).dtype == torch.float16


class EverySecond(Module):
    """Has a schedule that is asked at every second step."""

    def configure_optimizers(self) -> Any:
        options = super().configure_optimizers()
        options["lr_scheduler"]["frequency"] = 2
        return options


def test_a_schedule_that_is_asked_at_a_skipped_step_moves_for_those_before(tmp_path: Path) -> None:
    x = samples(bad=None)
    x[4 * 1], x[4 * 4], x[4 * 5] = math.nan, math.nan, math.nan
    module = EverySecond()
    trainer = fit(tmp_path, module, x, plugins=[HalfstepPrecision()])
    assert module.rates == [0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0025


class Copying(lightning.Callback):
    """Copies the module during its training, as averages of weights and data workers do."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer_of, module._trainer = module._trainer, None
        try:
            self.copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
            plugin = trainer.precision_plugin
            self.plugins = [copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))]
        finally:
            module._trainer = trainer_of


def test_a_copy_made_in_training_is_on_its_own(tmp_path: Path) -> None:
    copying = Copying()
    fit(tmp_path, Module(), samples(None), plugins=[HalfstepPrecision()], callbacks=[copying])
    for module in copying.copies:
        assert module.lr_scheduler_step.__self__ is module
        module.rates = []
        fit(tmp_path, module, samples(None))
        assert module.rates == [0.01 * 0.5**n for n in range(NUM_STEPS)]
    for plugin in copying.plugins:
        fit(tmp_path, Module(), samples(None), plugins=[plugin])
        assert plugin.scaler.counts().taken == 2 * NUM_STEPS


class OwnSchedule(Module):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(7)  # an epoch, as timm's schedules take it
        self.num_moves = getattr(self, "num_moves", 0) + 1


def test_own_way_of_schedules_is_kept(tmp_path: Path) -> None:
    module = OwnSchedule()
    fit(tmp_path, module, plugins=[HalfstepPrecision()])
    assert module.num_moves == NUM_STEPS - 1


def test_policy(tmp_path: Path) -> None:
    module = Module()
    fit(tmp_path, module, plugins=[HalfstepPrecision(policy="standard; @net.2:fp32")])
    assert set(module.dtypes) == {torch.float32}
    module = Module()
    fit(tmp_path, module, plugins=[HalfstepPrecision("bf16-mixed", policy="standard")])
    assert set(module.dtypes) == {torch.bfloat16}
    module = Module()
    with halfstep.use_policy("standard; linear:fp32"):
        fit(tmp_path, module, plugins=[HalfstepPrecision("bf16-mixed")])
    assert set(module.dtypes) == {torch.float32}


class Growing(Module):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 3:
            self.net[2] = nn.Linear(16, 1)


def test_rules_for_modules_walk_the_model_once(tmp_path, monkeypatch):
    walks = []
    monkeypatch.setattr(context, "name_modules", lambda *given: walks.append(name_modules(*given)))
    for module, num in ((Module(), 1), (Growing(), 2)):
        walks.clear()
        plugin = HalfstepPrecision("bf16-mixed", policy="standard; @net.2:fp32")
        fit(tmp_path, module, samples(bad=None), plugins=[plugin])
        assert module.dtypes == [torch.float32] * NUM_STEPS
        assert len(walks) == num
        assert plugin._changes is None  # and so no module that is made later is looked at


def test_accumulates(tmp_path: Path) -> None:
    module = Module()
    x = samples(bad=None)
    fit(tmp_path, module, x, plugins=[HalfstepPrecision()], accumulate_grad_batches=2)
    reference = mlp(8, 16, 1, seed=1)
    optimizer, scaler = adamw(reference.parameters()), halfstep.GradScaler()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for n, batch in enumerate(x.split(4)):
        with halfstep.autocast("cpu", torch.float16):
            loss = reference(batch).float().square().mean() / 2
        scaler.scale(loss).backward()
        if n % 2:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    assert_equal(module.net, reference)
    with pytest.raises(ValueError, match="accumulate_grad_batches=1"):
        fit(tmp_path, Module(lbfgs), plugins=[HalfstepPrecision()], accumulate_grad_batches=2)


class Leaving(Module):
    """Has no loss in its first batches."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        return None if index < 2 else super().training_step(batch, index)


def test_batches_without_a_loss(tmp_path: Path) -> None:
    module, plugin = Leaving(), HalfstepPrecision()
    fit(tmp_path, module, samples(bad=None), plugins=[plugin])
    assert plugin.scaler.counts().taken == NUM_STEPS - 2


class TwoOptimizers(lightning.LightningModule):
    """Optimizes by hand: two losses, two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.other = mlp(8, 16, 1, seed=1), nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        (x,) = batch
        for part, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(part(x).float().square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [adamw(self.net.parameters()), fused(self.other.parameters())]


def test_manual_optimization(tmp_path: Path) -> None:
    module = TwoOptimizers()
    plugin = HalfstepPrecision(scaler=halfstep.GradScaler(init_scale=1024.0))
    start = {name: param.clone() for name, param in module.named_parameters()}
    fit(tmp_path, module, plugins=[plugin])
    counts = plugin.scaler.counts()
    assert (counts.taken, counts.skipped) == (2 * NUM_STEPS - 2, 2)
    for name, param in module.named_parameters():
        assert param.isfinite().all()
        assert not torch.equal(param, start[name])


class ClippingByHand(Module):
    """Clips between backward and step, as Lightning documents it for manual optimization."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization, self.algorithm = False, algorithm

    def training_step(self, batch: list[Tensor], index: int) -> None:
        (x,) = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(x).float().square().mean())
        self.clip_gradients(optimizer, 0.01, self.algorithm)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class ClippingByHandAndLooking(ClippingByHand):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@pytest.mark.parametrize("cls", [ClippingByHand, ClippingByHandAndLooking])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clips_in_manual_optimization(cls, algorithm, tmp_path):
    module, x = cls(algorithm), samples(bad=None)
    scaler = halfstep.GradScaler(init_scale=1024.0)
    fit(tmp_path, module, x, plugins=[HalfstepPrecision(scaler=scaler)])
    reference = mlp(8, 16, 1, seed=1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in x.split(4):
        optimizer.zero_grad()
        with halfstep.autocast("cpu", torch.float16):
            loss = reference(batch).float().square().mean()
        (1024 * loss).backward()
        for param in reference.parameters():
            param.grad /= 1024
        if algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        else:
            torch.nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        optimizer.step()
    for mine, its in zip(module.net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


def resume(folder: Path, first: Any, second: Any, bad: int | None = None) -> None:
    """Train with one plugin, and go on from its checkpoint with another."""
    trainer = fit(folder, Module(), samples(bad), plugins=[first])
    trainer.save_checkpoint(file := folder / "last.ckpt")
    data = DataLoader(TensorDataset(samples(bad)), batch_size=4)
    quiet_trainer(folder, plugins=[second], max_epochs=2).fit(Module(), data, ckpt_path=file)


def test_a_checkpoint_resumes(tmp_path: Path) -> None:
    first, second = (
        HalfstepPrecision(scaler=halfstep.GradScaler(init_scale=8.0)),
        HalfstepPrecision(),
    )
    resume(tmp_path, first, second, BAD)
    assert second.scaler.get_scale() == 8.0
    assert second.scaler.counts().taken == first.scaler.counts().taken + NUM_STEPS - 1


def test_a_checkpoint_of_lightnings_own_plugin(tmp_path: Path) -> None:
    own = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=128.0))
    ours = HalfstepPrecision()
    resume(tmp_path, own, ours)
    assert ours.scaler.get_scale() == 128.0


def test_lightnings_own_plugin_loads_a_checkpoint(tmp_path: Path) -> None:
    own = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    resume(tmp_path, HalfstepPrecision(scaler=halfstep.GradScaler(init_scale=128.0)), own)
    assert own.scaler.state_dict()["_growth_tracker"] == 2 * NUM_STEPS
    assert own.scaler.get_scale() == 128.0


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.net.parameters())


def test_an_epoch_that_only_measures_batch_norm_takes_no_step(tmp_path: Path) -> None:
    """The last one of this callback, in which Lightning asks for a step without backward."""
    module, plugin = Normed(), HalfstepPrecision()
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    fit(tmp_path, module, samples(None), plugins=[plugin], callbacks=[averaging], max_epochs=3)
    assert plugin.scaler.counts().taken == 3 * NUM_STEPS
    assert_equal(module, averaging._average_model)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"precision": "16-true"}, ValueError, "'16-mixed' or 'bf16-mixed'"),
        ({"precision": "bf16-mixed", "scaler": halfstep.GradScaler()}, ValueError, "guard"),
        ({"scaler": torch.amp.GradScaler("cpu")}, TypeError, "halfstep.GradScaler"),
        ({"policy": "standard; nonsense:fp32"}, ValueError, "nonsense"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        HalfstepPrecision(**options)


# --- around a fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_is_recorded_and_diagnosed(precision: Any, tmp_path: Path) -> None:
    plugin, module = HalfstepPrecision(precision), Module()
    scaler = plugin.scaler or halfstep.GradScaler(enabled=False)
    with (
        halfstep.record(tmp_path / "run", model=module),
        halfstep.diagnose(scaler, model=module),
        pytest.warns(DiagnosisWarning, match="step 3 went bad"),
    ):
        fit(tmp_path, module, plugins=[plugin])
    run = read_run(tmp_path / "run")
    assert len(run.steps) == NUM_STEPS
    if precision == "16-mixed":
        assert [step.step for step in run.steps if not step.taken] == [BAD + 1]
        assert run.steps[0].scale == 65536.0


def test_nothing_is_left_after_a_fit(tmp_path: Path) -> None:
    module, plugin = Module(), HalfstepPrecision()
    pickle.loads(pickle.dumps(plugin))  # as for ranks that are spawned
    fit(tmp_path, module, samples(None), plugins=[plugin])
    assert "lr_scheduler_step" not in vars(module)
    pickle.dumps(module)


def test_two_ranks(tmp_path: Path) -> None:
    script = Path(__file__).parent / "corpus" / "lightning_ranks.py"
    command = ["-m", "halfstep", "run", "--diagnose", "-o", "run", script, "ddp"]
    done = forked.python(*command, cwd=tmp_path, warnings="ignore")
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}
    run = read_run(tmp_path / "run")
    assert [step.step for step in run.steps if not step.taken] == [3]
    assert len(run.steps) == 4
    (diagnosis,) = run.diagnoses
    assert diagnosis.step == 3
    assert diagnosis.diagnosis.verdict == "maths"
    assert "x = x / 0" in str(diagnosis.diagnosis.bad.line)


def test_the_example(tmp_path: Path) -> None:
    printed, run = recorded_by_itself("lightning_digits", "--steps 60", tmp_path)
    assert "59 steps taken, 1 skipped" in printed
    assert "leave this batch out" in printed
    assert [step.step for step in run.steps if not step.taken] == [21]
    assert share_right(printed) > 0.8
