"""What a trace finds wasted, and that each cure saves what it says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.demo.gpt import GPT, GPTConfig
from halfstep.tracing.prediction import Prediction
from halfstep.tracing.waste import Finding

BF16 = torch.bfloat16


class Attention(nn.Module):
    """One head whose input is float32, read by three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(x)
        weights = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        out: Tensor = self.out(weights @ self.v(x))
        return out


class Normed(nn.Module):
    """A residual stream that one float32 table keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def traced(
    model: nn.Module, x: Tensor, policy: str = "standard", backward: bool = True, **options: Any
) -> halfstep.trace:
    model.zero_grad()
    with halfstep.trace(model) as t:
        with halfstep.autocast("cpu", BF16, policy=policy, **options):
            loss = model(x).sum()
        if backward:
            loss.backward()
    return t


def cast_bytes(t: halfstep.trace) -> int:
    return sum(row.cast_bytes for row in t.ops)


def kinds(t: halfstep.trace) -> dict[str, Finding]:
    return {finding.kind: finding for finding in reversed(t.casts())}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (Attention, lambda: torch.randn(2, 8, 16)),
    "attention, x needs grad": (Attention, lambda: torch.randn(2, 8, 16, requires_grad=True)),
    "normed": (Normed, lambda: torch.randint(8, (4, 8))),
    "gpt": (
        lambda: GPT(GPTConfig.of_size("tiny", vocab=96)),
        lambda: torch.randint(96, (4, 32)),
    ),
    "norm between": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)),
        lambda: torch.randn(8, 16),
    ),
    "sum between": (
        lambda: nn.Sequential(nn.Linear(16, 16), Summed(), nn.Linear(16, 16)),
        lambda: torch.randn(8, 4, 16),
    ),
}


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_each_policy_saves_what_it_says(name: str, backward: bool) -> None:
    torch.manual_seed(0)
    make_model, make_input = MODELS[name]
    model, x = make_model(), make_input()
    t = traced(model, x, backward=backward)
    found = [finding for finding in t.casts() if finding.policy]
    assert found
    for finding in found:
        assert finding.policy is not None
        cured = traced(model, x, finding.policy, backward=backward)
        assert cast_bytes(t) - cast_bytes(cured) == finding.bytes > 0, finding


@pytest.mark.parametrize("name", MODELS)
def test_a_prediction_without_change_is_what_was_recorded(name: str) -> None:
    make_model, make_input = MODELS[name]
    t = traced(make_model(), make_input())
    assert Prediction(t.ops, {}).bytes == cast_bytes(t)


def test_a_chain() -> None:
    t = traced(Attention(), torch.randn(2, 8, 16))
    chain = kinds(t)["chain"]
    assert chain.op == "softmax"
    assert chain.policy == "standard; softmax:leave"
    # [2, 8, 8] up and down, forward and backward, 6 bytes each
    assert chain.bytes == 4 * 128 * 6
    assert "bf16 -> fp32 -> bf16 by softmax:fp32-dtype, once" in chain.what
    assert "chain" not in kinds(traced(Attention(), torch.randn(2, 8, 16), chain.policy))


def test_one_tensor_cast_again_and_again() -> None:
    t = traced(Attention(), torch.randn(2, 8, 16))
    repeated = kinds(t)["repeated"]
    assert (repeated.op, repeated.count) == ("gelu", 3)
    assert repeated.modules == ("q", "k", "v")
    assert repeated.policy == "standard; gelu:lower"
    assert repeated.bytes == 2 * 256 * 6
    assert repeated.what == "output of gelu: cast fp32->bf16 3 times"


def test_an_input_cast_again_is_cured_by_hand() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x) + self.b(x)
            return out

    (repeated,) = (f for f in traced(Two(), torch.ones(8, 8)).casts() if f.kind == "repeated")
    assert (repeated.policy, repeated.bytes) == (None, 64 * 6)
    assert "x = x.to(torch.bfloat16)" in repeated.cure
    assert "a tensor [8, 8] from outside the model" in repeated.what
    assert not traced(Two(), torch.ones(8, 8, dtype=BF16)).casts()


def test_a_weight_cast_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(256, 256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(self.inner(x))
            return out

    x, model = torch.ones(8, 256, dtype=BF16), Twice()
    t = traced(model, x, cache_enabled=False)
    (repeated,) = (f for f in t.casts() if f.kind == "repeated")
    assert repeated.what == "inner.weight: cast fp32->bf16 2 times"
    assert "cache_enabled=True" in repeated.cure
    traced(model, x, cache_enabled=True)
    cured = traced(model, x, cache_enabled=True)
    assert cast_bytes(t) - cast_bytes(cured) == repeated.bytes == 2 * 256 * 256 * 6
    assert not cured.casts()


def test_small_weights_are_cast_again_by_intention() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(self.inner(x))
            return out

    assert not traced(Twice(), torch.ones(8, 8, dtype=BF16)).casts()


def test_parts_of_a_tensor_are_not_the_same_tensor() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2)
            c = a @ a
            x.add_(1)
            return c + a @ b

    found = traced(Parts(), torch.ones(16, 8), backward=False).casts()
    assert [f.count for f in found if f.kind == "repeated"] == [2]  # a @ a


def test_a_straggler_that_one_rule_does_not_cure() -> None:
    t = traced(Normed(), torch.randint(8, (4, 8)))
    straggler = kinds(t)["straggler"]
    assert straggler.policy == "standard; embedding,layer_norm:lower"
    assert straggler.op == "embedding"
    halfstep.Policy.parse(straggler.policy)


def test_dimensions_that_miss_the_matrix_units() -> None:
    model = nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 8))
    t = traced(model, torch.ones(24, 16))
    odd = [f for f in t.casts() if f.kind == "dimension"]
    forward = [f for f in odd if f.op == "addmm"]
    assert {(f.modules, f.cure) for f in forward} == {
        (("0",), "pad columns to 24"),
        (("1",), "pad inner to 24"),
    }
    assert "0: addmm of [20] x [24, 16] x [16, 20] in bf16, columns 20" in {f.what for f in odd}
    assert all(f.bytes == 0 and f.policy is None for f in odd)
    times = [f.seconds for f in odd]
    assert times == sorted(times, reverse=True)
    assert {f.op for f in odd} == {"addmm", "mm"}
    with halfstep.trace(model) as wide:
        model(torch.ones(24, 16))
    assert not wide.casts()  # float32 has no such multiples


def test_dimensions_of_convolutions_and_attention() -> None:
    conv = nn.Conv2d(3, 8, 3)
    t = traced(conv, torch.ones(1, 3, 8, 8))
    assert "pad channels in to 8" in {f.cure for f in t.casts()}
    with halfstep.trace(conv) as t, halfstep.autocast("cpu", BF16):
        q = torch.ones(1, 2, 16, 12, dtype=BF16)
        F.scaled_dot_product_attention(q, q, q)
        torch.baddbmm(torch.ones(1, 8, 8), torch.ones(1, 8, 9), torch.ones(1, 9, 8))
    assert {f.cure for f in t.casts() if f.kind == "dimension"} == {
        "pad head width to 16",
        "pad inner to 16",
    }


def test_findings_are_ranked_and_told() -> None:
    t = traced(Attention(), torch.randn(2, 8, 16))
    waste = t.casts()
    sizes = [finding.bytes for finding in waste]
    assert sizes == sorted(sizes, reverse=True)
    assert waste[0] in waste[:2]
    lines = str(waste).splitlines()
    assert lines[0].startswith(f"casts read and write {cast_bytes(t) / 1024:.1f} KiB and take ")
    assert '            cure: autocast(policy="standard; softmax:leave")' in lines
    assert lines[-1].endswith("Savings of several cures do not add up.")
    policies = [finding.policy for finding in waste if finding.policy]
    assert len(set(policies)) == len(policies)


def test_cures_go_on_from_the_policy_of_the_trace() -> None:
    t = traced(Attention(), torch.randn(2, 8, 16), "torch-cuda; gelu:lower")
    assert kinds(t)["chain"].policy == "torch-cuda; gelu:lower; softmax:leave"


def test_nothing_is_found_without_autocast() -> None:
    model = Attention()
    with halfstep.trace(model) as t:
        model(torch.randn(2, 8, 16)).sum().backward()
    assert not t.casts()
    assert "nothing that a rule" in str(t.casts())


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_is_not_waste(reentrant: bool) -> None:
    linear = nn.Linear(8, 8)
    x = torch.ones(8, 8, requires_grad=True)
    with halfstep.trace(linear) as t:
        with halfstep.autocast("cpu", BF16):
            loss = checkpoint(linear, x, use_reentrant=reentrant).sum()
        loss.backward()
    casts = [cast.source for row in t.ops for cast in row.casts if row.phase != "backward"]
    assert len({source.storage for source in casts}) < len(casts)
    assert not [finding for finding in t.casts() if finding.kind == "repeated"]
