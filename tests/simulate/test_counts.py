"""Counts of a simulation, and their text."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import simulate
from halfstep._numerics.formats import FORMATS
from halfstep._tools.simulate.arithmetic import (
    RoundingCount,
    RoundingCounts,
    counts_text,
    worst_text,
)

pytestmark = pytest.mark.slow

INF, NAN = float("inf"), float("nan")


def row_of(s: simulate, module: str, phase: str) -> dict[str, object]:
    (row,) = (r for r in s.rows() if (r["module"], r["phase"]) == (module, phase))
    return row


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_counts_are_those_of_a_loop_over_the_values(name: str) -> None:
    torch.manual_seed(0)
    format = FORMATS[name]
    values = torch.randn(3000) * 2.0 ** torch.randint(-150, 140, (3000,))
    values = torch.cat(
        [values, torch.tensor([0.0, INF, -INF, NAN, format.last_held, format.flushed_below])]
    )
    counts = RoundingCounts(format)
    counts.add("a", "forward", values[:1000])
    counts.add("a", "forward", values[1000:].view(2, -1))
    counts.add("a", "forward", values[:0])
    finite = [abs(x) for x in values.tolist() if abs(x) < INF]
    assert counts.rows() == [
        RoundingCount(
            "a",
            "forward",
            values=3006,
            saturated=sum(x > format.last_held for x in finite),
            flushed=sum(0 < x <= format.flushed_below for x in finite),
            amax=max(finite),
        )
    ]


def test_a_count_is_what_the_cast_does() -> None:
    torch.manual_seed(0)
    values = torch.randn(20_000) * 2.0 ** torch.randint(-40, 20, (20_000,))
    for name in ("fp16", "bf16"):
        counts, cast = RoundingCounts(FORMATS[name]), values.to(FORMATS[name].dtype)
        counts.add("", "forward", values)
        (row,) = counts.rows()
        assert row.saturated == cast.isinf().sum()
        assert row.flushed == ((cast == 0) & (values != 0)).sum()


class Two(nn.Module):
    """A layer whose output is too large for float16, and one whose weights are too small."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(2, 2, bias=False)
        self.small = nn.Linear(2, 3, bias=False)
        nn.init.constant_(self.large.weight, 300.0)
        nn.init.constant_(self.small.weight, 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(x) + self.large(x).sum().float() * 0


def test_float16_by_module_and_phase() -> None:
    model, x = Two(), torch.tensor([[200.0, 200.0], [1.0, 1.0]])
    with simulate(model, torch.float16) as s:
        model.small(x)
        model.large(x)
    # Casts of 4 inputs, of the weights, and the results.
    assert row_of(s, "large", "forward") == {
        "module": "large",
        "phase": "forward",
        "values": 4 + 4 + 4,
        "saturated": 2,  # 2 * 200 * 300
        "flushed": 0,
        "amax": 120_000.0,
        "share": pytest.approx(2 / 12),
    }
    small = row_of(s, "small", "forward")
    assert (small["values"], small["saturated"], small["flushed"]) == (4 + 6 + 6, 0, 6)
    assert [row["module"] for row in s.rows()] == ["large", "small"]


def test_eight_bits_count_operands_forward_and_incoming_gradients_backward() -> None:
    model, x = nn.Linear(4, 3), torch.full((2, 5, 4), 1000.0, requires_grad=True)
    gradient = torch.full((2, 5, 3), 1e-4)
    for _ in range(2):  # in a second step the same memory may come again
        with simulate(model, "e4m3") as s:
            for _ in range(3):
                model(x).backward(gradient)
    forward, backward = row_of(s, "", "forward"), row_of(s, "", "backward")
    assert (forward["values"], forward["saturated"]) == (3 * (40 + 12), 3 * 40)
    assert (backward["values"], backward["flushed"]) == (3 * 30, 3 * 30)
    assert backward["amax"] == pytest.approx(1e-4)
    assert [row["phase"] for row in s.rows()] == ["backward", "forward"]


def test_what_is_recomputed_is_counted_by_itself() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    with simulate(model, "e5m2") as s:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    phases = {row["phase"]: row["values"] for row in s.rows()}
    assert phases == {"forward": 8 + 16, "recompute": 8 + 16, "backward": 8}


@pytest.mark.parametrize("format", FORMATS)
def test_attention_is_counted_and_what_draws_or_moves_values_is_not(format: str) -> None:
    q = torch.randn(1, 2, 8, 16)
    with simulate(nn.Module(), format) as s:
        y = F.scaled_dot_product_attention(q, q * 2, q * 3)
        torch.native_dropout(y, 0.5, True)[0].transpose(0, 1).clone()
        torch.cat([y, y]).masked_fill(y > 0, 0.0)[0, :, 1:3].float()
    num_results = y.numel() if FORMATS[format].dtype.itemsize == 2 else 0
    assert s.rows()[0]["values"] == 3 * q.numel() + num_results


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_values_of_nested_tensors_are_counted(layout: torch.layout) -> None:
    model = nn.Linear(4, 4)
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.full((3, 4), 1e6)], layout=layout)
    with simulate(model, "fp16") as s:
        model(x)
    (row,) = s.rows()
    assert row["saturated"] >= 12


