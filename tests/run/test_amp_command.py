"""What ``mixed_precision`` finds in a script, what it leaves alone, what it says of it."""

import copy
import dataclasses
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training import assert_same, step_on
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import preset
from halfstep._tools.cli import main
from halfstep._tools.record.read import read_run
from halfstep._tools.run.amp import mixed_precision
from halfstep._tools.run.stand_ins import replaced
from halfstep._tools.watch.live import LiveTrace
from halfstep._tools.watch.watch import Watch

BF16, FP16 = torch.bfloat16, torch.float16


class Seen(nn.Module):
    """A model that notes in which dtype its product came out."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        self.dtypes.append(y.dtype)
        return self.wrap(y)


def said_by(script: Callable[[], Any], dtype: torch.dtype = FP16) -> list[str]:
    said: list[str] = []
    with mixed_precision(dtype, said.append):
        script()
    return said


def adamw_loop(model: nn.Module, steps: int = 3, schedule: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda i: 1.0) if schedule else None
    for _ in range(steps):
        optimizer.zero_grad()
        step_on(optimizer, F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4)))
        if scheduler:
            scheduler.step()


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_model_runs_under_autocast_and_returns_float32(dtype: torch.dtype, context: Any) -> None:
    model = Seen()

    def script() -> None:
        with context():
            y = model(torch.ones(2, 4))
        y.detach().numpy()
        assert y.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")

    said_by(script, dtype)
    assert model.dtypes == [dtype]


Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclasses.dataclass(frozen=True)
class Result:
    logits: Tensor
    name: str


class Output(OrderedDict):  # type: ignore[type-arg]
    """Keys that are attributes too, as in transformers."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, [y]), lambda r: r[1][0]),
        (lambda y: Pair(y, None), lambda r: r.logits),
        (lambda y: {"a": {"b": y}}, lambda r: r["a"]["b"]),
        (lambda y: Result(y, "x"), lambda r: r.logits),
        (lambda y: Output(logits=y), lambda r: r.logits),
        (lambda y: nn.utils.rnn.pack_padded_sequence(y[None], [2], True), lambda r: r.data),
        (lambda y: torch.max(y, dim=1), lambda r: r.values),
    ],
)
def test_outputs_in_containers_are_float32(wrap: Any, unwrap: Any) -> None:
    model = Seen(wrap)

    def script() -> None:
        result = model(torch.ones(2, 4))
        assert unwrap(result).dtype is torch.float32
        assert type(result) is type(wrap(torch.ones(2, 4)))
        unwrap(result).sum().backward()

    said_by(script)


def test_outputs_without_lower_precision_are_returned_as_they_are() -> None:
    kept = [torch.ones(2), {"a": 1}, "text"]
    model = Seen(lambda y: kept)

    said_by(lambda: model(torch.ones(2, 4)) is kept or pytest.fail("a copy"))


def test_an_error_in_a_model_leaves_no_autocast_behind() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("in forward")

    failing, model = Seen(fail), Seen()

    def script() -> None:
        for _ in range(2):
            with pytest.raises(KeyError, match="in forward"):
                failing(torch.ones(2, 4))
            assert not torch.is_autocast_enabled("cpu")
        model(torch.ones(2, 4))

    said_by(script, BF16)
    assert failing.dtypes == [BF16, BF16]
    assert model.dtypes == [BF16]


def test_every_thread_has_its_outermost_module() -> None:
    model, inner = Seen(), Seen()

    def call_inner(y: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: inner(torch.ones(2, 4)))
        thread.start()
        thread.join()
        return y

    model.wrap = call_inner
    said_by(lambda: model(torch.ones(2, 4)), BF16)
    assert model.dtypes == inner.dtypes == [BF16]


def test_a_loss_that_gets_lower_precision_runs_under_autocast() -> None:
    """A class of the script's own may hold logits that were not found."""

    class Box:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    model = Seen(Box)

    def script() -> None:
        y = model(torch.ones(2, 4)).y
        assert y.dtype is FP16
        loss = nn.MSELoss()(y, torch.full((2, 4), 1000.0))  # its square leaves float16
        assert loss.dtype is torch.float32
        assert loss.isfinite()

    said_by(script)


