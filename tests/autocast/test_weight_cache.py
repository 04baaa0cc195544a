"""Casts of weights in a context: what is kept, what is seen to change, what is never served.

How weights are written to, in every way that we know, is in test_weight_writes.py.
"""

import copy
import functools
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from halfstep._autocast import autocast, native, weight_cache
from halfstep._pytorch import dispatch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Change = Callable[[nn.Parameter], object]


@pytest.fixture(autouse=True)
def small_weights_too_with_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.setattr(native, "NUM_WATCHED", 1_000_000)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Return a list to which each cast of a weight that is made adds its dtype."""
    made: list[torch.dtype] = []
    cast_anew = weight_cache.Casts._cast_anew

    def counted(*args: Any) -> Tensor:
        cast = cast_anew(*args)
        made.append(cast.dtype)
        return cast

    monkeypatch.setattr(weight_cache.Casts, "_cast_anew", counted)
    return made


def weight_of(value: float = 1.0, *shape: int, frozen: bool = False) -> nn.Parameter:
    return nn.Parameter(torch.full(shape or (2, 2), value), requires_grad=not frozen)


def apply(weight: Tensor) -> Tensor:
    return F.linear(torch.ones(1, weight.shape[1]), weight)


def product(weight: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    with autocast(DEVICE, dtype):
        return apply(weight)


def in_context(weight: nn.Parameter) -> list[Any]:
    """Return what is known of the casts of a weight at this moment."""
    return [*weight_cache.used.casts[id(weight)][1].values()]


def used(weight: nn.Parameter, times: int = 3) -> nn.Parameter:
    """Use a weight in the context in force, from the second time on by a kept cast."""
    for _ in range(times):
        apply(weight)
    return weight


# --- in a context ---------------------------------------------------------------------------------


def test_no_cast_outlives_the_outermost_context(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    for _ in range(3):
        with autocast(DEVICE, BF16):
            for _ in range(3):
                with autocast(DEVICE, BF16):
                    apply(weight)
            made = len(casts)
        casts.clear()
        assert made == 1

    product(weight)
    assert casts == []


def test_in_a_context_a_cast_is_kept_from_the_second_use_on(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    counts = []
    with autocast(DEVICE, BF16):
        for _ in range(4):
            apply(weight)
            counts.append(len(casts))
    assert counts == [0, 1, 1, 1]  # PyTorch makes the first


def test_the_end_of_a_context_frees_its_casts() -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        for _ in range(3):
            apply(weight)
        [entry] = in_context(weight)
        alive = weakref.ref(entry.cast)
        del entry
        assert alive() is not None
    assert alive() is None


def test_a_context_in_a_compiled_graph_is_one() -> None:
    weight = weight_of()

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def twice() -> Tensor:
        with autocast(DEVICE, BF16):
            return apply(weight) + apply(weight) + apply(weight)

    for value in (1.0, 2.0, 3.0):
        weight.data.fill_(value)
        assert twice().tolist() == [[6 * value, 6 * value]]


def test_training_with_one_forward_pass_per_context_keeps_nothing() -> None:
    weight = weight_of()
    for _ in range(4):
        with autocast(DEVICE, BF16):
            apply(weight)
            assert not in_context(weight)


@pytest.mark.parametrize("weight", [weight_of(frozen=True), nn.Parameter(torch.ones(2, 2).half())])
def test_what_torch_autocast_casts_anew_is_cast_anew(weight: nn.Parameter) -> None:
    """So nothing is stale in a context that is not stale under torch.autocast."""
    with autocast(DEVICE, BF16):
        for value in (1.0, 2.0, 3.0):
            for _ in range(3):
                weight.data.fill_(value)
                assert apply(weight).tolist() == [[2 * value, 2 * value]]


def test_clearing_pytorchs_cache_clears_ours() -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        for value in (1.0, 2.0):
            weight.data.fill_(value)
            torch.clear_autocast_cache()
            for _ in range(3):
                assert apply(weight).tolist() == [[2 * value, 2 * value]]


def test_a_parameter_that_is_computed_is_cast_anew() -> None:
    weight = weight_of(frozen=True)
    weight.copy_(torch.ones(2, 2, requires_grad=True))
    with autocast(DEVICE, BF16):
        for value in (1.0, 2.0):
            weight.data.fill_(value)
            for _ in range(3):
                assert apply(weight).tolist() == [[2 * value, 2 * value]]


def test_contexts_of_two_threads_end_by_themselves(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        for _ in range(3):
            apply(weight)
        weight.data.fill_(3)  # unseen here, as under torch.autocast
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(product(weight).tolist()))
        thread.start()
        thread.join()
    assert results == [[[6, 6]]]


# --- what is kept ---------------------------------------------------------------------------------


def test_grad_modes_share_one_cast_and_only_one_has_a_gradient(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        with torch.no_grad():
            used(weight)
            assert not apply(weight).requires_grad
        assert apply(weight).requires_grad
    assert casts == [BF16]


def test_each_dtype_has_its_cast(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        used(weight)
        for _ in range(2):
            assert product(weight, FP16).dtype == FP16
        assert apply(weight).dtype == BF16
    assert casts == [BF16, FP16]


@pytest.mark.parametrize("small", [True, False])
def test_small_weights_are_cast_anew(small, casts, monkeypatch):
    monkeypatch.setattr(weight_cache, "SMALL", 2**17)
    with autocast(DEVICE, BF16):
        used(weight_of(1.0, weight_cache.SMALL // 8 - small, 2))
    assert len(casts) == (0 if small else 1)


ALIASED = torch.ones(2, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(4, 2)[:2]),  # a part of a tensor that lives no more
        lambda: nn.Parameter(ALIASED),
    ],
)
def test_what_is_not_kept(make: Callable[[], nn.Parameter]) -> None:
    weight = make()
    with autocast(DEVICE, BF16):
        [entry] = in_context(used(weight))
        assert (entry.cast is None) == (weight.data_ptr() == ALIASED.data_ptr())


def test_nothing_is_kept_or_served_in_inference_mode(casts: list[torch.dtype]) -> None:
    with torch.inference_mode(), autocast(DEVICE, BF16):
        used(weight_of())
    weight = weight_of()
    with autocast(DEVICE, BF16), torch.inference_mode():
        used(weight)
    assert casts == []


def test_nothing_is_kept_or_served_when_the_cache_is_switched_off(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        [entry] = in_context(used(weight))
        with autocast(DEVICE, BF16, cache_enabled=False):
            weight.data.fill_(3)
            assert apply(weight).tolist() == [[6, 6]]
        assert entry.cast is not None
    assert len(casts) == 1


@pytest.mark.parametrize("rule", ["linear:lower", "conv1d:lower", "mm,addmm:lower", "matmul:lower"])
def test_no_rule_goes_past_the_cache(rule: str, casts: list[torch.dtype]) -> None:
    op, _, _ = rule.partition(":")
    weight = weight_of(1.0, 2, 2, 1) if op == "conv1d" else weight_of()
    calls = {
        "linear": lambda: apply(weight),
        "conv1d": lambda: F.conv1d(torch.ones(1, 2, 1), weight),
        "mm,addmm": lambda: torch.mm(torch.ones(1, 2), weight),
        "matmul": lambda: torch.ones(1, 2) @ weight,
    }
    with autocast(DEVICE, BF16, policy="torch"):
        for _ in range(4):
            calls[op]()
    assert len(casts) == 1


def test_nobody_else_gets_the_casts_of_a_weight() -> None:
    one, other = weight_of(), weight_of(3.0)
    with autocast(DEVICE, BF16):
        used(one), used(other)
        torch.utils.swap_tensors(one, other)
        assert apply(one).tolist() == [[6, 6]]
        assert apply(other).tolist() == [[2, 2]]
        copied = copy.copy(other)
        copied.data = copied.data + 3
        for _ in range(3):
            assert apply(copied).tolist() == [[8, 8]]
            assert apply(other).tolist() == [[2, 2]]


# --- what is seen to change -----------------------------------------------------------------------


def test_a_weight_whose_storage_gets_a_second_owner_is_not_kept_again() -> None:
    weight = weight_of()
    flat = torch.full((4,), 2.0)
    with autocast(DEVICE, BF16):
        used(weight)
        weight.data = flat.view(2, 2)  # as in flat buffers of all parameters
        for value in (2.0, 3.0, 4.0):
            flat.fill_(value)
            assert apply(weight).tolist() == [[2 * value, 2 * value]]


@pytest.mark.parametrize(
    "change", [lambda w: w.t(), lambda w: w[:1], lambda w: w.flip(0), lambda w: w.view(1, -1)]
)
def test_data_replaced_by_another_view_of_it(change: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    with autocast(DEVICE, BF16):
        used(weight)
        weight.data = change(weight.data)
        for _ in range(3):
            assert torch.equal(apply(weight).float(), weight.sum(1)[None])


def fill_with_three(weight: Tensor) -> None:
    with torch.no_grad():
        weight.fill_(3)


def test_weights_in_shared_memory_are_not_kept() -> None:
    weight = weight_of().share_memory_()
    with autocast(DEVICE, BF16):
        used(weight)
        fork = multiprocessing.get_context("fork")
        worker = fork.Process(target=fill_with_three, args=(weight,))
        worker.start()
        worker.join()
        assert apply(weight).tolist() == [[6, 6]]


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_drops_the_casts_of_its_weights_alone(fused, casts):
    teacher, student = weight_of(), weight_of()
    student.grad = torch.full((2, 2), -2.0)
    optimizer = torch.optim.SGD([student], lr=1.0, fused=fused)
    with autocast(DEVICE, BF16):
        used(teacher), used(student)
        optimizer.step()
        assert apply(student).tolist() == [[6, 6]]
        assert apply(teacher).tolist() == [[2, 2]]
    assert len(casts) == 3


def test_a_new_weight_at_the_address_of_an_old_one() -> None:
    with autocast(DEVICE, BF16):
        for value in range(50):
            weight = weight_of(float(value))
            for _ in range(3):
                assert apply(weight).tolist() == [[2 * value, 2 * value]]
            del weight


def test_pruning_and_parametrization() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
    with autocast(DEVICE, BF16):
        before = layer(torch.ones(1, 2))
        with torch.no_grad():
            layer.parametrizations.weight.original0.mul_(2)
        assert torch.equal(layer(torch.ones(1, 2)), before * 2)


def test_nobody_can_write_to_a_kept_cast(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with torch.no_grad(), autocast(DEVICE, BF16, policy="standard; t,reshape,dropout:lower"):
        used(weight)
        for change in (
            lambda: weight.t(),
            lambda: weight.reshape(4),
            lambda: F.dropout(weight, training=False),
            lambda: torch.linalg.multi_dot([weight, weight]),
        ):
            for _ in range(3):
                change().mul_(5)
            assert apply(weight).tolist() == [[2, 2]]
    assert len(casts) == 1


def test_other_layouts_run_as_under_torch_autocast() -> None:
    x = torch.ones(4, 2)
    for weight in (nn.Parameter(torch.eye(4).to_sparse()), nn.Parameter(torch.tensor(2.0))):
        with autocast(DEVICE, BF16, policy="torch"):
            for _ in range(3):
                ours = torch.mm(weight, x) if weight.dim() else torch.mm(x.t(), x) * weight
        with torch.autocast(DEVICE, BF16):
            theirs = torch.mm(weight, x) if weight.dim() else torch.mm(x.t(), x) * weight
        assert torch.equal(ours, theirs)


# --- memory ---------------------------------------------------------------------------------------


def test_a_context_leaves_nothing_on_a_weight() -> None:
    """Libraries make parameters anew from the attributes of another one."""
    weight = weight_of()
    with autocast(DEVICE, BF16):
        for _ in range(3):
            apply(weight)
        assert vars(weight) == {}


def test_a_weight_lives_as_long_as_its_context_at_most() -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        apply(weight)
        alive = weakref.ref(weight)
        del weight
    assert alive() is None


# --- autograd -------------------------------------------------------------------------------------


def gradients(steps: int, cache_enabled: bool) -> list[Tensor]:
    """Train a small network, its layers used twice, and return its gradients in the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(5, 3, 8)
    for _ in range(steps):
        model.zero_grad()
        with autocast(DEVICE, BF16, cache_enabled=cache_enabled):
            loss = model(model(x)).float().pow(2).sum() * 2**-12
        loss.backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_gradients_are_those_without_a_cache(casts: list[torch.dtype]) -> None:
    with_cache = gradients(4, cache_enabled=True)
    assert len(casts) == 6 * 4
    without = gradients(4, cache_enabled=False)

    assert len(without) == 6
    for ours, reference in zip(with_cache, without, strict=True):
        assert ours.dtype == FP32
        assert torch.equal(ours, reference)


