"""Casts of weights: what is kept and for how long, what is seen to change, what is never served.

How weights are written to, in every way that we know, is in test_weight_writes.py.
"""

import copy
import functools
import gc
import multiprocessing
import pickle
import random
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from halfstep._autocast import autocast, hold_casts, weight_cache
from halfstep._autocast.hold import HoldInfo
from halfstep._pytorch import dispatch
from halfstep.errors import CallOrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Change = Callable[[nn.Parameter], object]
HOLDS: list[hold_casts] = []


@pytest.fixture(autouse=True)
def no_hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold small weights too, and nothing beyond a test."""
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    yield
    for hold in HOLDS:
        hold.release()
    HOLDS.clear()


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
    held = vars(weight).get("_halfstep_casts")
    return [*(held or weight_cache._used.casts[id(weight)][1]).values()]


def hold(*weights: nn.Parameter, max_bytes: int | None = None) -> None:
    HOLDS.append(hold_casts(nn.ParameterList(weights), max_bytes=max_bytes))


def info() -> HoldInfo:
    return HOLDS[-1].info()


def kept(weight: nn.Parameter, *, grad: bool = True, dtype: torch.dtype = BF16) -> nn.Parameter:
    """Hold a weight and use it: one miss, two hits."""
    hold(weight)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            product(weight, dtype)
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
        alive = weakref.ref(entry.kept.cast)
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


# --- held: what is kept, and when -----------------------------------------------------------------


def test_a_held_cast_is_kept_from_the_first_use_on_and_survives_contexts() -> None:
    weight = weight_of()
    hold(weight)
    for _ in range(5):
        product(weight)

    assert info() == (1, 1, 8, 4, 1, 0)


@pytest.mark.parametrize("fused", [True, False])
def test_micro_batches_share_one_cast_per_step(fused: bool) -> None:
    weight = weight_of()
    hold(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    misses = []
    for _ in range(4):
        before = info().misses
        for _ in range(4):
            product(weight).sum().backward()
        optimizer.step()
        misses.append(info().misses - before)

    assert misses == [1, 1, 1, 1]


def test_grad_modes_share_one_cast_and_only_one_has_a_gradient() -> None:
    weight = kept(weight_of(), grad=False)

    assert product(weight).requires_grad
    with torch.no_grad():
        assert not product(weight).requires_grad
    assert info()[1:] == (1, 8, 4, 1, 0)


def test_each_dtype_has_its_cast() -> None:
    weight = kept(weight_of())

    assert product(weight, FP16).dtype == FP16
    assert product(weight, FP16).dtype == FP16
    assert info().casts == 2
    assert product(weight).dtype == BF16


@pytest.mark.parametrize("grad", [True, False])
def test_small_weights_are_cast_anew(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = weight_cache.SMALL // 8
    for small in (True, False):
        kept(weight_of(1.0, rows - small, 2), grad=grad)
        assert info().hits == (0 if small else 2)


def test_frozen_weights_are_kept_while_others_train() -> None:
    frozen, trained = weight_of(frozen=True), weight_of()
    optimizer = torch.optim.SGD([trained], lr=0.1)
    kept(frozen)
    for _ in range(3):
        before = info().hits
        (product(frozen) * product(trained)).sum().backward()
        optimizer.step()
        assert info().hits == before + 1


ALIASED = torch.ones(2, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(4, 2)[:2]),  # a part of a tensor that lives no more
        lambda: nn.Parameter(ALIASED),
    ],
)
def test_what_is_not_kept(make: Callable[[], nn.Parameter]) -> None:
    weight = kept(make())
    assert info().casts == int(weight.data_ptr() != ALIASED.data_ptr())


def test_a_weight_made_in_inference_mode_is_not_held() -> None:
    with torch.inference_mode():
        weight = weight_of()
        with pytest.warns(UserWarning, match="no weight of this ParameterList can be held"):
            hold(weight)
        assert product(weight).dtype == BF16
    assert type(weight) is nn.Parameter


def test_a_cast_made_in_inference_mode_serves_training() -> None:
    weight = weight_of()
    with torch.inference_mode():
        kept(weight)
    product(weight).sum().backward()

    assert info().hits == 3
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [1, 1]]


def test_nothing_is_kept_or_served_when_the_cache_is_switched_off() -> None:
    weight = kept(weight_of())
    before = info()
    with autocast(DEVICE, BF16, cache_enabled=False):
        apply(weight)

    assert info() == before


@pytest.mark.parametrize("rule", ["linear:lower", "conv1d:lower", "mm,addmm:lower", "matmul:lower"])
def test_no_rule_goes_past_the_cache(rule: str) -> None:
    op, _, _ = rule.partition(":")
    weight = weight_of(1.0, 2, 2, 1) if op == "conv1d" else weight_of()
    hold(weight)
    calls = {
        "linear": lambda: apply(weight),
        "conv1d": lambda: F.conv1d(torch.ones(1, 2, 1), weight),
        "mm,addmm": lambda: torch.mm(torch.ones(1, 2), weight),
        "matmul": lambda: torch.ones(1, 2) @ weight,
    }
    for _ in range(3):
        with autocast(DEVICE, BF16, policy="torch"):
            calls[op]()
    assert info().hits == 2


# --- held: the hold itself ------------------------------------------------------------------------


def test_a_hold_ends_with_its_block_and_the_parameters_are_what_they_were() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), hold_casts(layer) as held:
        product(layer.weight)[0, 0].item() // 0
    assert type(layer.weight) is type(layer.bias) is nn.Parameter
    assert held.info()[:3] == (0, 0, 0)
    assert "released" in repr(held)
    layer.weight.data.fill_(3)
    assert product(layer.weight).tolist() == [[6, 6]]
    with pytest.raises(CallOrderError, match="make a new one"), held:
        pass


def test_a_hold_without_a_block_lasts_until_release() -> None:
    layer = nn.Linear(2, 2, bias=False)
    held = hold_casts(layer)
    for _ in range(3):
        product(layer.weight)
    assert held.info().hits == 2
    assert "hits=2" in repr(held)
    for _ in range(2):
        held.release()
    assert type(layer.weight) is nn.Parameter


def test_a_decorated_function_holds_during_its_calls() -> None:
    layer = nn.Linear(2, 2, bias=False)

    @hold_casts(layer)
    def held(times: int) -> type:
        for _ in range(times):
            product(layer.weight)
        return type(layer.weight)

    @hold_casts(layer)
    def tokens(times: int) -> Iterator[type]:
        for _ in range(times):
            yield type(layer.weight)

    assert type(layer.weight) is nn.Parameter
    assert held(2) is not nn.Parameter
    assert nn.Parameter not in list(tokens(3))
    assert type(layer.weight) is nn.Parameter
    assert held.__name__ == "held"


def test_of_two_holds_the_outer_one_holds() -> None:
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(inner, outer)
    with hold_casts(inner) as first, hold_casts(model) as second:
        product(inner.weight)
        product(outer.weight)
        assert (first.info().weights, second.info().weights) == (2, 2)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_model_without_weights_can_be_held() -> None:
    with hold_casts(nn.ReLU()) as held:
        assert held.info() == (0, 0, 0, 0, 0, 0)


async def stream() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hold_casts([nn.Linear(1, 1)]), TypeError, "takes a torch.nn.Module, got list"),  # type: ignore[arg-type]
        (lambda: hold_casts(nn.ReLU(), max_bytes=-1), ValueError, "0 or more, or None, got -1"),
        (lambda: hold_casts(nn.ReLU(), max_bytes="1 GB"), TypeError, "number of bytes"),  # type: ignore[arg-type]
        (lambda: hold_casts(nn.ReLU())(3), TypeError, "decorates a function"),  # type: ignore[arg-type]
        (lambda: hold_casts(nn.ReLU())(stream), TypeError, "that is not async"),
    ],
)
def test_wrong_use(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_make_fx_takes_held_weights_as_arguments_only() -> None:
    model, x = nn.Linear(4, 4), torch.ones(1, 4)

    def lowered(x: Tensor) -> Tensor:
        with autocast(DEVICE, BF16):
            return model(x)

    def functional(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        with autocast(DEVICE, BF16):
            return F.linear(x, weight, bias)

    with hold_casts(model) as held:
        lowered(x)
        with pytest.raises(CallOrderError, match="make_fx cannot trace weights held by hold_casts"):
            make_fx(lowered)(x)
        graph = make_fx(functional)(model.weight, model.bias, x)
        held.release()
        of_model = make_fx(lowered)(x)
    with torch.no_grad():
        model.weight.mul_(2)
    for result in (graph(model.weight, model.bias, x), of_model(x)):
        assert torch.equal(result, lowered(x))


def test_what_cannot_be_held_is_told() -> None:
    class Quantized(nn.Parameter):
        pass

    weight = Quantized(torch.ones(2, 2))
    with pytest.warns(UserWarning, match=r"no weight of this ParameterList.*Quantized"):
        hold(weight)


def test_a_held_model_is_copied_saved_and_loaded_as_any_other(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hold_casts(model):
        for weight in (model[0].weight, model[1].weight):
            product(weight)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch.save(model, tmp_path / "model.pt")
        torch.save(model.state_dict(), tmp_path / "state.pt")
        copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
        copies.append(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        copies[-1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (tmp_path / "model.pt").read_bytes().find(b"halfstep.") == -1
    for same in copies:
        for ours, theirs in zip(model.parameters(), same.parameters(), strict=True):
            assert type(theirs) is nn.Parameter
            assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_held_model_is_compiled_trained_and_moved_as_any_other() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    with hold_casts(model) as held:
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
            for run in (each, compiled, each, compiled):
                with autocast(DEVICE, BF16):
                    loss = run(x).float().square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            each.double().float()
            assert isinstance(each[0].weight, nn.Parameter)
        with autocast(DEVICE, BF16):
            assert torch.equal(model(x), plain(x))
        assert held.info().stale > 0


@pytest.mark.parametrize("both_are_held", [False, True])
def test_nobody_else_gets_the_casts_of_a_weight(both_are_held: bool) -> None:
    one, other = kept(weight_of()), weight_of(3.0)
    if both_are_held:
        kept(other)
    torch.utils.swap_tensors(one, other)
    copied = copy.copy(other)
    copied.data = copied.data.clone()
    new = weight_of(1.0)
    vars(new).update(vars(other))
    HOLDS[0].release()
    for value in (3.0, 4.0):
        for weight in (one, other, copied, new):
            weight.data.fill_(value)
            for _ in range(2):
                assert product(weight).tolist() == [[2 * value, 2 * value]]


def test_a_write_while_another_thread_casts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of()
    hold(weight)
    is_its_own = weight_cache._is_its_own

    def written_meanwhile(asked: Tensor) -> bool:
        found = is_its_own(asked)
        monkeypatch.undo()
        thread = threading.Thread(target=lambda: weight.data.fill_(3))
        cast = Tensor.to

        def cast_slowly(*args: Any, **kwargs: Any) -> Tensor:
            monkeypatch.undo()
            result = cast(*args, **kwargs)
            thread.start()
            thread.join()
            return result

        monkeypatch.setattr(Tensor, "to", cast_slowly)
        return found

    monkeypatch.setattr(weight_cache, "SMALL", 0)
    monkeypatch.setattr(weight_cache, "_is_its_own", written_meanwhile)
    product(weight)
    monkeypatch.setattr(weight_cache, "SMALL", 0)
    assert product(weight).tolist() == [[6, 6]]
    assert product(weight).tolist() == [[6, 6]]


def test_a_parameter_of_the_memory_of_a_held_one_is_a_plain_one() -> None:
    weight = kept(weight_of())
    for same in (nn.Parameter(weight), nn.Parameter(weight, requires_grad=False)):
        assert type(same) is nn.Parameter
        assert vars(same) == {}
        assert same.data_ptr() == weight.data_ptr()
    with torch.no_grad():
        same.fill_(3)
    assert product(weight).tolist() == [[6, 6]]
    assert type(weight.detach()) is Tensor
    assert nn.Embedding.from_pretrained(weight).weight.tolist() == [[3, 3], [3, 3]]


def test_subclasses_of_tensors_go_through_held_models() -> None:
    class Named(Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, function: Any, *args: Any, **kwargs: Any) -> Any:
            cls.seen.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, *args, **kwargs)

    layer, x = nn.Linear(2, 2), torch.ones(1, 2).as_subclass(Named)
    with hold_casts(layer), autocast(DEVICE, BF16):
        for _ in range(2):
            assert type(layer(x)) is Named
    assert "linear" in Named.seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_step_of_held_weights(kind: type[torch.optim.Optimizer]) -> None:
    held, plain = kept(weight_of()), weight_of()
    for weight in (held, plain):
        weight.grad = torch.full((2, 2), -2.0)
        optimizer = kind([weight], lr=1.0)
        torch.compile(lambda: optimizer.step(), backend="aot_eager")()  # noqa: B023
    assert torch.equal(held, plain)
    assert torch.equal(product(held), product(plain))


# --- held: what it sees change --------------------------------------------------------------------


def test_a_change_inside_the_context_is_seen() -> None:
    """Fact A13."""
    weight = weight_of()
    with autocast(DEVICE, BF16):
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                weight.fill_(value)
            for _ in range(3):
                assert apply(weight).tolist() == [[2 * value, 2 * value]]


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


def test_an_optimizer_leaves_the_casts_of_others_alone() -> None:
    teacher, student = kept(weight_of()), weight_of()
    student.grad = torch.ones(2, 2)
    torch.optim.SGD([student], lr=0.1).step()
    before = info().hits
    product(teacher)
    assert info().hits == before + 1


def test_another_parameter_in_the_place_of_one() -> None:
    layer = nn.Linear(2, 2, bias=False)
    kept(layer.weight)
    layer.weight = weight_of(3.0)
    with autocast(DEVICE, BF16):
        assert layer(torch.ones(1, 2)).tolist() == [[6, 6]]


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


def test_nobody_can_write_to_a_kept_cast() -> None:
    weight = kept(weight_of(), grad=False)
    with torch.no_grad(), autocast(DEVICE, BF16, policy="standard; t,reshape,dropout:lower"):
        for change in (
            lambda: weight.t(),
            lambda: weight.reshape(4),
            lambda: F.dropout(weight, training=False),
            lambda: torch.linalg.multi_dot([weight, weight]),
        ):
            for _ in range(3):
                change().mul_(5)
            assert product(weight).tolist() == [[2, 2]]
    assert info().hits > 0


def test_other_layouts_run_as_under_torch_autocast() -> None:
    x = torch.ones(4, 2)
    for weight in (nn.Parameter(torch.eye(4).to_sparse()), nn.Parameter(torch.tensor(2.0))):
        with warnings.catch_warnings(action="ignore"):
            hold(weight)
        for _ in range(3):
            with autocast(DEVICE, BF16, policy="torch"):
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


def test_a_held_parameter_is_made_anew_from_its_attributes() -> None:
    weight = kept(weight_of())
    same = type(weight)(weight.data, requires_grad=True, **vars(weight))
    assert type(same) is nn.Parameter
    assert vars(same) == {}


def test_a_weight_lives_as_long_as_its_context_at_most() -> None:
    weight = weight_of()
    with autocast(DEVICE, BF16):
        apply(weight)
        alive = weakref.ref(weight)
        del weight
    assert alive() is None


def test_a_hold_that_nobody_releases_dies_with_its_model() -> None:
    layer = nn.Linear(2, 2)
    hold_casts(layer)
    product(layer.weight)
    alive = weakref.ref(vars(layer.weight)["_halfstep_casts"][BF16].kept.cast)
    del layer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("held", [False, True])
def test_no_growth_over_a_thousand_iterations_without_gradient(held: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sizes = set()
    if held:
        HOLDS.append(hold_casts(model))
    with torch.no_grad():
        for i in range(1000):
            with autocast(DEVICE, BF16):
                model(torch.ones(1, 4))
                if i > 0:
                    entries = [entry for param in model.parameters() for entry in in_context(param)]
                    sizes.add(sum(each.kept.cast.nbytes for each in entries if each.kept))
    assert sizes == {2 * (4 * 4 + 4) * 2 if held else 0}


@pytest.mark.parametrize("free", [hold_casts.clear, hold_casts.release])
def test_clearing_frees_at_once(free: Callable[[hold_casts], None]) -> None:
    weight = kept(weight_of())
    alive = weakref.ref(vars(weight)["_halfstep_casts"][BF16].kept.cast)
    gc.disable()
    try:
        free(HOLDS[-1])
        assert alive() is None
    finally:
        gc.enable()


def test_bytes_are_the_sum_of_what_is_kept_and_at_most_the_limit() -> None:
    limit, rng = 64, random.Random(0)
    weights = [weight_of(1.0, 2, n + 1) for n in range(8)]
    hold(*weights, max_bytes=limit)
    for _ in range(2000):
        weight = rng.choice(weights)
        match rng.randrange(20):
            case 0:
                weight.data.fill_(3)
            case 1:
                weight.data = weight.data[:, : rng.randrange(1, 9)].clone()
            case 2:
                HOLDS[-1].clear()
            case _:
                product(weight, rng.choice([BF16, FP16]))
        kept_casts = [
            entry.kept.cast
            for weight in weights
            for entry in vars(weight)["_halfstep_casts"].values()
            if entry.kept is not None
        ]
        assert info().casts == len(kept_casts)
        assert info().bytes == sum(cast.nbytes for cast in kept_casts) <= limit


# --- autograd -------------------------------------------------------------------------------------


def gradients(steps: int, way: str) -> list[Tensor]:
    """Train a small network, its layers used twice, and return its gradients in the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(5, 3, 8)
    if way == "held":
        HOLDS.append(hold_casts(model))
    for _ in range(steps):
        model.zero_grad()
        with autocast(DEVICE, BF16, cache_enabled=way != "without a cache"):
            loss = model(model(x)).float().pow(2).sum() * 2**-12
        loss.backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("way", ["in a context", "held"])
