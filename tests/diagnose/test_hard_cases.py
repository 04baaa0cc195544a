"""Steps and loops that are easily misunderstood, each of them once was."""

from __future__ import annotations

import linecache
import math
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfstep
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.diagnose.inspect_op import names_in
from halfstep._tools.watch import watch as watching
from halfstep._tools.watch.watch import Watch

pytestmark = pytest.mark.slow

X, ONE = torch.ones(5, 4), torch.ones(5, 1)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def in_float16() -> halfstep.autocast:
    return halfstep.autocast(DEVICE, torch.float16)


def watched(
    model: nn.Module, loss: Callable[[int], Tensor], num: int, scale: float = 256.0
) -> Watch:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = halfstep.GradScaler(init_scale=256.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with halfstep.diagnose(scaler, model=model, tell=lambda *_: None) as watch:
            for index in range(num):
                optimizer.zero_grad()
                with in_float16():
                    value = loss(index)
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
    return watch


# --- what is named --------------------------------------------------------------------------------


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 1e30


@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_closer_look_is_at_the_same_op_whatever_the_scaler_does(is_fresh: bool) -> None:
    model = mlp()
    scaler = halfstep.GradScaler(init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        with in_float16():
            loss = F.mse_loss(model[2](Steep.apply(model[1](model[0](X)))), ONE)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    if not is_fresh:
        with warnings.catch_warnings(action="ignore"):
            step()
    bad = halfstep.diagnose(step, model=model).bad
    assert (bad.op, bad.phase, bad.forward_op) == ("mul", "backward", "clone")
    assert bad.line.text == "return gradient * 1e30"
    assert bad.output.inf
    assert all(operand.inf == operand.nan == 0 for operand in bad.inputs)


def test_a_backward_op_of_a_loop_has_its_operands() -> None:
    model = mlp()
    watch = watched(model, lambda i: F.mse_loss(model(X), ONE) * (1.0 if i < 2 else 1e30), 12)
    (found,) = watch.found
    assert found.bad.phase == "backward"
    assert found.bad.output.inf


def test_memory_that_was_of_a_gradient_has_no_name() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    name_of = names_in(model)
    assert name_of(model.weight.grad) == "weight.grad"
    model.zero_grad()
    others = [torch.ones(4, 4) for _ in range(1000)]
    assert {name_of(each) for each in others} == {""}


@pytest.mark.parametrize("wrap", [DataParallel, lambda m: m])
def test_names_in_a_policy_are_those_of_the_model_inside(wrap: Callable[..., nn.Module]) -> None:
    model = mlp()
    outer = wrap(model)

    def step() -> None:
        with in_float16():
            F.mse_loss(outer(X * 3e5), ONE).backward()

    found = halfstep.diagnose(step, model=outer)
    assert (found.bad.module, found.verdict) == ("0", "range")
    assert found.cure.is_finite


def test_a_second_model_has_its_class_before_its_names() -> None:
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)

    def step() -> None:
        with in_float16():
            F.mse_loss(decoder(encoder(X) * 1e6), ONE).backward()

    found = halfstep.diagnose(step)
    assert found.verdict == "range"
    assert found.cure.is_finite


def test_what_a_step_returns_counts_only_if_there_is_no_loss() -> None:
    model = nn.Linear(4, 8)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        with in_float16():
            logits = model(X).masked_fill(torch.arange(8) > 3, -math.inf)
            loss = F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
        loss.backward()
        return loss, logits, torch.tensor(math.inf)

    assert halfstep.diagnose(step, model=model).verdict == "none"
    assert halfstep.diagnose(lambda: torch.log(model(X) * 0).sum()).verdict == "maths"


def test_the_batch_of_a_mask_of_many_values_is_not_blamed() -> None:
    torch.manual_seed(0)
    query, key = nn.Linear(4, 4), nn.Linear(4, 4)
    distances = -torch.arange(5.0).repeat(5, 1)
    mask = distances.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)  # as in ALiBi

    def step() -> None:
        with in_float16():
            scores = (query(X) * 1e3) @ (key(X) * 1e3).t()
            torch.softmax(scores + mask, -1).sum().backward()

    found = halfstep.diagnose(step)
    assert (found.verdict, found.bad.op) == ("range", "mm")


def test_a_row_that_is_masked_is_not_blamed_on_a_mask_of_many_values() -> None:
    mask = -torch.arange(4.0).repeat(5, 1)
    mask[:, 3] = -math.inf
    mask[2] = -math.inf
    padded = torch.zeros(5, 4, dtype=torch.bool)
    padded[1, :3] = True

    def step(mask: Tensor) -> None:
        scores = X.masked_fill(padded, -math.inf).requires_grad_() * 1.0
        torch.softmax(scores + mask, -1).sum().backward()

    found = halfstep.diagnose(lambda: step(mask))
    assert (found.verdict, found.bad.op) == ("maths", "_softmax")