def test_second_derivatives() -> None:
    weight, x = weight_of(), torch.full((1, 2), 2.0, dtype=BF16, requires_grad=True)
    with autocast(DEVICE, BF16):
        used(weight)
        y = F.linear(x, weight).float().pow(2).sum()
    (gradient,) = torch.autograd.grad(y, weight, create_graph=True)
    gradient.sum().backward()

    assert x.grad.tolist() == [[32, 32]]  # of 4 (x0 + x1) ** 2
    assert weight.grad.tolist() == [[16, 16], [16, 16]]


def test_a_weight_may_change_between_forward_and_backward() -> None:
    weight, x = weight_of(), torch.ones(1, 2, requires_grad=True)
    with autocast(DEVICE, BF16):
        used(weight)
        y = F.linear(x, weight).sum()
    with torch.no_grad():
        weight.fill_(7)
    y.backward()

    assert x.grad.tolist() == [[2, 2]]  # of the weight as it was


def test_whether_a_cast_is_kept_changes_no_gradient(casts: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 4, 2), torch.randn(3, 5, 8)  # its gradients come in float32
    runs = []
    with autocast(DEVICE, BF16):
        for _ in range(4):
            layer.zero_grad()
            layer(x)[0].float().sum().backward()
            runs.append([param.grad for param in layer.parameters()])

    assert len(casts) == 8 or not dispatch.has_onednn(BF16)  # without, it runs in float32
    assert all(map(torch.equal, runs[0], runs[-1]))