@pytest.mark.parametrize("format", FORMATS)
def test_what_runs_without_values_is_not_counted(format: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    with simulate(model, format) as s:
        torch.export.export(model, (x,))
    assert s.rows() == []


def test_an_op_that_failed_is_counted_when_it_runs() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with simulate(nn.Module(), "fp16") as s:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            a @ b.T
        casts = s.rows()[0]["values"]
        a @ b
    assert s.rows()[0]["values"] == 2 * casts + 15


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_products_of_sparse_tensors_stay_in_float32() -> None:
    sparse, x = torch.eye(4).mul(0.3), torch.randn(4, 4)
    for each in (sparse.to_sparse(), sparse.to_sparse_csr()):
        with simulate(nn.Module(), "e4m3"):
            y = each @ x
        assert torch.equal(y, sparse @ x)


def test_names_are_those_without_wrappers() -> None:
    inner = torch.compile(nn.Linear(4, 4), backend="eager")
    model = nn.Sequential(inner, nn.ReLU())
    with simulate(model, "fp16") as s:
        model(torch.ones(2, 4))
    assert {row["module"] for row in s.rows()} == {"0", "1"}


def test_a_gradient_that_overflows_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(100.0)
    with simulate(model, "fp16") as s:
        (model(torch.ones(2, 4)).float().sum() * 1000).backward()
    first = s.rows()[0]
    assert (first["module"], first["phase"]) == ("1", "backward")
    assert first["amax"] == 400_000.0
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.isinf().any()


# --- saying it ------------------------------------------------------------------------------------


def test_rows_are_plain_values() -> None:
    model = nn.Linear(4, 4)
    with simulate(model, "bf16") as s:
        model(torch.ones(2, 4)).sum().backward()
        inside = s.rows()
    assert json.loads(json.dumps(s.rows())) == s.rows() == inside


def test_the_text_names_the_worst_first() -> None:
    model, x = Two(), torch.tensor([[200.0, 200.0], [1.0, 1.0]])
    with simulate(model, torch.float16) as s:
        model.small(x)
        model.large(x)
    lines = str(s).splitlines()
    assert lines[0] == "fp16: 28 values rounded, 2 saturated, 6 flushed to zero"
    assert lines[1] == (
        "worst: large, forward: 16.7 % of its values became inf; largest 1.2e+05, "
        "fp16 ends at 65,504 and 5.96e-08"
    )
    assert lines[2].split()[:5] == ["module", "phase", "values", "saturated", "flushed"]
    assert lines[3].split() == ["large", "forward", "12", "2", "0", "16.7", "%", "1.2e+05"]
    assert lines[4].split() == ["small", "forward", "16", "0", "6", "37.5", "%", "200"]
    assert str(s) == s.table()
    assert repr(s) == f"<simulate: {lines[0]}, policy standard>"


def test_one_inf_comes_before_any_number_of_zeros_but_a_clip_does_not() -> None:
    rows = [
        RoundingCount("inf", "forward", 1000, 1, 0, 1e5),
        RoundingCount("zeros", "backward", 10, 0, 9, 1.0),
        RoundingCount("both", "forward", 10, 5, 5, 1e9),
    ]

    def order(format: str) -> list[str]:
        s = simulate(nn.Module(), format)
        s._counts.rows = lambda: rows  # type: ignore[method-assign]
        return [row["module"] for row in s.rows()]

    assert order("fp16") == ["both", "inf", "zeros"]
    assert order("e4m3") == ["both", "zeros", "inf"]


def test_what_is_worst_in_a_line() -> None:
    e4m3, fp16 = FORMATS["e4m3"], FORMATS["fp16"]
    both = [RoundingCount("a.b", "backward", 200, 1, 2, 500.0)]
    assert worst_text(both, e4m3, clips=True) == (
        "worst: a.b, backward: 0.5 % of its values clipped to 448 and 1 % became zero; "
        "largest 500, e4m3 ends at 448 and 0.00195"
    )
    zeros = [RoundingCount("", "forward", 3, 0, 3, 1e-9)]
    assert "(in no submodule), forward: 100 % of its values became zero" in worst_text(
        zeros, fp16, clips=False
    )
    none = [RoundingCount("a", "forward", 3, 0, 0, 1.0)]
    assert worst_text(none, fp16, clips=False) == "worst: none; every value is in the range of fp16"


def test_a_block_in_which_nothing_is_rounded_says_so() -> None:
    model = nn.Linear(4, 4)
    with simulate(model, "fp16") as s:
        pass
    assert s.rows() == []
    assert "nothing was rounded" in str(s)
    assert "no module of the model ran" in str(s)
    other = nn.Linear(4, 4)
    with simulate(model, "fp16") as s:
        F.relu(other(torch.ones(1, 4)))
    assert "no module of the model ran" in str(s)
    assert "(in no submodule)" in str(s)


def test_notes_stand_under_the_table() -> None:
    assert counts_text([], FORMATS["fp16"], clips=False, notes=["a note"]).endswith("\na note")
