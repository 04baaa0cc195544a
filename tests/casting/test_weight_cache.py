"""The cache of weight casts: what it keeps, what it sees change, and what it never serves."""

import copy
import functools
import gc
import multiprocessing
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import halfstep
from halfstep import cache_info, clear_cache, limit_cache
from halfstep.casting import autocast, weight_cache
from halfstep.casting.weight_cache import WeightCache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Change = Callable[[nn.Parameter], object]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with nothing, and keep small weights too."""
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.setattr(weight_cache, "SMALL_WITHOUT_GRADIENT", 0)
    clear_cache()
    yield
    limit_cache(None)
    clear_cache()


def weight_of(value: float = 1.0, *shape: int, frozen: bool = False) -> nn.Parameter:
    return nn.Parameter(torch.full(shape or (2, 2), value), requires_grad=not frozen)


def product(weight: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    with autocast("cpu", dtype):
        return F.linear(torch.ones(1, weight.shape[1]), weight)


def kept(weight: nn.Parameter, *, grad: bool = True, dtype: torch.dtype = BF16) -> nn.Parameter:
    """Use a weight until its cast is kept."""
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            product(weight, dtype)
    return weight


# --- what is kept, and when -----------------------------------------------------------------------


def test_a_cast_is_kept_from_the_second_use_on_and_survives_contexts() -> None:
    weight = weight_of()
    entries = []
    for _ in range(5):
        product(weight)
        entries.append(cache_info().entries)

    assert entries == [0, 1, 1, 1, 1]
    assert cache_info()[:5] == (1, 8, 3, 2, 0)


@pytest.mark.parametrize("fused", [True, False])
def test_training_with_one_forward_pass_per_step_keeps_nothing(fused: bool) -> None:
    weight = weight_of()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    for _ in range(4):
        loss = product(weight).sum()
        assert cache_info().entries == 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_micro_batches_share_one_cast_per_step() -> None:
    weight = weight_of()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    misses = []
    for _ in range(4):
        before = cache_info().misses
        for _ in range(4):
            product(weight).sum().backward()
        optimizer.step()
        misses.append(cache_info().misses - before)

    assert misses == [2, 1, 1, 1]  # the first step learns that weights are used again


def test_grad_modes_share_one_cast_and_only_one_has_a_gradient() -> None:
    weight = kept(weight_of(), grad=False)

    assert product(weight).requires_grad
    with torch.no_grad():
        assert not product(weight).requires_grad
    assert cache_info().entries == 1
    assert cache_info().misses == 2


def test_each_dtype_has_its_cast() -> None:
    weight = kept(weight_of())

    assert product(weight, FP16).dtype == FP16
    assert product(weight, FP16).dtype == FP16
    assert cache_info().entries == 2
    assert product(weight).dtype == BF16


@pytest.mark.parametrize("grad", [True, False])
def test_small_weights_are_cast_anew(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = (weight_cache.SMALL if grad else weight_cache.SMALL_WITHOUT_GRADIENT) // 8
    for small in (True, False):
        kept(weight_of(1.0, rows - small, 2), grad=grad)
        assert cache_info().hits == (not small)


def test_frozen_weights_are_kept_while_others_train() -> None:
    frozen, trained = weight_of(frozen=True), weight_of()
    optimizer = torch.optim.SGD([trained], lr=0.1)
    kept(frozen)
    for _ in range(3):
        before = cache_info().hits
        (product(frozen) * product(trained)).sum().backward()
        optimizer.step()
        assert cache_info().hits == before + 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 2),
        lambda: torch.ones(2, 2, requires_grad=True),  # nobody says that it is a weight
        lambda: weight_of() * 1,
        lambda: nn.Parameter(torch.ones(4, 2)[:2]),  # a part of a tensor that lives no more
        lambda: nn.Parameter(ALIASED),
    ],
)
def test_what_is_not_kept(make: Callable[[], Tensor], request: pytest.FixtureRequest) -> None:
    tensor = make()
    for _ in range(3):
        assert product(tensor).dtype == BF16

    alone_in_storage = isinstance(tensor, nn.Parameter) and tensor.data_ptr() != ALIASED.data_ptr()
    assert cache_info().entries == int(alone_in_storage)


ALIASED = torch.ones(2, 2)


def test_a_weight_made_in_inference_mode_is_not_kept() -> None:
    with torch.inference_mode():
        weight = weight_of()
        for _ in range(3):
            assert product(weight).dtype == BF16
    assert cache_info().entries == 0


def test_a_cast_made_in_inference_mode_serves_training() -> None:
    weight = weight_of()
    with torch.inference_mode():
        kept(weight)
    product(weight).sum().backward()

    assert cache_info().hits == 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [1, 1]]


def test_nothing_is_kept_or_served_when_the_cache_is_switched_off() -> None:
    weight = kept(weight_of())
    before = cache_info()
    with autocast("cpu", BF16, cache_enabled=False):
        F.linear(torch.ones(1, 2), weight)

    assert cache_info() == before


@pytest.mark.parametrize("rule", ["linear:lower", "conv1d:lower", "mm,addmm:lower", "matmul:lower"])
def test_no_rule_goes_past_the_cache(rule: str) -> None:
    op, _, _ = rule.partition(":")
    weight = weight_of(1.0, 2, 2, 1) if op == "conv1d" else weight_of()
    calls = {
        "linear": lambda: F.linear(torch.ones(1, 2), weight),
        "conv1d": lambda: F.conv1d(torch.ones(1, 2, 1), weight),
        "mm,addmm": lambda: torch.mm(torch.ones(1, 2), weight),
        "matmul": lambda: torch.ones(1, 2) @ weight,
    }
    for _ in range(3):
        with autocast("cpu", BF16, policy="torch"):
            calls[op]()
    assert cache_info().hits == 1


# --- what it sees change --------------------------------------------------------------------------


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.fill_(3)


def load(weight: nn.Parameter) -> None:
    module = nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": torch.full((2, 2), 3.0)})


def replace_data(weight: nn.Parameter) -> None:
    weight.data = torch.full((2, 2), 3.0)


def by_an_optimizer(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Change:
    def change(weight: nn.Parameter) -> None:
        weight.grad = torch.full((2, 2), -2.0)
        make([weight]).step()

    return change


class WritesThroughData(torch.optim.Optimizer):
    """As optimizers were written before there was torch.no_grad."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad.data)