def test_nested_modules_and_wrappers() -> None:
    model = AveragedModel(nn.Sequential(Seen(), Seen()))
    inner = list(model.module)

    said = said_by(lambda: model(torch.ones(2, 4)), BF16)

    assert [m.dtypes for m in inner] == [[BF16], [BF16]]
    assert said == [
        "--amp bf16: Sequential.forward runs under autocast; no optimizer step was seen"
    ]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Seen(), Seen(), Seen()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y = checkpoint(self.third, y, use_reentrant=use_reentrant)
            return self.second(checkpoint(self.second, y, use_reentrant=use_reentrant))

    models = [Checkpointed() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def accumulate(model: nn.Module, scaler: halfstep.GradScaler | None) -> None:
        _optimizer = torch.optim.SGD(model.parameters())
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            if scaler is None:
                model(x).square().mean().backward()
            else:
                with halfstep.autocast("cpu", FP16):
                    y = model(x).float()
                scaler.scale(y.square().mean()).backward()

    said = said_by(lambda: accumulate(models[0], None))
    assert not any("its own autocast" in message for message in said)
    scaler = halfstep.GradScaler()
    accumulate(models[1], scaler)
    scaler.unscale_(torch.optim.SGD(models[1].parameters()))

    assert set(models[0].second.dtypes) == {FP16}
    for ours, by_hand in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, by_hand.grad)