def test_tied_weights_add_up_in_float32() -> None:
    """Fact A21's cause: a shared cast adds the gradients of its uses in bfloat16."""
    weight = weight_of()
    with autocast(DEVICE, BF16):
        used(weight)
        y = F.linear(torch.full((1, 2), 256.0), weight) + F.linear(torch.ones(1, 2), weight)
    y.sum().backward()

    assert weight.grad.tolist() == [[257, 257], [257, 257]]  # bfloat16 has 256 and 258


def test_hooks_of_weights_are_called_once_per_backward() -> None:
    weight, seen = weight_of(), []
    weight.register_hook(lambda grad: seen.append(grad.dtype))
    with autocast(DEVICE, BF16):
        used(weight)
        y = apply(weight).sum()
    y.backward()
    assert seen == [FP32]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode() -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        used(weight)
        with forward_ad.dual_level():
            with torch.no_grad():
                weight.copy_(forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2)))
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    tangent = forward_ad.unpack_dual(apply(weight)).tangent
                    assert tangent.tolist() == [[2, 2]]


def test_checkpointing_and_saved_tensor_hooks() -> None:
    weight = weight_of()

    def block(x: Tensor) -> Tensor:
        return checkpoint(F.linear, x, weight, use_reentrant=False)

    x = torch.ones(1, 2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(), autocast(DEVICE, BF16):
        used(weight)
        block(x).sum().backward()
    assert weight.grad.tolist() == [[1, 1], [1, 1]]


# --- where it is off, or beside others ------------------------------------------------------------


def test_inside_functorch_nothing_is_kept_or_served(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        used(weight)
        weight.data.fill_(3)  # unseen in the context
        for _ in range(3):
            batched = torch.vmap(lambda x: F.linear(x, weight))(torch.ones(3, 2))
            gradient = torch.func.grad(lambda w: F.linear(torch.ones(1, 2), w).sum())(weight)
            assert batched.tolist() == [[6, 6]] * 3
            assert gradient.tolist() == [[1, 1], [1, 1]]
    assert len(casts) == 1


def test_while_tracing_nothing_is_kept_or_served(casts: list[torch.dtype]) -> None:
    layer = nn.Linear(2, 2, bias=False)
    with autocast(DEVICE, BF16):
        used(layer.weight)
        with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):
            traced = torch.jit.trace(layer, torch.ones(1, 2), check_trace=False)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        compiled(torch.ones(1, 2))
        assert len(casts) == 1
        with torch.no_grad():
            layer.weight.fill_(3)
        assert traced(torch.ones(1, 2)).tolist() == [[6, 6]]
        assert compiled(torch.ones(1, 2)).tolist() == [[6, 6]]


def test_under_a_dispatch_mode_nothing_is_kept_or_served(casts: list[torch.dtype]) -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        used(weight)
        weight.data.fill_(3)  # unseen in the context
        with FlopCounterMode(display=False):
            for _ in range(3):
                assert apply(weight).tolist() == [[6, 6]]
    assert len(casts) == 1


def test_selective_checkpointing() -> None:
    """It replays ops by their order: those of the forward pass, a cast of a weight among them."""
    must, may = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

    def policy(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
        return must if op is torch.ops.aten._to_copy.default else may

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    x = torch.randn(4, 4)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        with autocast(DEVICE, BF16):
            y = run(x)
        y.float().square().mean().backward()
        return [param.grad for param in model.parameters()]

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for _ in range(3):
        expected = gradients(model)
        got = gradients(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
        torch.testing.assert_close(got, expected)


def test_a_copy_of_the_model_has_casts_of_its_own() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with autocast(DEVICE, BF16):
        used(layer.weight)
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight.fill_(3)
        assert apply(other.weight).tolist() == [[6, 6]]


def test_many_threads() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(2, 8)
    with autocast(DEVICE, BF16, cache_enabled=False):
        expected = model(x)
    wrong = []

    def call_often() -> None:
        for _ in range(20):
            with autocast(DEVICE, BF16):
                wrong.extend(1 for _ in range(3) if not torch.equal(model(x), expected))

    threads = [threading.Thread(target=call_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