CHANGES: dict[str, Change] = {
    "in place": in_place,
    "load_state_dict": load,
    "data = tensor": replace_data,
    "plain": by_an_optimizer(lambda p: torch.optim.SGD(p, lr=1.0, foreach=False)),
    "foreach": by_an_optimizer(lambda p: torch.optim.SGD(p, lr=1.0, foreach=True)),
    "fused": by_an_optimizer(lambda p: torch.optim.SGD(p, lr=1.0, fused=True)),
    "adam": by_an_optimizer(lambda p: torch.optim.Adam(p, lr=2.0, eps=0, fused=True)),
    "old optimizer": by_an_optimizer(WritesThroughData),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_change_is_seen(change: Change, grad: bool) -> None:
    weight = kept(weight_of(), grad=grad)
    change(weight)

    with torch.set_grad_enabled(grad):
        assert product(weight).tolist() == [[6, 6]]
        assert product(weight).tolist() == [[6, 6]]
    assert cache_info().stale == 1


def test_a_change_inside_the_context_is_seen() -> None:
    """Fact A13."""
    weight = weight_of()
    with autocast("cpu", BF16):
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                weight.fill_(value)
            for _ in range(3):
                assert F.linear(torch.ones(1, 2), weight).tolist() == [[2 * value, 2 * value]]


def test_a_write_through_data_outside_of_an_optimizer_needs_clear_cache() -> None:
    """The one change that PyTorch does not count; docs/autocast.md says so."""
    weight = kept(weight_of())
    weight.data.fill_(3)
    clear_cache()

    assert product(weight).tolist() == [[6, 6]]


def test_a_weight_whose_storage_gets_a_second_owner_is_not_kept_again() -> None:
    weight = weight_of()
    flat = torch.full((4,), 2.0)
    weight.data = flat.view(2, 2)  # as in flat buffers of all parameters
    for value in (2.0, 3.0, 4.0):
        flat.fill_(value)
        assert product(weight).tolist() == [[2 * value, 2 * value]]


def test_data_replaced_twice_between_two_uses() -> None:
    """The second tensor may lie where the first one lay."""
    weight = kept(weight_of(0.0, 64, 64, frozen=True))
    for value in range(1, 20):
        weight.data = weight.data + 0.5
        weight.data = weight.data + 0.5
        assert product(weight)[0, 0] == 64 * value


@pytest.mark.parametrize(
    "change", [lambda w: w.t(), lambda w: w[:1], lambda w: w.flip(0), lambda w: w.view(1, -1)]
)
def test_data_replaced_by_another_view_of_it(change: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), requires_grad=False)
    kept(weight)
    weight.data = change(weight.data)
    for _ in range(3):
        assert torch.equal(product(weight).float(), weight.sum(1)[None])


