"""Waste of a trace; each cure saves the bytes that it promises."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.train_text import GPT, GPTConfig
from tests.device import DEVICE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._pytorch import dispatch
from halfstep._tools.trace.savings import Prediction
from halfstep._tools.trace.waste import WasteFinding

pytestmark = pytest.mark.slow

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
        with halfstep.autocast(DEVICE, BF16, policy=policy, module=model, **options):
            loss = model(x).sum()
        if backward:
            loss.backward()
    return t


def cast_bytes(t: halfstep.trace) -> int:
    return sum(row.cast_bytes for row in t.ops)


def kinds(t: halfstep.trace) -> dict[str, WasteFinding]:
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
    assert Prediction(t.ops).bytes({}) == cast_bytes(t)


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
    assert "autocast(cache_enabled=True), which keeps the cast" in repeated.cure
    assert repeated.bytes == 2 * 256 * 256 * 6


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


def dimensions(t: halfstep.trace) -> dict[str, WasteFinding]:
    return {f.cure: f for f in t.casts() if f.kind == "dimension"}


def test_dimensions_that_miss_the_matrix_units() -> None:
    model = nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 20), nn.Linear(20, 20))
    t = traced(model, torch.ones(23, 16))
    found = dimensions(t)
    assert {cure: f.modules for cure, f in found.items()} == {
        "pad features out to 24": ("0",),
        "pad features in to 24, features out to 24": ("1", "2"),
    }
    first = found["pad features out to 24"]
    assert first.what == "0: addmm in bf16 with [16, 20], features out 20"
    assert (first.op, first.count, first.bytes, first.policy) == ("addmm", 1, 0, None)
    times = [f.seconds for f in t.casts() if f.kind == "dimension"]
    assert times == sorted(times, reverse=True)
    with halfstep.trace(model) as wide:
        model(torch.ones(24, 16))
    assert not wide.casts()  # float32 has no such multiples
    assert not dimensions(traced(model, torch.ones(0, 16)))  # nor has an empty batch


@pytest.mark.skipif(not dispatch.has_onednn(BF16), reason="convolutions run in float32 here")
def test_dimensions_of_convolutions() -> None:
    conv = nn.Conv2d(3, 8, 3)
    assert set(dimensions(traced(conv, torch.ones(1, 3, 8, 8)))) == {"pad channels in to 8"}
    transposed = nn.ConvTranspose2d(16, 3, 2)
    assert set(dimensions(traced(transposed, torch.ones(1, 16, 8, 8)))) == {"pad channels out to 8"}
    depthwise = nn.Conv2d(12, 12, 3, groups=12)
    assert not dimensions(traced(depthwise, torch.ones(1, 12, 8, 8)))


def test_dimensions_of_attention() -> None:
    with halfstep.trace(nn.Linear(8, 8)) as t, halfstep.autocast(DEVICE, BF16):
        q = torch.ones(1, 2, 13, 12, dtype=BF16)
        F.scaled_dot_product_attention(q, q, q)  # 13 tokens are up to the data
        torch.ones(13, 13) @ torch.ones(13, 13)
    assert set(dimensions(t)) == {"pad head width to 16"}


def test_ten_findings_of_a_kind_are_printed() -> None:
    model = nn.ModuleList(nn.Linear(8, 9 + size) for size in range(14))
    with halfstep.trace(model) as t, halfstep.autocast(DEVICE, BF16):
        x = torch.ones(8, 8, dtype=BF16)
        for layer in model:
            layer(x)
    text = str(t.casts())
    assert text.count("dimension  ") == 11
    assert "dimension  and 3 more" in text


def test_findings_are_sorted_and_printed() -> None:
    t = traced(Attention(), torch.randn(2, 8, 16))
    waste = t.casts()
    sizes = [finding.bytes for finding in waste]
    assert sizes == sorted(sizes, reverse=True)
    assert waste[0] in waste[:2]
    assert str(copy.deepcopy(waste)) == str(waste)
    lines = str(waste).splitlines()
    assert lines[0].startswith(f"casts read and write {cast_bytes(t) / 1024:.1f} KiB and take ")
    assert '            cure: autocast(policy="standard; softmax:leave")' in lines
    assert lines[-1].endswith("The savings of several cures do not add up.")
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
    assert "no casts that a rule" in str(t.casts())


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_is_not_waste(reentrant: bool) -> None:
    linear = nn.Linear(8, 8)
    x = torch.ones(8, 8, requires_grad=True)
    with halfstep.trace(linear) as t:
        with halfstep.autocast(DEVICE, BF16):
            loss = checkpoint(linear, x, use_reentrant=reentrant).sum()
        loss.backward()
    casts = [cast.source for row in t.ops for cast in row.casts if row.phase != "backward"]
    assert len({source.storage for source in casts}) < len(casts)
    assert not [finding for finding in t.casts() if finding.kind == "repeated"]


# --- what is no finding ---------------------------------------------------------------------------


class HandNorm(nn.Module):
    """RMSNorm as models write it; between its products stand casts that may do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = HandNorm()
        self.up, self.gate, self.down = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def test_no_rule_for_a_product_of_which_others_depend() -> None:
    """mul:lower would cast what the casts inside the norm, unseen in the trace, raise again."""
    model = nn.Sequential(nn.Embedding(8, 16), Block(), Block())
    x = torch.randint(8, (4, 8))
    t = traced(model, x)
    repeated = [f for f in t.casts() if f.kind == "repeated"]
    (found,) = repeated
    assert (found.policy, found.modules) == (None, ("1.gate", "1.up", "2.gate", "2.up"))
    assert found.what == "output of *.norm mul: cast fp32->bf16 2 times, 2 tensors"
    lowered = traced(model, x, "standard; mul:lower")
    assert cast_bytes(lowered) > cast_bytes(t)


