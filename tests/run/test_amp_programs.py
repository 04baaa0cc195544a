"""What programs do in their models and loops, under ``--amp``: numbers, hooks, methods."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep._tools.run.amp import mixed_precision

FP16, BF16 = torch.float16, torch.bfloat16


class Net(nn.Module):
    """A model with a step in its ``forward`` after a product."""

    def __init__(self, step: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step

    def forward(self, x: Tensor) -> Any:
        return self.step(self.linear(x))


MASK = torch.tensor([True, False, True, False])
INDEX = torch.tensor([[0, 2]])
# Steps with a number that float16 cannot hold, or bfloat16.
OUT_OF_PLACE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda h, v: h.masked_fill(MASK, -v),
    "masked_fill with a tensor": lambda h, v: h.masked_fill(MASK, torch.tensor(-v)),
    "fill": lambda h, v: torch.fill(h, v),
    "pad": lambda h, v: F.pad(h, (1, 1), value=v),
    "clamp": lambda h, v: h.clamp(min=-v, max=v),
    "clip": lambda h, v: h.clip(-v),
    "hardtanh": lambda h, v: F.hardtanh(h, -v, v),
    "index_fill": lambda h, v: h.index_fill(1, INDEX[0], v),
    "scatter": lambda h, v: h.scatter(1, INDEX, -v),
    "threshold": lambda h, v: F.threshold(h, 0.0, -v),
    "full_like": lambda h, v: torch.full_like(h, -v),
    "new_full": lambda h, v: h.new_full((2,), v),
}
IN_PLACE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill_": lambda h, v: h.masked_fill_(MASK, -v),
    "masked_fill_ with a tensor": lambda h, v: h.masked_fill_(MASK, torch.tensor(-v)),
    "fill_": lambda h, v: h.fill_(v),
    "clamp_": lambda h, v: h.clamp_(-v, v),
    "index_fill_": lambda h, v: h.index_fill_(1, INDEX[0], v),
    "scatter_": lambda h, v: h.scatter_(1, INDEX, -v),
    "threshold_": lambda h, v: F.threshold_(h, 0.0, -v),
    "a named dtype": lambda h, v: torch.full_like(h, -v, dtype=h.dtype),
}
BEYOND = {FP16: 1e10, BF16: torch.finfo(torch.float32).max}


@pytest.mark.parametrize("dtype", BEYOND)
@pytest.mark.parametrize("name", [*OUT_OF_PLACE, *IN_PLACE])
def test_numbers_that_16_bits_cannot_hold(name, dtype):
    step, number = {**OUT_OF_PLACE, **IN_PLACE}[name], BEYOND[dtype]
    seen: list[Tensor] = []
    net = Net(lambda h: seen.append(step(h.detach().clone(), number)))
    with mixed_precision(dtype, print):
        net(torch.ones(1, 4))
    with torch.autocast("cpu", dtype):
        h = net.linear(torch.ones(1, 4)).detach()
    end = torch.finfo(dtype).max
    expected = step(h.float(), number) if name in OUT_OF_PLACE else step(h.clone(), end)
    assert seen[0].dtype is expected.dtype
    torch.testing.assert_close(seen[0], expected)
    with pytest.raises(RuntimeError, match="without overflow"):  # outside, nothing is changed
        step(h.clone(), number)


def test_numbers_that_fit_change_no_dtype():
    seen: list[torch.dtype] = []
    net = Net(lambda h: seen.append(h.masked_fill(MASK, float("-inf")).clamp(-6e4).dtype))
    with mixed_precision(FP16, print):
        net(torch.ones(1, 4))
    assert seen == [FP16]


# --- hooks on gradients ---------------------------------------------------------------------------


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Hooked(nn.Module):
    """A model whose hooks note what they see in ``seen`` and return what ``change`` does."""

    def __init__(self, place: str, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.place, self.change, self.seen = place, change, list[Tensor]()
        match place:
            case "parameter":
                self.first.weight.register_hook(self.see)
            case "a keyword":
                self.first.weight.register_hook(hook=self.see)
            case "after accumulation":
                self.first.weight.register_post_accumulate_grad_hook(self.see_parameter)
            case "module":
                self.last.register_full_backward_hook(self.see_module)
            case "before a module":
                self.last.register_full_backward_pre_hook(self.see_before)
            case "several":
                parameters = [*self.parameters()]
                torch.autograd.graph.register_multi_grad_hook(
                    parameters, lambda grads: self.seen.extend(g.clone() for g in grads)
                )

    def see(self, grad: Tensor) -> Any:
        self.seen.append(grad.clone())
        return self.change(grad)

    def see_parameter(self, param: Tensor) -> None:
        param.grad = param.grad if (new := self.see(param.grad)) is None else new

    def see_module(self, module: nn.Module, grads: Any, outputs: Any) -> Any:
        self.seen.append(outputs[0].clone())
        new = self.see(grads[0])
        return None if new is None else (new,)

    def see_before(self, module: nn.Module, outputs: Any) -> Any:
        new = self.see(outputs[0])
        return None if new is None else (new,)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.place == "activation" and h.requires_grad:
            h.register_hook(self.see)
        return self.last(h.relu())


def trained(model: nn.Module, steps: int = 20) -> nn.Module:
    """Train with a loss of about 0.01, which does not overflow at the first scale."""
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        (0.01 * F.mse_loss(model(x), x.sum(1, keepdim=True))).backward()
        optimizer.step()
    return model


def clamp_in_place(grad: Tensor) -> None:
    grad.clamp_(-1e-4, 1e-4)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "seen": lambda g: None,
    "clamped": lambda g: g.clamp(-1e-4, 1e-4),
    "clamped in place": clamp_in_place,
    "moved": lambda g: g + 5e-4,
}
PLACES = ["parameter", "a keyword", "after accumulation", "activation", "module", "before a module"]
HOOKS = [(place, change) for place in PLACES for change in CHANGES]


@pytest.mark.parametrize(
    ("place", "change"),
    [("several", "seen"), *(h for h in HOOKS if "module" not in h[0] or "in place" not in h[1])],
)
def test_hooks_see_the_gradients_that_they_see_under_python(place, change):
    alone = trained(Hooked(place, CHANGES[change]))
    said: list[str] = []
    with mixed_precision(FP16, said.append):
        ours = trained(Hooked(place, CHANGES[change]))
    assert len(ours.seen) == len(alone.seen) > 0
    for seen, expected in zip(ours.seen, alone.seen, strict=True):
        torch.testing.assert_close(seen, expected, rtol=0.05, atol=5e-5)
    for param, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0.05, atol=5e-3)
    assert "multiplied by the scale" not in said[0]


def test_an_overflow_that_a_hook_hides_is_skipped():
    model = Hooked("parameter", lambda g: g.clamp(-1, 1))
    before = model.first.weight.detach().clone()
    with mixed_precision(FP16, print) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(2, 4)).sum() * 100).backward()
        assert model.seen[0].isinf().any()
        optimizer.step()
        assert torch.equal(model.first.weight, before)
        assert scaler.get_scale() < 2**16


def test_a_hook_may_repair_nan_once_the_scale_is_1():
    model = Hooked("parameter", lambda g: torch.nan_to_num(g * torch.nan) + 1)
    with mixed_precision(FP16, print):
        trained(model, steps=2)
    assert model.first.weight.isfinite().all()


def test_the_backward_pass_of_a_function_is_named():
    said: list[str] = []
    model = nn.Sequential(nn.Linear(4, 1), Net(lambda h: Clamp.apply(h[torch.arange(16)])))
    model[1].linear = nn.Identity()
    with mixed_precision(FP16, said.append):
        trained(model)
    assert "; Clamp.backward gets gradients multiplied by the scale: right only where" in said[0]


def test_a_module_with_hooks_is_saved_and_copied_with_the_scripts_own():
    with mixed_precision(FP16, print):
        model = nn.Linear(4, 1)
        model.register_full_backward_hook(print)
        model.weight.register_hook(abs)
        saved, copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    assert [*saved._backward_hooks.values()] == [*copied._backward_hooks.values()] == [print]


def test_gradients_that_are_written_to_after_the_pass_are_checked_again():
    model = nn.Linear(4, 1)
    with mixed_precision(FP16, print):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (0.01 * model(torch.ones(2, 4))).mean().backward()
        model.weight.grad.div_(0)
        optimizer.step()
    assert model.weight.isfinite().all()


# --- what ran in lower precision ------------------------------------------------------------------


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def training_step(self, x: Tensor) -> Tensor:
        return self.forward(x)


def steps_of(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        net(x)


HIDDEN = "; what trains calls other methods than model(x)"
PROGRAMS: dict[str, tuple[Callable[[], None], str]] = {
    "plain": (lambda: steps_of(net := Methods(), net, torch.ones(2, 4)), ", 1 of 1 product in {}"),
    "float64": (
        lambda: steps_of(net := Methods().double(), net, torch.ones(2, 4).double()),
        ", but no product with gradients ran in {} (1 in float64)",
    ),
    "forward": (
        lambda: steps_of(net := Methods(), net.forward, torch.ones(2, 4)),
        f", but no product with gradients ran in {{}} (2 in float32{HIDDEN})",
    ),
    "a method": (
        lambda: steps_of(net := Methods(), net.training_step, torch.ones(2, 4)),
        f", but no product with gradients ran in {{}} (2 in float32{HIDDEN})",
    ),
    "a compiled model": (
        lambda: steps_of(
            torch.compile(net := Methods(), backend="aot_eager"), net, torch.ones(2, 4)
        ),
        "",
    ),
}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_sampled_steps_are_told_by_dtype(name, dtype, tmp_path):
    script, counted = PROGRAMS[name]
    said: list[str] = []
    with halfstep.record(tmp_path) as run:
        recorder = run._require_entered()
        with mixed_precision(dtype, said.append, products=lambda: recorder.seen.products):
            script()
    text = counted.format(str(dtype).removeprefix("torch."))
    assert f"Methods.forward runs under autocast{text}" in said[-1]