def written_by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] = 3


def written_through_an_alias(weight: nn.Parameter) -> Tensor:
    alias = weight.data
    alias.fill_(3)
    return alias  # lives on


def written_as_another_parameter(weight: nn.Parameter) -> nn.Parameter:
    other = nn.Parameter(weight.data)
    with torch.no_grad():
        other.fill_(3)
    return other


@pytest.mark.parametrize("write", [written_through_an_alias, written_as_another_parameter])
def test_a_cast_is_not_served_while_others_have_the_memory(write: Change) -> None:
    weight = kept(weight_of())
    other = write(weight)
    assert product(weight).tolist() == [[6, 6]]
    del other


def test_weights_in_the_memory_of_arrays_are_not_kept() -> None:
    array = np.ones((2, 2), dtype=np.float32)
    weight = nn.Parameter(torch.from_numpy(array))
    for value in (1, 2, 3):
        array[:] = value
        assert product(weight).tolist() == [[2 * value, 2 * value]]


def fill_with_three(weight: Tensor) -> None:
    with torch.no_grad():
        weight.fill_(3)


def test_weights_in_shared_memory_are_not_kept() -> None:
    weight = weight_of().share_memory_()
    for _ in range(3):
        product(weight)
    worker = multiprocessing.get_context("fork").Process(target=fill_with_three, args=(weight,))
    worker.start()
    worker.join()
    assert product(weight).tolist() == [[6, 6]]


def test_an_optimizer_that_writes_through_data_and_weights_that_are_frozen_in_turns() -> None:
    weight = kept(weight_of(frozen=True))
    weight.requires_grad_(True)
    weight.grad = torch.full((2, 2), -2.0)
    WritesThroughData([weight]).step()
    weight.requires_grad_(False)
    assert product(weight).tolist() == [[6, 6]]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=1.0), WritesThroughData])