def test_gradients_that_are_changed_after_backward() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (model(X) * 0).sum().backward()
        for param in model.parameters():
            param.grad.mul_(1 / param.grad.norm())
        optimizer.step()

    found = halfstep.diagnose(step, model=model)
    assert (found.verdict, found.bad.op) == ("maths", "reciprocal")


def test_a_sparse_gradient() -> None:
    table = nn.Embedding(6, 3, sparse=True)

    def step() -> None:
        (table(torch.tensor([1, 2])).sum(-1) * 0).sqrt().sum().backward()

    found = halfstep.diagnose(step, model=table)
    assert (found.verdict, found.bad.forward_op) == ("maths", "sqrt")


def test_a_gradient_that_was_not_zeroed_is_named() -> None:
    model = mlp()
    (model(X) * math.nan).sum().backward()
    found = halfstep.diagnose(lambda: model(X).sum().backward(), model=model)
    assert found.verdict == "data"
    assert found.tensor.endswith(".grad")
    assert "zero_grad" in found.cure.text


def test_code_of_a_notebook_has_lines() -> None:
    source = "def step():\n    y = model(X)\n    (y / (y * 0)).mean().backward()\n"
    file = "<ipython-input-3-ab>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"model": mlp(), "X": X}
    exec(compile(source, file, "exec"), names)
    found = halfstep.diagnose(names["step"])
    assert (found.bad.line.file, found.bad.line.number) == (file, 3)
    assert found.cure.is_finite


def test_nested_tensors_do_not_end_the_process() -> None:
    model = nn.Linear(4, 4)

    def step() -> None:
        parts = [torch.ones(2, 4), torch.ones(3, 4)]
        model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()

    with warnings.catch_warnings(action="ignore"):
        assert halfstep.diagnose(step, model=model).verdict == "none"


# --- restored state -------------------------------------------------------------------------------


def test_memory_that_is_resized_or_replaced_is_put_back() -> None:
    model, buffer = mlp(), torch.empty(0)
    before = [param.detach().clone() for param in model.parameters()]
    memories = [param.data_ptr() for param in model.parameters()]

    def step() -> None:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            torch.mul(X, 2, out=buffer)
            model[0].weight.mul_(2)
        model(buffer).sum().backward()
        for param in model.parameters():
            param.data = param.data.clamp(-0.01, 0.01)

    halfstep.diagnose(step, model=model)
    assert all(map(torch.equal, before, model.parameters()))
    assert [param.data_ptr() for param in model.parameters()] == memories
    assert all(param.grad is None for param in model.parameters())


def test_flags_hooks_and_containers_of_modules_are_put_back() -> None:
    model = mlp()
    model.seen = {"a": 1}  # type: ignore[assignment]
    hooks = len(model._forward_hooks)

    def step() -> None:
        model.register_forward_hook(lambda *_: None)
        model.seen["b"] = 2  # type: ignore[index,operator]
        model[0].requires_grad_(False)
        model.eval()
        model(X).sum().backward()

    halfstep.diagnose(step, model=model)
    assert len(model._forward_hooks) == hooks
    assert model.seen == {"a": 1}
    assert all(param.requires_grad for param in model.parameters())
    assert model.training


