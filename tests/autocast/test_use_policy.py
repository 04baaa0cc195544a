"""A policy for contexts that others enter: what follows it, what does not, and for how long."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.integrations.quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import use_policy
from halfstep._autocast import scopes

BF16 = torch.bfloat16
SOFTMAX_LOW = "standard; softmax:lower"


def theirs(dtype: torch.dtype = BF16) -> torch.autocast:
    return torch.autocast(DEVICE, dtype)


def softmax(x: Tensor | None = None) -> Tensor:
    return torch.softmax(torch.ones(2, 3) if x is None else x, dim=-1)


def test_nothing_is_switched_on() -> None:
    x = torch.ones(2, 3)
    with use_policy(SOFTMAX_LOW):
        assert not torch.is_autocast_enabled(DEVICE)
        assert softmax(x).dtype is torch.float32
        assert (x @ x.t()).dtype is torch.float32
        with theirs():
            pass
        assert softmax(x).dtype is torch.float32


@pytest.mark.parametrize("context", [theirs, lambda: halfstep.autocast(DEVICE, BF16)])
def test_contexts_inside_follow(context: Callable[[], Any]) -> None:
    with use_policy(SOFTMAX_LOW):
        with context():
            assert softmax().dtype is BF16
        with context(), torch.autocast(DEVICE, enabled=False):
            assert softmax().dtype is torch.float32
    with context():
        assert softmax().dtype is torch.float32


def test_a_policy_of_its_own_goes_before() -> None:
    with use_policy(SOFTMAX_LOW), halfstep.autocast(DEVICE, BF16, policy="standard"):
        assert softmax().dtype is torch.float32
        with use_policy(SOFTMAX_LOW):
            assert softmax().dtype is BF16
        assert softmax().dtype is torch.float32


def test_the_innermost_counts() -> None:
    seen = []
    low, high = "standard; softmax:lower", "standard; softmax:fp32"
    with use_policy(low):
        with use_policy(high):
            with use_policy(low), theirs():
                seen.append(softmax().dtype)
            with theirs():
                seen.append(softmax().dtype)
        with theirs():
            seen.append(softmax().dtype)
    assert seen == [BF16, torch.float32, BF16]
    assert scopes.ambient is scopes.NO_POLICIES


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), use_policy(SOFTMAX_LOW), theirs():
        raise ZeroDivisionError
    with theirs():
        assert softmax().dtype is torch.float32
    assert scopes.ambient is scopes.NO_POLICIES


def test_rules_for_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with use_policy("standard; @1:fp32", module=model), theirs():
        assert model[0](torch.ones(1, 4)).dtype is BF16
        assert model(torch.ones(1, 4)).dtype is torch.float32
    with theirs():
        assert model(torch.ones(1, 4)).dtype is BF16


def test_the_policy_torch_is_pytorch() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    x = torch.randn(3, 2, 16)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with theirs():
            y = model(x)
        y.float().square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with use_policy("torch"):
        found = gradients()
    assert all(map(torch.equal, expected, found))


# --- threads --------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def under_theirs() -> torch.dtype:
    with theirs():
        return softmax().dtype


def under_ours() -> torch.dtype:
    with halfstep.autocast(DEVICE, BF16):
        return softmax().dtype


@pytest.mark.parametrize("work", [under_theirs, under_ours])
def test_threads_without_a_policy_follow(work: Callable[[], torch.dtype]) -> None:
    with use_policy(SOFTMAX_LOW):
        assert in_thread(work) is BF16
    assert in_thread(work) is torch.float32


def test_a_thread_that_was_there_before_follows() -> None:
    begin, go_on = threading.Event(), threading.Event()
    seen: list[torch.dtype] = []

    def work() -> None:
        seen.append(under_theirs())
        begin.set()
        go_on.wait(10)
        seen.extend([under_theirs(), under_ours()])

    thread = threading.Thread(target=work)
    thread.start()
    begin.wait(10)
    with use_policy(SOFTMAX_LOW):
        go_on.set()
        thread.join()
    assert seen == [torch.float32, BF16, BF16]


def test_a_thread_with_a_policy_keeps_it() -> None:
    def work() -> torch.dtype:
        with use_policy("standard; softmax:fp32"):
            return under_theirs()

    with use_policy(SOFTMAX_LOW):
        assert in_thread(work) is torch.float32
        assert under_theirs() is BF16


# --- recomputation, torch.func, torch.compile -----------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_recomputed_under_it(use_reentrant: bool) -> None:
    """After the block, too: a backward pass may come later."""
    seen = []

    def block(x: Tensor) -> Tensor:
        y = softmax(x)
        seen.append(y.dtype)
        return y * y

    x = torch.ones(2, 3, requires_grad=True)
    with use_policy(SOFTMAX_LOW), theirs():
        y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.float().square().sum().backward()
    assert seen == [BF16, BF16]


def test_vmap() -> None:
    """It takes a softmax apart before autocast sees it, under any policy."""
    with theirs():
        expected = torch.vmap(softmax)(torch.ones(2, 3))
    with use_policy(SOFTMAX_LOW), theirs():
        result = torch.vmap(softmax)(torch.ones(2, 3))
    assert torch.equal(result, expected)
    assert result.dtype is expected.dtype is torch.float32


def test_compiled_code_is_made_for_each_policy() -> None:
    compiled = torch.compile(lambda x: softmax(x) * 1, backend="aot_eager")

    def dtype() -> torch.dtype:
        with theirs():
            return compiled(torch.ones(2, 3)).dtype

    seen = [dtype()]
    with use_policy(SOFTMAX_LOW):
        seen.append(dtype())
    seen.append(dtype())
    assert seen == [torch.float32, BF16, torch.float32]


def test_compiled_code_is_told_apart_in_a_thread_that_enters_the_policy_too() -> None:
    compiled = torch.compile(lambda x: softmax(x) * 1, backend="aot_eager")

    def dtype() -> torch.dtype:
        with theirs():
            return compiled(torch.ones(2, 3)).dtype

    with use_policy(SOFTMAX_LOW):
        seen = [in_thread(use_policy(SOFTMAX_LOW)(dtype))]
    seen += [dtype(), in_thread(dtype)]
    with use_policy(SOFTMAX_LOW):
        seen.append(in_thread(use_policy(SOFTMAX_LOW)(dtype)))
    assert seen == [BF16, torch.float32, torch.float32, BF16]


# --- casts of weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("context", [theirs, lambda: halfstep.autocast(DEVICE, BF16)])
def test_no_cast_of_a_weight_outlives_a_context_inside(context: Callable[[], Any]) -> None:
    linear = nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4)
    with use_policy("standard"):
        for factor in (1.0, 2.0, 3.0):
            linear.weight.data.fill_(factor)
            with context():
                for _ in range(3):
                    y = linear(x)
            assert y.tolist() == [[4 * factor] * 4]


# --- the form of it -------------------------------------------------------------------------------


def test_a_decorator() -> None:
    @use_policy(SOFTMAX_LOW)
    def nested(depth: int) -> torch.dtype:
        """Train."""
        return nested(depth - 1) if depth else under_theirs()

    assert nested(2) is BF16
    assert nested.__doc__ == "Train."
    assert under_theirs() is torch.float32


def test_it_is_left_in_order() -> None:
    outer, inner = use_policy("standard"), theirs()
    block = halfstep.autocast(DEVICE, BF16)
    outer.__enter__()
    block.__enter__()
    with pytest.raises(halfstep.CallOrderError, match="before a context that was entered in it"):
        outer.__exit__(None, None, None)
    assert torch.is_autocast_enabled(DEVICE)
    block.__exit__(None, None, None)
    assert scopes.current().policies is scopes.ambient is scopes.NO_POLICIES
    with inner:
        assert softmax().dtype is torch.float32


def test_blocks_that_take_turns_leave_nothing_behind() -> None:
    """As in asyncio tasks and generators that wait inside of their blocks."""
    blocks = [use_policy(SOFTMAX_LOW), use_policy("standard"), use_policy(SOFTMAX_LOW)]
    for block in blocks:
        block.__enter__()
    for block in blocks[:2]:
        with pytest.raises(halfstep.CallOrderError, match="before a context that was entered in"):
            block.__exit__(None, None, None)
    assert under_theirs() is BF16
    blocks[2].__exit__(None, None, None)
    assert scopes.current().policies is scopes.ambient is scopes.NO_POLICIES


def test_an_autocast_that_is_left_before_a_block_in_it_is_off() -> None:
    context, block = halfstep.autocast(DEVICE, BF16), use_policy(SOFTMAX_LOW)
    context.__enter__()
    block.__enter__()
    with pytest.raises(halfstep.CallOrderError, match="entered after it, is not"):
        context.__exit__(None, None, None)
    assert not torch.is_autocast_enabled(DEVICE)
    assert under_theirs() is BF16
    block.__exit__(None, None, None)
    assert scopes.current().policies is scopes.ambient is scopes.NO_POLICIES


def test_one_that_was_not_entered_is_not_left() -> None:
    with use_policy(SOFTMAX_LOW), use_policy(SOFTMAX_LOW) as block:
        block.__exit__(None, None, None)
        with pytest.raises(halfstep.CallOrderError, match="was not entered"):
            block.__exit__(None, None, None)
        assert in_thread(under_theirs) is BF16
        block.__enter__()


def test_it_is_left_in_its_thread() -> None:
    block = use_policy(SOFTMAX_LOW)
    block.__enter__()
    with pytest.raises(halfstep.CallOrderError, match="in another thread"):
        in_thread_raising(lambda: block.__exit__(None, None, None))
    assert scopes.ambient is scopes.NO_POLICIES
    scopes.leave(scopes.current())


def in_thread_raising(work: Callable[[], Any]) -> None:
    def caught() -> BaseException | None:
        try:
            work()
        except BaseException as error:
            return error
        return None

    error = in_thread(caught)
    if error is not None:
        raise error


def test_one_block_is_entered_once_at_a_time() -> None:
    block = use_policy("standard")
    for _ in range(2):
        with block, pytest.raises(halfstep.CallOrderError, match="is entered already"):
            block.__enter__()
    assert scopes.ambient is scopes.NO_POLICIES


def test_what_it_is_given() -> None:
    assert repr(use_policy("torch; linear:fp32")) == "use_policy('torch; linear:fp32')"
    with pytest.raises(TypeError, match="pass a policy or its text"):
        use_policy(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'standard'"):
        use_policy("standart")
    with pytest.raises(ValueError, match="module"):
        use_policy("standard; @head:fp32")


# --- frameworks, which enter torch.autocast somewhere inside --------------------------------------


class Seen(nn.Module):
    """A linear layer and a softmax, whose dtypes it notes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.linear(x)
        p = softmax(y)
        self.dtypes.append((y.dtype, p.dtype))
        return {"loss": p.float().square().mean()}