class Model(nn.Module):
    """Module whose ops are given."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def measured(model: nn.Module, x: Tensor) -> dict[str, WasteFinding]:
    """Return findings by op, after trying every policy."""
    t = traced(model, x)
    for finding in t.casts():
        if finding.policy:
            cured = traced(model, x, finding.policy)
            assert cast_bytes(t) - cast_bytes(cured) == finding.bytes > 0, finding
    return {finding.op: finding for finding in t.casts()}


def test_dropout_follows_what_it_is_modelled_on() -> None:
    model = Model(lambda m, x: m.b(F.dropout(m.norm(m.a(x)), 0.1)))
    found = measured(model, torch.ones(8, 16))
    assert found["layer_norm"].policy == "standard; layer_norm:lower"
    assert "mul" not in found


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_gradients_of_what_is_joined(join: Callable[..., Tensor]) -> None:
    found = measured(Model(lambda m, x: m.b(join([h := m.a(x), m.norm(h)], 0))), torch.ones(8, 16))
    assert join.__name__ in found


def test_factories_and_losses_are_not_lowered() -> None:
    rnn = nn.LSTM(16, 16, batch_first=True)
    model = Model(lambda m, x: rnn(x)[0].sum() + F.mse_loss(m.a(torch.randn(16)), m.mask))
    with halfstep.trace(model) as t:
        with halfstep.autocast(DEVICE, BF16):
            loss = model(torch.ones(2, 4, 16))
        loss.backward()
    assert {f.op for f in t.casts()} <= {"mkldnn_rnn_layer"}


def test_a_sum_is_left_alone_in_its_module_only() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Summed(), nn.Linear(16, 16))
    (chain,) = (f for f in traced(model, torch.randn(8, 4, 16)).casts() if f.op == "sum")
    assert chain.policy == "standard; sum@1:leave"
    assert chain.cure == 'autocast(policy="standard; sum@1:leave", module=model)'


def test_a_rule_for_every_add_says_so() -> None:
    gpt = GPT(GPTConfig.of_size("tiny", vocab=96))
    (found,) = (f for f in traced(gpt, torch.randint(96, (4, 32))).casts() if f.op == "add")
    assert found.policy == "standard; add,layer_norm:lower"
    assert found.cure.endswith(", which holds for every add")


def test_a_rule_for_a_product_is_limited_to_its_module() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scaled()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
            self.by = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            y = self.scale(x, self.by)
            return (self.q(y) + self.k(y)) * self.by

    found = measured(Two(), torch.randn(8, 16))
    assert found["mul"].policy == "standard; mul@scale:lower"
    assert found["mul"].cure == 'autocast(policy="standard; mul@scale:lower", module=model)'


def test_float32_that_the_model_asks_for_is_named() -> None:
    model = Model(lambda m, x: m.b(F.gelu(m.a(x).float())))
    (found,) = (f for f in traced(model, torch.ones(8, 16)).casts() if f.op == "gelu")
    assert (found.cure, found.policy) == ("by hand: .float() in the model", None)
    by_hand = Model(lambda m, x: m.b(F.gelu(m.a(x))))
    saved = cast_bytes(traced(model, torch.ones(8, 16)))
    saved -= cast_bytes(traced(by_hand, torch.ones(8, 16)))
    assert found.bytes == saved
    model = Model(lambda m, x: m.b(m.a(x) * m.mask))
    t = traced(model, torch.ones(8, 16))
    (found,) = (f for f in t.casts() if f.op == "mul")
    assert found.cure == "by hand: the buffer mask in torch.bfloat16"
    model.mask = model.mask.bfloat16()
    assert cast_bytes(t) - cast_bytes(traced(model, torch.ones(8, 16))) == found.bytes


# --- weights --------------------------------------------------------------------------------------


class Again(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.inner, self.num = nn.Linear(256, 256, bias=False), num

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num):
            x = self.inner(x)
        return x


@pytest.mark.parametrize("backward", [True, False])
def test_what_the_cache_casts_twice_is_no_finding(backward: bool) -> None:
    t = traced(Again(4), torch.ones(8, 256, dtype=BF16), backward=backward)
    forward = [c for row in t.ops if row.phase == "forward" for c in row.casts]
    assert [cast.source.is_weight for cast in forward] == [True, True]
    assert not t.casts()


def test_a_weight_that_the_cache_does_not_keep() -> None:
    model = Again(4)
    model.alias = model.inner.weight.data[:]  # shares its storage
    t = traced(model, torch.ones(8, 256, dtype=BF16))
    (found,) = t.casts()
    assert found.what == "inner.weight: cast fp32->bf16 4 times"
    assert "unless other tensors share the storage" in found.cure
    assert "cache_enabled" not in found.cure
    del model.alias
    assert not traced(model, torch.ones(8, 256, dtype=BF16)).casts()


def test_weights_in_several_contexts_of_pytorch() -> None:
    model, x = Again(1), torch.ones(8, 256, dtype=BF16)
    with halfstep.trace(model) as t:
        for _ in range(3):
            with torch.autocast(DEVICE, BF16):
                model(x)
    (found,) = t.casts()
    assert found.cure.startswith("halfstep.autocast")


def test_ops_whose_casts_are_most_of_all() -> None:
    if not dispatch.has_onednn(BF16):
        pytest.skip("this CPU has no such layer in lower precision: it runs in float32")
    rnn = nn.LSTM(16, 16)
    t = traced(Model(lambda m, x: rnn(x)[0]), torch.ones(4, 2, 16))
    (found,) = (f for f in t.casts() if f.kind == "costly")
    assert found.policy == "standard; mkldnn_rnn_layer:leave"
    assert found.what.startswith("mkldnn_rnn_layer: its casts are ")
    assert "and take" in found.what
    assert cast_bytes(t) / 2 < found.bytes <= cast_bytes(t)
    assert not [f for f in traced(Again(1), torch.ones(8, 256)).casts() if f.kind == "costly"]