def test_another_thread_that_trains_is_left_alone() -> None:
    model, other = mlp(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    steps, stop = [0, 0], threading.Event()

    def train_other() -> None:
        while not stop.is_set():
            before = other.weight.detach().clone()
            optimizer.zero_grad()
            F.mse_loss(other(X), ONE * (steps[0] + 2)).backward()
            optimizer.step()
            steps[0] += 1
            steps[1] += not torch.equal(before, other.weight)

    thread = threading.Thread(target=train_other)
    thread.start()
    try:
        watch = watched(model, lambda i: F.mse_loss(model(X * 10.0 ** (6 * (i == 2))), ONE), 4)
    finally:
        stop.set()
        thread.join()
    assert [found.verdict for found in watch.found] == ["range"]
    assert steps[0] == steps[1] > 0


def test_another_thread_that_calls_a_model_during_a_step_is_left_alone() -> None:
    model, other = mlp(), nn.Linear(4, 1)

    def call(*_: object) -> None:
        thread = threading.Thread(target=lambda: other(X))
        thread.start()
        thread.join()

    hook = register_optimizer_step_post_hook(call)
    try:
        watch = watched(model, lambda i: F.mse_loss(model(X * 10.0 ** (6 * (i == 2))), ONE), 4)
    finally:
        hook.remove()
    assert [found.verdict for found in watch.found] == ["range"]


# --- loops ----------------------------------------------------------------------------------------


def test_a_loss_that_goes_bad_after_its_function_is_not_taken_for_data() -> None:
    model = mlp()
    watch = watched(model, lambda i: F.mse_loss(model(X), ONE) / float(i not in (2, 3)), 4)
    (found,) = watch.found
    assert found.num_replays > 0
    assert found.verdict == "maths"
    assert found.bad.op == "div"


def test_no_activations_are_kept_alive() -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            alive.append(weakref.ref(y))
            return y

    model = nn.Sequential(nn.Linear(4, 8), Noting(), nn.Linear(8, 1))
    with halfstep.diagnose(halfstep.GradScaler(), model=model):
        for _ in range(20):
            model(X).mean()
        assert sum(reference() is not None for reference in alive) == 0


def test_a_diagnosis_on_request_inside_of_a_watch_is_not_replayed() -> None:
    model = mlp()
    nan = torch.full((5, 4), math.nan)
    asked: list[Diagnosis] = []

    def loss(index: int) -> Tensor:
        if index == 1:
            asked.append(halfstep.diagnose(lambda: model(nan).sum().backward()))
        return F.mse_loss(model(X * (1e6 if index == 1 else 1)), ONE)

    watch = watched(model, loss, 2)
    assert [found.verdict for found in (*asked, *watch.found)] == ["data", "range"]


def test_a_batch_of_the_users_own_type_is_handed_on_as_it_is() -> None:
    class Pair(tuple):  # type: ignore[type-arg]
        def __new__(cls, one: Tensor, other: Tensor) -> Pair:
            return super().__new__(cls, (one, other))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, pair: Pair) -> Tensor:
            out: Tensor = self.inner(pair[0])
            return out

    model = Net()
    watch = watched(model, lambda i: F.mse_loss(model(Pair(X * (1e6 if i else 1), ONE)), ONE), 2)
    assert [found.verdict for found in watch.found] == ["range"]


def test_a_run_that_stays_bad_is_not_replayed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_TRIED", 3)
    model = mlp()
    calls = [0]

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += 1
            out: Tensor = model(x)
            return out

    counting = Counting()
    counting.model = model
    watch = watched(counting, lambda i: F.mse_loss(counting(X * math.nan), ONE), 40)
    assert len(watch.found) == 1
    assert calls[0] < 40 + 3 * 10


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_compiled_models_in_a_loop(is_wrapped: bool) -> None:
    torch._dynamo.reset()
    inner = mlp()
    if is_wrapped:
        model = torch.compile(inner, backend="aot_eager")
    else:
        inner.compile(backend="aot_eager")
        model = inner
    watch = watched(model, lambda i: F.mse_loss(model(X * (1e6 if i == 2 else 1)), ONE), 3)  # type: ignore[arg-type]
    (found,) = watch.found
    assert (found.verdict, found.bad.module) == ("range", "0")
    assert any("compiled" in note for note in found.notes)


def test_a_step_that_stops_before_backward_is_judged_by_its_ops() -> None:
    model = nn.Linear(4, 4)

    def step() -> None:
        loss = torch.log(model(X) * 0).sum()
        if loss.isfinite():
            loss.backward()

    found = halfstep.diagnose(step, model=model)
    assert (found.verdict, found.bad.op) == ("maths", "log")
    nothing = halfstep.diagnose(lambda: None)
    assert nothing.verdict == "none"
    assert any("called no backward and returned no tensor" in note for note in nothing.notes)


def test_integers_that_a_copy_overflows_with_are_of_range() -> None:
    weight, counts = nn.Parameter(torch.ones(2).half()), torch.tensor([100_000, 1])
    found = halfstep.diagnose(lambda: (torch.zeros(2).half().copy_(counts) * weight).sum())
    assert (found.verdict, found.bad.op, found.bad.needs) == ("range", "copy_", 100_000)


def test_wrong_arguments_of_a_watch_are_refused_at_once() -> None:
    scaler = halfstep.GradScaler()
    with pytest.raises(TypeError, match=r"diagnose\(model=list\): pass a torch.nn.Module"):
        halfstep.diagnose(scaler, model=[mlp()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"diagnose\(step, tell=\.\.\.\).*diagnose\(scaler, tell="):
        halfstep.diagnose(lambda: None, tell=print)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"diagnose\(GradScaler\).*its halfstep.GradScaler"):
        halfstep.diagnose(torch.amp.GradScaler("cpu"))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"diagnose\(tell=int\)"):
        halfstep.diagnose(scaler, model=mlp(), tell=3)  # type: ignore[arg-type]