def train_with_accelerate(folder: Path) -> Seen:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(wrapped(torch.ones(2, 4))["loss"])
        optimizer.step()
    return model


def train_with_transformers(folder: Path) -> Seen:
    transformers = pytest.importorskip("transformers")
    model = Seen()
    arguments = transformers.TrainingArguments(
        str(folder), bf16=True, use_cpu=True, max_steps=2, report_to=[], save_strategy="no"
    )
    data = [{"x": torch.ones(4), "labels": torch.zeros(1)}] * 4
    transformers.Trainer(model, arguments, train_dataset=data).train()
    return model


def train_with_lightning(folder: Path) -> Seen:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Seen()

        def training_step(self, batch: Tensor) -> Tensor:
            return self.seen(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = quiet_trainer(folder, max_epochs=-1, max_steps=2, precision="bf16-mixed")
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2))
    return module.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "train", [train_with_accelerate, train_with_transformers, train_with_lightning]
)
def test_frameworks_follow(train: Callable[[Path], Seen], tmp_path: Path) -> None:
    assert set(train(tmp_path).dtypes) == {(BF16, BF16)}  # PyTorch's list of the CPU
    with use_policy("standard"):
        assert set(train(tmp_path).dtypes) == {(BF16, torch.float32)}
    with use_policy("standard; linear:fp32; softmax:lower"):
        assert set(train(tmp_path).dtypes) == {(torch.float32, BF16)}
    assert set(train(tmp_path).dtypes) == {(BF16, BF16)}