def test_gradients_are_those_without_a_cache(way: str, casts: list[torch.dtype]) -> None:
    with_cache = gradients(4, way)
    assert len(casts) == 6 * (1 if way == "held" else 4)
    without = gradients(4, "without a cache")

    assert len(without) == 6
    for ours, reference in zip(with_cache, without, strict=True):
        assert ours.dtype == FP32
        assert torch.equal(ours, reference)


def test_second_derivatives() -> None:
    weight, x = kept(weight_of()), torch.full((1, 2), 2.0, dtype=BF16, requires_grad=True)
    with autocast(DEVICE, BF16):
        y = F.linear(x, weight).float().pow(2).sum()
    (gradient,) = torch.autograd.grad(y, weight, create_graph=True)
    gradient.sum().backward()

    assert info().hits == 3
    assert x.grad is not None
    assert x.grad.tolist() == [[32, 32]]  # of 4 (x0 + x1) ** 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [[16, 16], [16, 16]]


def test_a_weight_may_change_between_forward_and_backward() -> None:
    weight, x = kept(weight_of()), torch.ones(1, 2, requires_grad=True)
    with autocast(DEVICE, BF16):
        y = F.linear(x, weight).sum()
    with torch.no_grad():
        weight.fill_(7)
    y.backward()

    assert x.grad is not None
    assert x.grad.tolist() == [[2, 2]]  # of the weight as it was