def test_a_compiled_step(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    weight = kept(weight_of())
    weight.grad = torch.full((2, 2), -2.0)
    optimizer = make([weight])
    torch.compile(lambda: optimizer.step(), backend="aot_eager")()
    assert product(weight).tolist() == [[6, 6]]


def test_an_optimizer_leaves_the_casts_of_others_alone() -> None:
    teacher, student = kept(weight_of()), weight_of()
    student.grad = torch.ones(2, 2)
    torch.optim.SGD([student], lr=0.1).step()
    before = cache_info().hits
    product(teacher)
    assert cache_info().hits == before + 1


def test_another_parameter_in_the_place_of_one() -> None:
    layer = nn.Linear(2, 2, bias=False)
    kept(layer.weight)
    layer.weight = weight_of(3.0)
    with autocast("cpu", BF16):
        assert layer(torch.ones(1, 2)).tolist() == [[6, 6]]


def test_a_new_weight_at_the_address_of_an_old_one() -> None:
    for value in range(50):
        weight = weight_of(float(value))
        for _ in range(2):
            assert product(weight).tolist() == [[2 * value, 2 * value]]
        del weight
    assert cache_info().entries == 0


def test_pruning_and_parametrization() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
    with autocast("cpu", BF16):
        before = layer(torch.ones(1, 2))
        with torch.no_grad():
            layer.parametrizations.weight.original0.mul_(2)
        assert torch.equal(layer(torch.ones(1, 2)), before * 2)


def test_nobody_can_write_to_a_kept_cast() -> None:
    weight = kept(weight_of(), grad=False)
    with torch.no_grad(), autocast("cpu", BF16, policy="standard; t,reshape,dropout:lower"):
        for change in (
            lambda: torch.einsum("ij->ji", weight),
            lambda: torch.einsum("ii->i", weight),
            lambda: weight.t(),
            lambda: weight.reshape(4),
            lambda: F.dropout(weight, training=False),
            lambda: torch.linalg.multi_dot([weight, weight]),
        ):
            for _ in range(3):
                change().mul_(5)
            assert product(weight).tolist() == [[2, 2]]
    assert cache_info().hits > 0


def test_other_layouts_run_as_under_torch_autocast() -> None:
    x = torch.ones(4, 2)
    for weight in (nn.Parameter(torch.eye(4).to_sparse()), nn.Parameter(torch.tensor(2.0))):
        for _ in range(3):
            with autocast("cpu", BF16, policy="torch"):
                ours = torch.mm(weight, x) if weight.dim() else torch.mm(x.t(), x) * weight
            with torch.autocast("cpu", BF16):
                theirs = torch.mm(weight, x) if weight.dim() else torch.mm(x.t(), x) * weight
            assert torch.equal(ours, theirs)
    assert cache_info().entries == 0


def test_weights_can_be_swapped_converted_copied_and_saved(tmp_path: Any) -> None:
    one, other = kept(weight_of()), weight_of(3.0)
    torch.utils.swap_tensors(one, other)
    assert product(one).tolist() == [[6, 6]]
    assert product(other).tolist() == [[2, 2]]
    for same in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert product(same).tolist() == [[2, 2]]
    torch.save(other, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert product(loaded).tolist() == [[2, 2]]
    assert (tmp_path / "weight.pt").read_bytes().find(b"halfstep.") == -1


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_a_cast_does_not_keep_its_weight_alive(grad: bool) -> None:
    weight = kept(weight_of(), grad=grad)
    alive = weakref.ref(weight)
    del weight
    gc.collect()

    assert alive() is None
    assert cache_info()[:2] == (0, 0)


def test_no_growth_over_a_thousand_iterations_without_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sizes = set()
    with torch.no_grad():
        for i in range(1000):
            with autocast("cpu", BF16):
                model(torch.ones(1, 4))
            if i > 0:
                sizes.add(cache_info()[:2])
    assert sizes == {(4, 2 * (4 * 4 + 4) * 2)}


def test_clearing_frees_at_once() -> None:
    weight = kept(weight_of())
    (casts,) = (v for k, v in vars(weight).items() if k.startswith("_halfstep"))
    alive = weakref.ref(casts[BF16].kept.cast)
    gc.disable()
    try:
        clear_cache()
        assert alive() is None
    finally:
        gc.enable()


def test_bytes_are_the_sum_of_what_is_kept() -> None:
    limit, rng = 64, random.Random(0)
    limit_cache(limit)
    weights = [weight_of(1.0, 2, n + 1) for n in range(8)]
    for _ in range(2000):
        weight = rng.choice(weights)
        match rng.randrange(20):
            case 0:
                in_place(weight)
            case 1:
                weights[rng.randrange(8)] = weight_of(1.0, 2, rng.randrange(1, 9))
            case 2:
                clear_cache()
            case _:
                product(weight, rng.choice([BF16, FP16]))
        del weight
        kept_casts = [
            entry.kept.cast
            for weight in weights
            for name, casts in vars(weight).items()
            if name.startswith("_halfstep")
            for entry in casts.values()
            if entry.kept is not None
        ]
        assert cache_info().entries == len(kept_casts)
        assert cache_info().bytes == sum(cast.nbytes for cast in kept_casts) <= limit


def test_the_limit() -> None:
    first, second = weight_of(), weight_of()
    limit_cache(8)
    kept(first)
    for _ in range(3):
        product(second)
    assert cache_info()[:2] == (1, 8)

    limit_cache(4)
    assert cache_info()[:2] == (0, 0)
    limit_cache(None)
    for _ in range(3):
        product(second)
    assert cache_info().entries == 1


@pytest.mark.parametrize(("limit", "error"), [(-1, ValueError), ("1 GB", TypeError)])
def test_limits_that_cannot_be(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="limit_cache"):
        limit_cache(limit)


# --- autograd -------------------------------------------------------------------------------------


def gradients(steps: int, *, cache_enabled: bool, twice: bool) -> list[Tensor]:
    """Train a small network and return its gradients in the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(5, 3, 2)
    for _ in range(steps):
        model.zero_grad()
        for _ in range(1 + twice):
            with autocast("cpu", BF16, cache_enabled=cache_enabled):
                loss = model(x).float().pow(2).sum()
            loss.backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_are_those_without_a_cache(twice: bool) -> None:
    with_cache = gradients(4, cache_enabled=True, twice=twice)
    hits = cache_info().hits
    without = gradients(4, cache_enabled=False, twice=twice)

    assert hits > 0
    assert len(without) == 6
    for ours, reference in zip(with_cache, without, strict=True):
        assert ours.dtype == FP32
        assert torch.equal(ours, reference)


def test_second_derivatives() -> None:
    weight, x = kept(weight_of()), torch.full((1, 2), 2.0, dtype=BF16, requires_grad=True)
    with autocast("cpu", BF16):
        y = F.linear(x, weight).float().pow(2).sum()
    (gradient,) = torch.autograd.grad(y, weight, create_graph=True)
    gradient.sum().backward()

    assert cache_info().hits == 2
    assert x.grad is not None
    assert x.grad.tolist() == [[32, 32]]  # of 4 (x0 + x1) ** 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [[16, 16], [16, 16]]


def test_a_weight_may_change_between_forward_and_backward() -> None:
    weight, x = kept(weight_of()), torch.ones(1, 2, requires_grad=True)
    with autocast("cpu", BF16):
        y = F.linear(x, weight).sum()
    with torch.no_grad():
        weight.fill_(7)
    y.backward()

    assert x.grad is not None
    assert x.grad.tolist() == [[2, 2]]  # of the weight as it was


def test_whether_a_cast_is_kept_changes_no_gradient() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 4, 2), torch.randn(3, 5, 8)  # its gradients come in float32
    runs = []
    for _ in range(4):
        layer.zero_grad()
        with autocast("cpu", BF16):
            loss = layer(x)[0].float().sum()
        loss.backward()
        runs.append([param.grad for param in layer.parameters()])

    assert cache_info().hits > 0
    assert all(map(torch.equal, runs[0], runs[-1]))


def test_tied_weights_add_up_in_float32() -> None:
    """Fact A21's cause: a shared cast adds the gradients of its uses in bfloat16."""
    weight = kept(weight_of())
    with autocast("cpu", BF16):
        y = F.linear(torch.full((1, 2), 256.0), weight) + F.linear(torch.ones(1, 2), weight)
    y.sum().backward()

    assert weight.grad is not None
    assert weight.grad.tolist() == [[257, 257], [257, 257]]  # bfloat16 has 256 and 258


def test_hooks_of_weights_are_called_once_per_backward() -> None:
    weight, seen = kept(weight_of()), []
    weight.register_hook(lambda grad: seen.append(grad.dtype))
    product(weight).sum().backward()
    assert seen == [FP32]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode() -> None:
    weight = kept(weight_of(), grad=False)
    with forward_ad.dual_level():
        with torch.no_grad():
            weight.copy_(forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2)))
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                tangent = forward_ad.unpack_dual(product(weight)).tangent
                assert tangent is not None
                assert tangent.tolist() == [[2, 2]]


