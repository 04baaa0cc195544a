"""Two versions of a model: what is equal, where they drift apart first, and by how much."""

import copy
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.tune.models import VOCAB, gpt2, llama
from torch import Tensor, nn

import halfstep
from halfstep import compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


MODELS = [llama, gpt2]


def tokens() -> Tensor:
    return torch.randint(1, VOCAB, (4, 12))


def padded(ids: Tensor, lengths: list[int], *, left: bool) -> dict[str, Tensor]:
    """Return a batch of which each sequence is the first tokens of a row."""
    batch = {name: torch.zeros_like(ids) for name in ("input_ids", "attention_mask")}
    batch["position_ids"] = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        start = ids.shape[1] - length if left else 0
        held = slice(start, start + length)
        batch["input_ids"][row, held] = ids[row, :length]
        batch["attention_mask"][row, held] = 1
        batch["position_ids"][row, held] = torch.arange(length)
    return batch


def under(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    def version(**batch: Tensor) -> Any:
        with torch.inference_mode(), halfstep.autocast(DEVICE, dtype):
            return model(**batch)

    return version


def with_cache(model: nn.Module) -> Callable[..., Tensor]:
    """Token by token."""

    def version(input_ids: Tensor) -> Tensor:
        cache, logits = None, []
        with torch.no_grad():
            for ids in input_ids.split(1, dim=1):
                output = model(ids, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits.append(output.logits)
        return torch.cat(logits, 1)

    return version


def one_by_one(model: nn.Module) -> Callable[..., Tensor]:
    """Sequence by sequence."""
    return lambda input_ids: torch.cat([model(ids).logits for ids in input_ids.split(1)])


# --- versions that agree --------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_a_model_is_equal_to_itself(make) -> None:
    model = make()
    drift = compare(model, model, {"input_ids": tokens()})
    assert drift.passed
    assert (drift.origins, drift.first) == ((), None)
    assert (drift.log_probs.largest, drift.log_probs.ratio) == (0.0, 1.0)
    assert str(drift).startswith(f"passed: {len(drift.rows)} modules are equal in a and b, bit for")


@pytest.mark.parametrize("make", MODELS)
def test_attention(make) -> None:
    model = make()
    other = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    other.set_attn_implementation("sdpa")
    drift = compare(model, other, {"input_ids": tokens()})
    assert drift.passed, drift
    assert "attn" in drift.first  # all that comes before is equal, bit for bit
    assert 0 < drift.log_probs.largest < 1e-5
    assert all(row.ulps.dtype is torch.float32 and row.ulps.median < 8 for row in drift.rows)


@pytest.mark.parametrize("make", MODELS)
def test_float16_and_bfloat16(make) -> None:
    model, batch = make(), {"input_ids": tokens()}
    drifts = [
        compare(under(model, torch.float16), under(model, torch.bfloat16), batch),
        compare(copy.deepcopy(model).half(), copy.deepcopy(model).bfloat16(), batch),
    ]
    for drift in drifts:
        assert drift.passed, drift
        rows = {row.module: row for row in drift.rows}
        assert rows["lm_head"].ulps.dtype is torch.bfloat16
        assert 0.1 < rows["lm_head"].ulps.median < 8
        assert 1e-4 < drift.log_probs.largest < 1e-2


@pytest.mark.parametrize("make", MODELS)
def test_left_and_right_padding(make) -> None:
    model, ids, lengths = make(), tokens(), [12, 7, 9, 4]
    right, left = (padded(ids, lengths, left=left) for left in (False, True))
    drift = compare(model, model, right, left)
    assert drift.passed, drift
    rows = {row.module: row for row in drift.rows}
    assert rows["lm_head"].output.size == sum(lengths) * VOCAB
    assert drift.log_probs.num_tokens == sum(lengths) - 4
    assert drift.log_probs.largest < 1e-5


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("how", [with_cache, one_by_one])
def test_cache_and_batch_shape(make, how) -> None:
    """Each module is compared, though it is called for other parts of the batch."""
    model, batch = make(), {"input_ids": tokens()}
    whole = {row.module: row.output.size for row in compare(model, model, batch).rows}
    drift = compare(model, how(model), batch)
    assert drift.passed, drift
    assert {row.module: row.output.size for row in drift.rows} == whole
    assert 0 <= drift.log_probs.largest < 1e-5


# --- and others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_forgotten_positions(make) -> None:
    """Left padding moves absolute positions; relative ones stay."""
    model, ids, lengths = make(), tokens(), [12, 7, 9, 4]

    def forgets(**batch: Tensor) -> Any:
        return model(**{name: batch[name] for name in ("input_ids", "attention_mask")})

    right, left = (padded(ids, lengths, left=left) for left in (False, True))
    drift = compare(model, forgets, right, left)
    assert drift.passed is (make is llama), drift
    assert drift.origins == (() if drift.passed else ("transformer",))  # where positions are added


def other_epsilon(module: nn.Module) -> None:
    name = "eps" if hasattr(module, "eps") else "variance_epsilon"
    setattr(module, name, 1e-3)


def other_weight(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight[:2] *= 1.5


PLACES = {llama: "model.layers.1.input_layernorm", gpt2: "transformer.h.1.ln_1"}


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("plant", [other_epsilon, other_weight])
@pytest.mark.parametrize("how", [lambda model: model, with_cache])
def test_a_planted_fault_is_named_first(make, plant, how) -> None:
    model = make()
    wrong = copy.deepcopy(model)
    plant(wrong.get_submodule(PLACES[make]))
    drift = compare(model, how(wrong), {"input_ids": tokens()})
    assert not drift.passed
    assert drift.origins == (PLACES[make],), drift
    assert drift.rows[0].module == PLACES[make]
    assert f"begins in {PLACES[make]}; the first" in str(drift)
    assert drift.log_probs.largest > 1e-4


@pytest.mark.parametrize("make", MODELS)
def test_it_is_named_across_precisions(make) -> None:
    model = make()
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_submodule(PLACES[make]).weight[:16] *= -1
    drift = compare(model, under(wrong, torch.bfloat16), {"input_ids": tokens()})
    assert drift.origins == (PLACES[make],), drift
    assert drift.first != drift.origins[0]  # rounding comes before


# --- pairs of modules -----------------------------------------------------------------------------


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


class New(nn.Module):
    """The same with other names, one of them in another module."""

    def __init__(self, old: Old) -> None:
        super().__init__()
        self.mlp = nn.Sequential(copy.deepcopy(old.up), nn.ReLU(), copy.deepcopy(old.down))
        self.final = copy.deepcopy(old.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.final(self.mlp(x))


def test_modules_of_other_names_with_the_same_weights_are_paired() -> None:
    old = Old()
    new = New(old)
    drift = compare(old, new, torch.randn(4, 8))
    assert drift.first is None
    assert {row.module for row in drift.rows} == {"", "up", "down", "norm"}
    new.final.eps = 0.1
    assert compare(old, new, torch.randn(4, 8)).origins == ("norm",)


def test_parts_of_a_model_have_its_names() -> None:
    old = Old()

    def parts(x: Tensor) -> Tensor:
        return old.norm(old.down(torch.relu(old.up(x))))

    drift = compare(old, parts, torch.randn(4, 8))
    assert {row.module for row in drift.rows} == {"up", "down", "norm"}
    assert drift.first is None


def test_several_models_in_one_version() -> None:
    first, second = nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8))
    other = copy.deepcopy(second)
    other[0].eps = 0.1
    drift = compare(lambda x: second(first(x)), lambda x: other(first(x)), torch.randn(4, 8))
    assert {row.module for row in drift.rows} == {"", "Sequential", "Sequential.0"}
    assert drift.origins == ("Sequential.0",)


# --- numbers --------------------------------------------------------------------------------------


class Next(nn.Module):
    """Entries that are some units in the last place larger."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            x = x.nextafter(torch.tensor(math.inf, dtype=x.dtype))
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_units_in_the_last_place(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.5, 1.25, 1.75, 1.125, 1e-6]).to(dtype)
    drift = compare(Next(0), Next(3), x)
    assert drift.rows[0].ulps == (3.0, 3.0, dtype)
    assert f"(the model), 3, at most 3, {'bf16' if dtype is torch.bfloat16 else 'fp32'}" in str(
        drift
    )


class Adds(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


def test_entries_near_zero_are_measured_in_units_of_the_others() -> None:
    x = torch.tensor([1.0, 1.5, 0.0, 0.0])
    (row,) = compare(Adds(0.0), Adds(2.0**-20), x).rows
    unit = 2.0**-24  # of 0.9, the root mean square
    assert row.ulps == (8.0, 2.0**-20 / unit, torch.float32)


def test_log_probabilities_by_hand() -> None:
    model, other = gpt2(), gpt2()
    ids, lengths = tokens(), [12, 7, 9, 4]
    batch = padded(ids, lengths, left=False)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][:, :3] = -100  # the prompt
    found = compare(model, other, batch).log_probs
    differences = []
    for row, length in enumerate(lengths):
        one = ids[row : row + 1, :length]
        logs = [m(one).logits[0].log_softmax(-1).double() for m in (model, other)]
        differences.append(
            [(logs[0] - logs[1])[t - 1, ids[row, t]].item() for t in range(3, length)]
        )
    each = torch.tensor([x for row in differences for x in row], dtype=torch.double)
    ratios = [math.exp(sum(row)) for row in differences]
    assert found.num_tokens == len(each)
    assert found.mean == pytest.approx(each.mean().item(), abs=1e-6)
    assert found.largest == pytest.approx(each.abs().max().item(), abs=1e-5)
    assert found.ratio == pytest.approx(math.exp(each.mean().item()), abs=1e-6)
    assert found.sequence_ratios == pytest.approx(ratios, rel=1e-4)
    size = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios)
    assert found.effective_samples == pytest.approx(size, rel=1e-4)
    weights = each.exp()
    size = (weights.sum() ** 2 / weights.square().sum()).item()
    assert found.effective_tokens == pytest.approx(size, rel=1e-4)
    assert f"log-probabilities of {len(each)} tokens, a - b: mean {found.mean:.2g}" in str(found)


def test_without_logits_of_tokens_there_are_none() -> None:
    assert compare(Old(), Old(), torch.randn(4, 8)).log_probs is None
    assert compare(nn.Embedding(9, 4), nn.Embedding(9, 4), torch.ones(9).long()).log_probs is None


def test_a_tolerance_holds_for_all() -> None:
    model, batch = gpt2(), {"input_ids": tokens()}
    version = under(model, torch.bfloat16)
    assert not compare(model, version, batch, tolerance=1e-4).passed
    wrong = copy.deepcopy(model)
    other_weight(wrong.get_submodule(PLACES[gpt2]))
    assert compare(model, wrong, batch, tolerance=10.0).passed


def test_an_overflow_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong[1].bias[0] = math.inf
    drift = compare(model, wrong, torch.randn(4, 8))
    assert drift.origins == ("1",)
    assert drift.rows[0].output.error == math.inf
    assert drift.rows[0].ulps.largest == math.inf


# --- what is left as it was -----------------------------------------------------------------------


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    batch = torch.randn(4, 8)
    model[0].weight.grad = torch.ones(8, 8)
    held = [*model.parameters(), *model.buffers(), batch]
    before = [each.detach().clone() for each in (*held, torch.get_rng_state())]
    python, attributes = random.getstate(), [dict(vars(each)) for each in model.modules()]

    def writes(x: Tensor) -> Tensor:
        y = model(x)
        x.zero_()
        random.random()
        torch.rand(1)
        model.note = "new"
        return y

    drift = compare(model, writes, batch)
    assert drift.first is None  # the same dropout, and the same statistics
    assert all(map(torch.equal, before, (*held, torch.get_rng_state())))
    assert model[0].weight.grad.eq(1).all()
    assert random.getstate() == python
    assert [vars(each) for each in model.modules()] == attributes


def test_nothing_changes_by_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = model[1].running_mean.clone()

    def fails(x: Tensor) -> Tensor:
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compare(model, fails, torch.randn(4, 8))
    assert torch.equal(model[1].running_mean, before)
    assert not model[0]._forward_hooks
    assert nn.Module.__call__.__module__.startswith("torch")


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": 3}, TypeError, "a must be a model, or a function that calls one .* got int"),
        ({"tolerance": 0}, ValueError, "compare: tolerance must be above 0"),
        ({"tolerance": "1"}, TypeError, "compare: tolerance must be a number"),
        ({"b": lambda x: x}, ValueError, "no module in common"),
        ({"b": nn.Conv1d(4, 4, 1)}, ValueError, "no module in common"),
    ],
)
def test_errors_say_what_to_do(arguments, error: type[Exception], message: str) -> None:
    given = {"a": nn.Linear(8, 3), "b": nn.Linear(8, 3), "batch": torch.ones(4, 8)} | arguments
    with pytest.raises(error, match=message):
        compare(**given)


def test_other_tokens_are_refused() -> None:
    model, ids = gpt2(), tokens()
    with pytest.raises(ValueError, match="do not have the same tokens"):
        compare(model, model, {"input_ids": ids}, {"input_ids": ids.flip(0)})


def test_the_table() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrong = copy.deepcopy(model)
    other_weight(wrong[1])
    summary, _, head, first, *_ = str(drift := compare(model, wrong, torch.randn(4, 8))).split("\n")
    assert summary.startswith("FAILED: 2 of 3 modules drift apart; it begins in 1; the first")
    assert re.split("  +", head) == ["module", "class", "output error", "units in the last place"]
    assert first.startswith("1 ")
    assert first.endswith("begins here")
    assert repr(drift) == "<Drift FAILED, 3 modules>"