def test_whether_a_cast_is_kept_changes_no_gradient() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 4, 2), torch.randn(3, 5, 8)  # its gradients come in float32
    HOLDS.append(hold_casts(layer))
    runs = []
    for _ in range(4):
        layer.zero_grad()
        with autocast(DEVICE, BF16):
            loss = layer(x)[0].float().sum()
        loss.backward()
        runs.append([param.grad for param in layer.parameters()])

    assert info().hits > 0 or not dispatch.has_onednn(BF16)  # without, it runs in float32
    assert all(map(torch.equal, runs[0], runs[-1]))


def test_tied_weights_add_up_in_float32() -> None:
    """Fact A21's cause: a shared cast adds the gradients of its uses in bfloat16."""
    weight = kept(weight_of())
    with autocast(DEVICE, BF16):
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
    with torch.autograd.graph.save_on_cpu(), autocast(DEVICE, BF16):
        block(x).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [1, 1]]


# --- where it is off, or beside others ------------------------------------------------------------


def test_inside_functorch_nothing_is_kept_or_served() -> None:
    weight = kept(weight_of())
    before = info()
    with autocast(DEVICE, BF16):
        torch.vmap(lambda x: F.linear(x, weight))(torch.ones(3, 2))
        gradient = torch.func.grad(lambda w: F.linear(torch.ones(1, 2), w).sum())(weight)

    assert gradient.tolist() == [[1, 1], [1, 1]]
    assert info() == before