def test_checkpointing_and_saved_tensor_hooks() -> None:
    weight = kept(weight_of())

    def block(x: Tensor) -> Tensor:
        return checkpoint(F.linear, x, weight, use_reentrant=False)

    x = torch.ones(1, 2, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(), autocast("cpu", BF16):
        block(x).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [1, 1]]


# --- where it is off, or beside others ------------------------------------------------------------


def test_inside_functorch_nothing_is_kept_or_served() -> None:
    weight = kept(weight_of())
    before = cache_info()
    with autocast("cpu", BF16):
        torch.vmap(lambda x: F.linear(x, weight))(torch.ones(3, 2))
        gradient = torch.func.grad(lambda w: F.linear(torch.ones(1, 2), w).sum())(weight)

    assert gradient.tolist() == [[1, 1], [1, 1]]
    assert cache_info() == before


def test_while_tracing_nothing_is_kept_or_served() -> None:
    layer = nn.Linear(2, 2, bias=False)
    kept(layer.weight)
    before = cache_info()
    with autocast("cpu", BF16):
        with pytest.warns(DeprecationWarning, match="trace"):
            traced = torch.jit.trace(layer, torch.ones(1, 2), check_trace=False)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        compiled(torch.ones(1, 2))
    assert cache_info() == before
    with torch.no_grad():
        layer.weight.fill_(3)
    with autocast("cpu", BF16):
        assert traced(torch.ones(1, 2)).tolist() == [[6, 6]]
        assert compiled(torch.ones(1, 2)).tolist() == [[6, 6]]