# --- compiled, scripted, exported -----------------------------------------------------------------


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("how", ["function", "method", "inner"])
def test_a_compiled_model_is_that_by_hand(how: str) -> None:
    torch.compiler.reset()
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    dtypes = []

    def compiled(model: nn.Sequential) -> nn.Module:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return lambda *args: [dtypes.append(out.dtype) or out for out in graph(*args)]

        if how == "method":
            inner = Whole(model)
            inner.compile(backend=backend, fullgraph=True)
            return inner
        if how == "inner":
            return nn.Sequential(torch.compile(model, backend=backend, fullgraph=True))
        return torch.compile(model, backend=backend, fullgraph=True)

    said = said_by(lambda: adamw_loop(compiled(models[0])))
    model = compiled(models[1])
    scaler = halfstep.GradScaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with halfstep.autocast("cpu", FP16):
            y = model(torch.ones(2, 4)).float()
        scaler.scale(F.mse_loss(y, torch.zeros(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()

    assert "forward and mse_loss run under autocast" in said[0]
    assert dtypes == [FP16] * 6
    assert_same(models[0].parameters(), models[1].parameters())


def test_no_more_is_compiled_than_without_us() -> None:
    """PyTorch compiles nothing of a Sequential of its own modules that is compiled in place."""
    counts = []

    def script() -> None:
        torch.compiler.reset()
        graphs: list[torch.fx.GraphModule] = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.compile(backend=lambda graph, _: graphs.append(graph) or graph)
        with torch.no_grad():
            model(torch.ones(2, 4))
        counts.append(len(graphs))

    script()
    said_by(script)
    assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_a_compiled_function_calls_outside_of_its_graphs() -> None:
    torch.compiler.reset()
    models = [Seen(), torch.compile(Seen(), backend="eager")]

    @torch.compiler.disable(recursive=False)
    def call(x: Tensor) -> Tensor:
        return models[1](models[0](x))

    def script() -> None:
        compiled = torch.compile(lambda x: call(x * 2) * 2, backend="eager")
        for _ in range(2):
            assert compiled(torch.ones(2, 4)).dtype is torch.float32

    said_by(script)
    assert models[0].dtypes == models[1].dtypes == [FP16, FP16]


def test_a_model_compiled_in_the_block_works_after_it() -> None:
    torch.compiler.reset()
    model = Seen()
    compiled: list[Any] = []

    def script() -> None:
        compiled.append(torch.compile(model, backend="eager"))
        compiled[0](torch.ones(2, 4))

    said_by(script, BF16)
    assert compiled[0](torch.ones(2, 4)).dtype is torch.float32
    assert model.dtypes == [BF16, torch.float32]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_is_called_between_graphs() -> None:
    torch.compiler.reset()
    model = Seen()

    def step(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        loss = model(y).square().mean()
        loss.backward()
        return loss.detach()

    def script() -> None:
        compiled = torch.compile(step, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.ones(2, 4))
            assert not torch.is_autocast_enabled("cpu")
            optimizer.step()

    (message,) = said_by(script)
    assert "not seen: model.forward(x), and compiled functions" in message
    assert model.dtypes == [torch.float32] * 3


def test_a_compiled_function_runs_as_it_is() -> None:
    torch.compiler.reset()
    model = Seen()

    def script() -> None:
        torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(torch.ones(2, 4))

    assert "found nothing to run" in said_by(script, BF16)[0]
    assert model.dtypes == [torch.float32]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_and_exported_programs() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.mse_loss(x, torch.zeros_like(x))

    def script() -> None:
        assert torch.jit.script(loss)(torch.ones(2)) == 1.0
        model = nn.Linear(4, 4)
        traced = torch.jit.trace(model, torch.ones(2, 4), check_trace=False)
        assert "half" not in str(traced.graph).lower()
        exported = torch.export.export(model, (torch.ones(2, 4),))
        assert exported.module()(torch.ones(2, 4)).dtype is torch.float32

    said_by(script)


def test_torch_func() -> None:
    model = nn.Linear(4, 1)
    params = dict(model.named_parameters())

    def script() -> None:
        def loss(params: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(model, params, x).sum() / 8

        _optimizer = torch.optim.SGD(model.parameters())
        grads = torch.vmap(torch.func.grad(loss), (None, 0))(params, torch.ones(3, 4))
        assert torch.equal(grads["weight"], torch.full((3, 1, 4), 0.125))

    assert "Linear.forward runs under autocast" in said_by(script)[0]


def test_gradients_that_no_scaled_pass_has_made_are_stepped_if_they_are_finite() -> None:
    model, seen = nn.Linear(4, 1), []
    params = dict(model.named_parameters())

    def script() -> None:
        def loss(params: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(model, params, x).sum()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for value in (1.0, float("nan"), 2.0):
            for name, grad in torch.func.grad(loss)(params, torch.full((3, 4), value)).items():
                params[name].grad = grad
            optimizer.step()
            seen.append(model.weight.detach().clone())

    said = said_by(script)
    assert torch.equal(seen[0], seen[1])
    assert seen[2].isfinite().all()
    assert not torch.equal(seen[1], seen[2])
    assert sum("SGD.step takes gradients that no scaled backward pass has made" in s for s in said)
    assert any(s.endswith("Linear.forward runs under autocast; no loss is scaled") for s in said)


# --- what is said ---------------------------------------------------------------------------------


def test_a_step_that_raises_is_no_step_that_the_script_left_out(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with halfstep.record(tmp_path), mixed_precision(FP16, print):
        step_on(optimizer, model(torch.ones(2, 4)).mean())
        optimizer.register_step_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            step_on(optimizer, model(torch.ones(2, 4)).mean())
    assert [step.reason for step in read_run(tmp_path).steps] == [None]


def test_what_was_wrapped_is_said_once() -> None:
    said = said_by(lambda: adamw_loop(nn.Sequential(nn.Linear(4, 4)), steps=5, schedule=True))

    assert said == [
        "--amp fp16: Sequential.forward and mse_loss run under autocast; the loss is scaled; "
        "AdamW.step goes through a GradScaler; LambdaLR waits for steps that are taken"
    ]
    assert said_by(lambda: adamw_loop(nn.Linear(4, 4)), BF16) == [
        "--amp bf16: Linear.forward and mse_loss run under autocast"
    ]


def test_what_was_wrapped_is_said_while_the_script_runs() -> None:
    said: list[str] = []
    with mixed_precision(FP16, said.append):
        adamw_loop(nn.Linear(4, 4), steps=2)
        assert len(said) == 1


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_script_with_nothing_to_wrap(dtype: torch.dtype) -> None:
    def script() -> None:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            step_on(optimizer, weight.square().sum())
        nn.ReLU()(weight)

    (message,) = said_by(script, dtype)
    assert "mixed precision: in this process no module with parameters was called" in message


def test_it_is_said_at_sys_exit_and_not_after_an_error() -> None:
    said: list[str] = []

    def script(error: BaseException) -> None:
        with mixed_precision(FP16, said.append):
            adamw_loop(nn.Linear(4, 4), steps=1)
            raise error

    with pytest.raises(KeyError):
        script(KeyError("the script fails"))
    assert said == []
    with pytest.raises(SystemExit):
        script(SystemExit(0))
    assert len(said) == 1


def test_another_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--amp", "fp32", "train.py"])
    assert ended.value.code == 2
    assert "argument --amp: 'fp32': choose one of fp16, bf16" in capsys.readouterr().err


# --- what the script does itself ------------------------------------------------------------------


def own_loop(model: nn.Module, scaler_class: Any, autocast: Any, enabled: bool = True) -> None:
    scaler = scaler_class("cpu", enabled=enabled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with autocast("cpu", dtype=FP16, enabled=enabled):
            loss = F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    ("scaler_class", "autocast"),
    [(halfstep.GradScaler, halfstep.autocast), (torch.amp.GradScaler, torch.autocast)],
)
def test_a_script_that_scales_by_itself(dtype: Any, scaler_class: Any, autocast: Any) -> None:
    model = Seen()
    alone = copy.deepcopy(model)

    said = said_by(lambda: own_loop(model, scaler_class, autocast), dtype)
    own_loop(alone, scaler_class, autocast)

    assert len(said) == 1
    assert said[0].endswith(
        "the script has its own GradScaler; no autocast and no scale are added to it"
    )
    assert_same(model.parameters(), alone.parameters())


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_script_with_a_guard(dtype: Any) -> None:
    model = Seen()

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guarded = halfstep.guard(optimizer, on_skips=lambda report: None)
        for value in (1.0, float("nan"), 1.0):
            optimizer.zero_grad()
            step_on(optimizer, model(torch.full((2, 4), value)).square().mean())
        assert guarded.counts()[:2] == (2, 1)

    (message,) = said_by(script, dtype)
    if dtype is BF16:
        assert "Seen.forward runs under autocast" in message
        assert set(model.dtypes) == {BF16}
    else:
        assert "has a guard" in message
        assert set(model.dtypes) == {torch.float32}


def test_a_scaler_that_was_made_before() -> None:
    scaler = halfstep.GradScaler()
    weight = nn.Parameter(torch.ones(1))

    (message,) = said_by(lambda: scaler.scale(weight.sum()).backward())

    assert "its own GradScaler" in message
    assert weight.grad == 65536.0


def test_switches_that_are_off_do_not_count() -> None:
    model, by_hand = Seen(), Seen()
    by_hand.load_state_dict(model.state_dict())

    said = said_by(lambda: own_loop(model, halfstep.GradScaler, halfstep.autocast, enabled=False))
    assert "AdamW.step goes through a GradScaler" in said[0]
    assert model.dtypes == [FP16] * 3


@pytest.mark.parametrize("autocast", [halfstep.autocast, torch.autocast])
def test_an_autocast_of_the_script_stays(autocast: Any) -> None:
    model = Seen()
    gradient: list[Tensor] = []

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with autocast("cpu", dtype=BF16):
                y = model(torch.ones(2, 4))
            assert y.dtype is BF16
            (y.float().sum() / 8).backward()
            gradient.append(model.linear.bias.grad.clone())
            optimizer.step()
            optimizer.zero_grad()

    said = said_by(script)

    assert model.dtypes == [BF16] * 3
    own = "has its own autocast, to bfloat16, which keeps its dtype; the loss is scaled"
    assert own in said[0]
    assert "SGD.step goes through a GradScaler" in said[1]
    assert len(said) == 2
    assert gradient[0].tolist() == [0.25] * 4


@pytest.mark.parametrize("own", ["halfstep", "torch"])
def test_an_autocast_inside_the_model_is_told(own: str, tmp_path: Path) -> None:
    """As accelerate and the Trainer of transformers have one, around ``model.forward``."""
    model = Seen()
    forward = model.forward

    def under_autocast(x: Tensor) -> Tensor:
        with {"halfstep": halfstep, "torch": torch}[own].autocast("cpu", dtype=BF16):
            return forward(x)

    model.forward = under_autocast  # type: ignore[method-assign]

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step_on(optimizer, model(torch.ones(2, 4)).mean())

    with replaced(preset("standard")), halfstep.record(tmp_path):
        said = said_by(script)
    (policy,) = read_run(tmp_path).policies

    assert model.dtypes == [BF16] * 3
    assert "has its own autocast, to bfloat16, which keeps its dtype" in said[0]
    assert policy.dtype == "bfloat16"


@pytest.mark.parametrize("is_inside", [True, False])
def test_rules_for_modules_hold_in_an_autocast_of_the_script(is_inside: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Seen(), Seen()

        def forward(self, x: Tensor) -> Tensor:
            if not is_inside:
                return self.head(self.body(x))
            with torch.autocast("cpu", BF16):
                return self.head(self.body(x))

    model, said = Net(), list[str]()
    policy = halfstep.Policy.parse("standard; @head:fp32")
    with replaced(policy), mixed_precision(FP16, said.append, policy=policy):
        for _ in range(2):
            with torch.autocast("cpu", BF16, enabled=not is_inside):
                model(torch.ones(2, 4))
    assert model.body.dtypes == [BF16] * 2
    assert model.head.dtypes == [torch.float32] * 2


def test_switching_autocast_off_in_a_model_is_no_autocast_of_its_own() -> None:
    class WithIsland(Seen):
        def forward(self, x: Tensor) -> Tensor:
            with halfstep.autocast("cpu", enabled=False):
                x = x * 2
            return super().forward(x)

    said = said_by(lambda: adamw_loop(WithIsland()))
    assert not any("its own autocast" in message for message in said)


def test_parameters_that_the_script_keeps_in_float16() -> None:
    model = Seen().half()
    x = torch.ones(2, 4, dtype=FP16)

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        y = model(x)
        assert y.dtype is FP16
        step_on(optimizer, y.mean())

    (message,) = said_by(script)
    assert (
        "keeps parameters of Seen in float16 itself; no autocast and no scale are added to it"
        in message
    )


# --- what is left behind --------------------------------------------------------------------------


def places() -> dict[str, object]:
    owners: list[Any] = [nn.Module, F, torch.autograd, torch.optim.Optimizer, LRScheduler]
    owners += [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS, LambdaLR]
    owners += [torch.optim.lr_scheduler.ReduceLROnPlateau, torch.amp.GradScaler]
    owners += [halfstep.GradScaler, halfstep.GradScaler.__mro__[1], halfstep.autocast]
    return {f"{owner}.{name}": value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("error", [None, ValueError])
def test_everything_is_put_back(dtype: torch.dtype, error: Any) -> None:
    adamw_loop(nn.Linear(4, 4), schedule=True)  # PyTorch itself changes `step` of a class once
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    before = places()
    try:
        with mixed_precision(dtype, lambda _: None):
            assert places() != before
            adamw_loop(nn.Linear(4, 4), schedule=True)
            if error:
                raise error
    except ValueError:
        pass

    assert places() == before


def test_an_optimizer_goes_on_after_the_block() -> None:
    model = Seen()
    optimizers = []

    def script() -> None:
        optimizer = torch.optim.Adagrad(model.parameters())
        schedule = LambdaLR(optimizer, lambda i: 0.5**i)
        optimizers.append((optimizer, schedule))
        step_on(optimizer, model(torch.ones(2, 4)).mean())

    said_by(script)
    optimizer, schedule = optimizers[0]
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    before = model.linear.weight.detach().clone()
    optimizer.step()
    schedule.step()
    assert hooked == [1]
    assert not torch.equal(model.linear.weight, before)
    assert schedule.get_last_lr() == [0.005]


def test_an_optimizer_that_was_made_before() -> None:
    model = Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.linear.weight.register_hook(lambda grad: grad * float("inf"))
    before = model.linear.weight.detach().clone()

    def script() -> None:
        step_on(optimizer, model(torch.ones(2, 4)).mean())

    said_by(script)
    assert torch.equal(model.linear.weight, before)


def test_an_optimizer_that_is_made_after_backward() -> None:
    weight = nn.Parameter(torch.ones(1))

    def script() -> None:
        weight.sum().mul(float("inf")).backward()
        optimizer = torch.optim.SGD([weight], lr=0.25)
        optimizer.step()
        assert weight == 1.0
        weight.grad.fill_(1.0)
        optimizer.step()
        assert weight == 0.75

    said_by(script)


def test_a_sharded_model_is_left_alone() -> None:
    class FSDPModule:
        pass

    class FSDPSeen(FSDPModule, Seen):
        pass

    assert "FSDPSeen is sharded by FSDP" in said_by(lambda: FSDPSeen()(torch.ones(2, 4)))[0]
    assert "FSDPSeen.forward runs" in said_by(lambda: FSDPSeen()(torch.ones(2, 4)), BF16)[0]


def test_a_compiled_step_is_skipped_too() -> None:
    torch.compiler.reset()
    model = Seen()
    model.linear.weight.register_hook(lambda grad: grad * float("inf"))
    before = model.linear.weight.detach().clone()

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        model(torch.ones(2, 4)).mean().backward()
        step()

    said_by(script)
    assert torch.equal(model.linear.weight, before)


def test_blocks_nest() -> None:
    """The inner one decides."""
    model = Seen()
    said: list[str] = []
    with mixed_precision(BF16, said.append), mixed_precision(FP16, said.append):
        model(torch.ones(2, 4))
    assert model.dtypes in ([FP16], [BF16])
    assert not torch.is_autocast_enabled("cpu")


def test_a_policy() -> None:
    dtypes = []
    model = Seen(lambda y: dtypes.append(torch.softmax(y, 0).dtype))

    for policy in (None, "standard; softmax:lower"):
        with mixed_precision(BF16, lambda _: None, policy=policy):
            model(torch.ones(2, 4))

    assert dtypes == [torch.float32, BF16]


def test_one_bad_step_is_diagnosed_once_and_its_replays_are_not_the_scripts() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def script() -> None:
        for step in range(6):
            optimizer.zero_grad()
            out = model(torch.ones(2, 4))
            if step == 3:
                out = (out * 1e6).half()
            step_on(optimizer, F.cross_entropy(out, torch.tensor([0, 1])))

    found: list[int] = []
    with Watch(tell=lambda diagnosis, step: found.append(step)) as watch:
        said = said_by(script)
    assert (found, watch.notes) == ([4], [])
    assert not any("its own autocast" in message for message in said)


def test_a_backward_pass_that_ends_an_iteration_is_of_the_next_step() -> None:
    """As a critic's: the actor's loss leaves it gradients, so the iteration stays open."""
    critic, actor, x = nn.Linear(4, 1), nn.Linear(4, 4), torch.ones(2, 4)

    def script() -> None:
        of_critic, of_actor = (torch.optim.SGD(each.parameters()) for each in (critic, actor))
        for step in range(5):
            of_critic.zero_grad()
            out = critic(x)
            step_on(of_critic, (out * 0).sqrt().mean() if step == 3 else out.mean())
            of_actor.zero_grad()
            step_on(of_actor, critic(actor(x)).mean())

    found: list[Any] = []
    with Watch(tell=lambda diagnosis, step: found.append((step, diagnosis.bad.name))):
        said_by(script)
    assert found == [(4, "sqrt")]


def test_no_op_of_halfstep_is_to_blame_for_bad_gradients() -> None:
    trace = LiveTrace(model := nn.Linear(4, 1))
    with mixed_precision(torch.float16, lambda _: None):
        step_on(torch.optim.SGD(model.parameters()), model(torch.ones(2, 4)).mean())
        model.weight.grad.fill_(torch.inf)
        trace.begin()
        model(torch.ones(2, 4)).mean().backward()
    found = trace.end(1.0)
    assert found is None or "_amp_" not in found.bad.op


def test_a_replay_with_a_checkpoint_names_no_inner_module() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.linear, x, use_reentrant=False)

    model = Block()

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), 6e5 if step == 0 else 1.0)).square().mean().backward()
            optimizer.step()

    with Watch(tell=lambda *_: None) as watch:
        said = said_by(script)
    assert watch.notes == []
    assert said[0].startswith("--amp fp16: Block.forward runs under autocast; the loss is scaled")