def test_while_tracing_nothing_is_kept_or_served() -> None:
    layer = nn.Linear(2, 2, bias=False)
    kept(layer.weight)
    before = info()
    with autocast(DEVICE, BF16):
        with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):
            traced = torch.jit.trace(layer, torch.ones(1, 2), check_trace=False)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        compiled(torch.ones(1, 2))
    assert info()[3:5] == before[3:5]  # hits and misses; tracing may hand out the memory
    with torch.no_grad():
        layer.weight.fill_(3)
    with autocast(DEVICE, BF16):
        assert traced(torch.ones(1, 2)).tolist() == [[6, 6]]
        assert compiled(torch.ones(1, 2)).tolist() == [[6, 6]]


def test_under_a_dispatch_mode_nothing_is_kept_or_served() -> None:
    weight = kept(weight_of())
    before = info()
    with FlopCounterMode(display=False):
        product(weight)
    assert info() == before


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
    kept(layer.weight)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.fill_(3)
    assert product(other.weight).tolist() == [[6, 6]]


def test_many_threads() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(2, 8)
    HOLDS.append(hold_casts(model[:2]))
    with torch.no_grad(), autocast(DEVICE, BF16, cache_enabled=False):
        expected = model(x)
    wrong = []

    def call_often() -> None:
        with torch.no_grad():
            for _ in range(50):
                with autocast(DEVICE, BF16):
                    if not torch.equal(model(x), expected):
                        wrong.append(1)
                if threading.current_thread().name.endswith("0"):
                    HOLDS[-1].clear()

    threads = [threading.Thread(target=call_often, name=f"t{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gathered_weights_of_fsdp2_are_not_held(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.warns(UserWarning, match=r"no weight of this FSDPSequential|DTensor"):
            HOLDS.append(hold_casts(model))
        with torch.no_grad():
            for _ in range(3):
                with autocast(DEVICE, BF16):
                    assert model(torch.ones(1, 4)).dtype == BF16
    finally:
        dist.destroy_process_group()