def test_under_a_dispatch_mode_nothing_is_kept_or_served() -> None:
    weight = kept(weight_of())
    before = cache_info()
    with FlopCounterMode(display=False):
        product(weight)
    assert cache_info() == before


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
        with autocast("cpu", BF16):
            y = run(x)
        y.float().square().mean().backward()
        return [param.grad for param in model.parameters()]

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for _ in range(3):
        expected = gradients(model)
        got = gradients(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_copy_of_the_model_has_casts_of_its_own() -> None:
    layer = nn.Linear(2, 2, bias=False)
    kept(layer.weight)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.fill_(3)
    assert product(other.weight).tolist() == [[6, 6]]


def test_many_threads() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(2, 8)
    with torch.no_grad(), autocast("cpu", BF16, cache_enabled=False):
        expected = model(x)
    wrong = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(50):
                with autocast("cpu", BF16):
                    if not torch.equal(model(x), expected):
                        wrong.append(1)
                if threading.current_thread().name.endswith("0"):
                    clear_cache()

    threads = [threading.Thread(target=run, name=f"t{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_caches_are_apart() -> None:
    cache, weight = WeightCache(), weight_of()
    for _ in range(3):
        cache.cast(weight, BF16)
    assert cache.info().entries == 1
    assert halfstep.cache_info().entries == 0


def test_gathered_weights_of_fsdp2_are_not_kept(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        with torch.no_grad():
            for _ in range(3):
                with autocast("cpu", BF16):
                    model(torch.ones(1, 4))
    finally:
        dist.destroy_process_group()
    assert cache_info().misses == 3 * 4
    assert cache_info().entries == 0
