"""Sums of many like terms: exact where PyTorch's stop at 256 in bfloat16 and 2,048 in float16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import step_time
from tests.device import DEVICE
from torch import Tensor, nn
from torch.autograd import forward_ad

from halfstep._autocast import autocast, preset
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._autocast.rule import HALVES

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # of forward mode and traces
]
N = 4096
ONE_ROW = torch.zeros(N, dtype=torch.long)
POINTS = torch.zeros(1, 64, 64, 2)
COLUMNS = ONE_ROW[:, None].expand(-1, 8)
Call = Callable[..., Any]

# What adds up in the backward pass: the gradient of some entry is N.
BACKWARD: dict[str, tuple[tuple[int, ...], Call]] = {
    "h[index]": ((3, 8), lambda h: h[ONE_ROW]),
    "h[negative]": ((3, 8), lambda h: h[ONE_ROW - 3]),
    "h[rows of indices]": ((3, 8), lambda h: h[ONE_ROW.view(64, 64)]),
    "h[index], 1d": ((3,), lambda h: h[ONE_ROW]),
    "h[:, index]": ((8, 3), lambda h: h[:, ONE_ROW]),
    "h[index, index]": ((3, 3), lambda h: h[ONE_ROW, ONE_ROW]),
    "index_select": ((3, 8), lambda h: h.index_select(0, ONE_ROW)),
    "index_select, 1d": ((3,), lambda h: h.index_select(0, ONE_ROW)),
    "index_select, between": ((2, 3, 4), lambda h: h.index_select(1, ONE_ROW)),
    "gather": ((3, 8), lambda h: h.gather(0, COLUMNS)),
    "take_along_dim": ((3, 8), lambda h: h.take_along_dim(COLUMNS, 0)),
    "take": ((8,), lambda h: h.take(ONE_ROW)),
    "embedding": ((3, 8), lambda h: F.embedding(ONE_ROW, h)),
    "embedding_bag": ((3, 8), lambda h: F.embedding_bag(ONE_ROW.view(64, 64), h, mode="sum")),
    "pad, 1d": ((1, 2, 4), lambda h: F.pad(h, (0, N - 1), mode="replicate")),
    "pad, 2d": ((1, 2, 4, 4), lambda h: F.pad(h, (0, 63, 0, 63), mode="replicate")),
    "pad, 3d": ((1, 1, 4, 4, 4), lambda h: F.pad(h, (0, 15, 0, 15, 0, 15), mode="replicate")),
    "interpolate, area": ((1, 1, 2, 2), lambda h: F.interpolate(h, 128, mode="area")),
    "adaptive_avg_pool1d": ((1, 1, 2), lambda h: F.adaptive_avg_pool1d(h, 2 * N)),
    "adaptive_avg_pool3d": ((1, 1, 2, 2, 2), lambda h: F.adaptive_avg_pool3d(h, 32)),
    "unfold": ((1, 1, 127, 127), lambda h: F.unfold(h, 64)),
    "windows of a vector": ((2 * N - 1,), lambda h: h.unfold(0, N, 1)),
    "windows, from the end": ((2, 2 * N - 1), lambda h: h.unfold(size=N, step=1, dimension=-1)),
    "max_pool1d": ((1, 1, 2 * N - 1), lambda h: F.max_pool1d(peak(h), N, 1)),
    "max_pool2d": ((1, 1, 127, 127), lambda h: F.max_pool2d(peak(h), 64, 1)),
    "max_pool3d": ((1, 1, 31, 31, 31), lambda h: F.max_pool3d(peak(h), 16, 1)),
    "adaptive_max_pool2d": ((1, 1, 1, 1), lambda h: F.adaptive_max_pool2d(h, 64)),
    "adaptive_max_pool3d": ((1, 1, 1, 1, 1), lambda h: F.adaptive_max_pool3d(h, 16)),
    "bilinear": ((2, 2), lambda h: F.bilinear(h, h[:, :1].detach(), h.new_ones(N, 2, 1))),
    "grid_sample": ((1, 1, 1, 1), lambda h: F.grid_sample(h, POINTS.to(h), align_corners=True)),
}  # fmt: skip


def peak(x: Tensor) -> Tensor:
    """Add 1 to the entry in the middle, which every window then takes."""
    middle = torch.zeros_like(x)
    middle[tuple(size // 2 for size in x.shape)] = 1
    return x + middle


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_of_many_terms(name: str, dtype: torch.dtype) -> None:
    shape, call = BACKWARD[name]
    h = torch.ones(shape, dtype=dtype, requires_grad=True)
    with autocast(DEVICE, dtype):
        result = call(h)
    assert result.dtype is dtype
    result.backward(torch.ones_like(result))
    assert h.grad.dtype is dtype
    assert h.grad.max() == N


# What adds up in the forward pass: an entry becomes N. (destination, source) -> result.
FORWARD: dict[str, Call] = {
    "index_add": lambda x, s: x.index_add(0, ONE_ROW, s),
    "index_add, 1d": lambda x, s: x[:, 0].index_add(0, ONE_ROW, s[:, 0]),
    "index_add, between": lambda x, s: x[None].index_add(1, ONE_ROW, s[None]),
    "histc": lambda x, s: s[:, 0].histc(4, 0, 4),
    "index_put": lambda x, s: x.index_put((ONE_ROW,), s, accumulate=True),
    "put": lambda x, s: x.put(COLUMNS[:, :1], s[:, :1], accumulate=True),
    "index_reduce": lambda x, s: x.index_reduce(0, ONE_ROW, s, "mean") * N,
    "scatter_add": lambda x, s: x.scatter_add(0, COLUMNS, s),
    "scatter": lambda x, s: x.scatter(0, COLUMNS, s, reduce="add"),
    "scatter_reduce": lambda x, s: x.scatter_reduce(0, COLUMNS, s, "sum"),
    "segment_reduce": lambda x, s: torch.segment_reduce(s, "sum", lengths=torch.tensor([N])),
    "fold": lambda x, s: F.fold(s[:, :1].reshape(1, N, 1).expand(1, N, N), 127, 64),
    "embedding_bag": lambda x, s: F.embedding_bag(torch.arange(N), s, ONE_ROW[:1], mode="sum"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FORWARD)
def test_a_result_of_many_terms(name: str, dtype: torch.dtype) -> None:
    x, source = torch.zeros(3, 8, dtype=dtype), torch.ones(N, 8, dtype=dtype)
    with autocast(DEVICE, dtype):
        result = FORWARD[name](x, source)
    assert result.dtype is dtype
    assert result.max().item() == pytest.approx(N, rel=1e-2)


IN_PLACE: dict[str, Call] = {
    "index_add_": lambda x, s: x.index_add_(0, ONE_ROW, s),
    "index_put_": lambda x, s: x.index_put_((ONE_ROW,), s, accumulate=True),
    "put_": lambda x, s: x.put_(COLUMNS[:, :1], s[:, :1], accumulate=True),
    "scatter_add_": lambda x, s: x.scatter_add_(0, COLUMNS, s),
    "scatter_": lambda x, s: x.detach().scatter_(0, COLUMNS, s.detach(), reduce="add"),
    "scatter_reduce_": lambda x, s: x.scatter_reduce_(0, COLUMNS, s, "sum"),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_into_a_destination_in_lower_precision(name: str, dtype: torch.dtype) -> None:
    leaf = torch.zeros(3, 8, dtype=dtype, requires_grad=True)
    source = torch.ones(N, 8, requires_grad=True)
    with autocast(DEVICE, dtype):
        x = leaf * 1
        view = x.view(-1)
        result = IN_PLACE[name](x, source)
    assert result is x or name == "scatter_"
    assert x.dtype is dtype
    assert view.max() == x.max() == N
    if name != "scatter_":  # PyTorch cannot differentiate it
        result.sum().backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("dtype", HALVES)
def test_into_a_vector_in_place(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype)
    with autocast(DEVICE, dtype):
        x.index_add_(0, ONE_ROW, torch.ones(N))
    assert x[0] == N


@pytest.mark.parametrize("dtype", HALVES)
def test_a_sum_without_nan(dtype: torch.dtype) -> None:
    x = torch.ones(N, 2, 2, dtype=dtype)
    with autocast(DEVICE, dtype):
        assert x.nansum((0, 2))[0] == 2 * N


@pytest.mark.parametrize("dtype", HALVES)
def test_a_running_logsumexp(dtype: torch.dtype) -> None:
    # In lower precision gradients are off by a factor of four.
    torch.manual_seed(0)
    x = torch.randn(N).to(dtype).requires_grad_()
    exact = x.detach().float().requires_grad_()
    with autocast(DEVICE, dtype):
        result = x.logcumsumexp(0)
    result.sum().backward()
    exact.logcumsumexp(0).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, exact.grad.to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_fractional_pooling_places_its_windows_as_in_float32(dtype: torch.dtype) -> None:
    # In bfloat16 a window began outside of its input: an internal error of PyTorch.
    places = torch.tensor([[[0.5] * 3]])
    for dims, pool in ((2, F.fractional_max_pool2d), (3, F.fractional_max_pool3d)):
        x = torch.rand(1, 1, *[4] * (dims - 1), 1500).to(dtype).requires_grad_()
        where = places[..., :dims].to(dtype)
        given = {"output_size": (*[2] * (dims - 1), 700), "_random_samples": where}
        with autocast(DEVICE, dtype):
            result = pool(x, 2, **given)
        assert result.dtype is dtype
        given["_random_samples"] = where.float()
        assert torch.equal(result.float(), pool(x.float(), 2, **given))
        result.sum().backward()


def test_what_replaces_entries_is_not_cast() -> None:
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    with autocast(DEVICE, torch.bfloat16):
        assert x.index_put((ONE_ROW[:1],), torch.full((1, 8), 3.0)).dtype is torch.float32
        assert x.index_put((ONE_ROW[:1],), x[:1] + 3).max() == 3


def test_the_forward_pass_saves_sizes_and_indices() -> None:
    h = torch.ones(1, 8, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        autocast(DEVICE, torch.bfloat16),
    ):
        F.avg_pool2d(h, 3)
        F.pad(h, (1, 1, 1, 1), mode="replicate")
        h[:, ONE_ROW[:5]]
    assert [tensor.dtype for tensor in saved] == [torch.int64]


def test_a_graph_with_a_hub_has_the_gradient_of_float32() -> None:
    torch.manual_seed(0)
    edges = torch.stack([torch.zeros(N, dtype=torch.long), torch.arange(1, N + 1)])
    nodes, weight = torch.rand(N + 1, 8), torch.rand(8, 8)

    def gradient(is_lower: bool) -> Tensor:
        w = weight.clone().requires_grad_()
        with autocast(DEVICE, torch.bfloat16, enabled=is_lower):
            hidden = nodes @ w
            messages = hidden[edges[0]] * hidden[edges[1]]
            out = torch.zeros_like(hidden).index_add(0, edges[1], messages)
            loss = out.float().mean()
        return torch.autograd.grad(loss, w)[0]

    exact = gradient(is_lower=False)
    assert (gradient(is_lower=True) - exact).norm() < 0.01 * exact.norm()


def test_windows_are_views_as_ever() -> None:
    h = torch.rand(12, requires_grad=True).bfloat16()
    with autocast(DEVICE, torch.bfloat16):
        apart, overlapping = h.unfold(0, 3, 3), h.unfold(0, 3, 1)
    assert apart.data_ptr() == overlapping.data_ptr() == h.data_ptr()
    apart.mul_(2)  # that of PyTorch, which may be written to
    with pytest.raises(RuntimeError, match="modified inplace"):
        overlapping.sum().backward()


@pytest.mark.parametrize("name", ["h[index]", "pad, 2d", "max_pool2d", "gather", "unfold"])
def test_transforms_give_what_autograd_gives(name: str) -> None:
    shape, call = BACKWARD[name]
    torch.manual_seed(0)
    h = torch.rand(2, *shape).bfloat16()

    def loss(x: Tensor) -> Tensor:
        with autocast(DEVICE, torch.bfloat16):
            return call(x).float().square().sum()

    loops = torch.stack([torch.func.grad(loss)(each) for each in h])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(h), loops)
    leaf = h[0].clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(loss(leaf), leaf)[0], loops[0])
    assert loops.dtype is torch.bfloat16
    _, tangent = torch.func.jvp(torch.func.grad(loss), (h[0],), (torch.ones_like(h[0]),))
    again = torch.autograd.grad(
        torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].sum(), leaf
    )[0]
    assert torch.allclose(tangent.float(), again.float(), rtol=0.02)


@pytest.mark.parametrize(
    "name", sorted(BACKWARD.keys() - {"embedding_bag", "grid_sample", "bilinear"})
)
def test_forward_mode_is_that_of_pytorch(name: str) -> None:
    shape, call = BACKWARD[name]
    h, direction = torch.rand(2, *shape).bfloat16()
    h.requires_grad_()

    def tangent() -> Any:
        return forward_ad.unpack_dual(call(forward_ad.make_dual(h, direction))).tangent

    with forward_ad.dual_level():
        expected = tangent()
        with autocast(DEVICE, torch.bfloat16):
            assert torch.equal(tangent(), expected)


def test_a_sparse_gradient_stays_sparse() -> None:
    table = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with autocast(DEVICE, torch.bfloat16):
        F.embedding(ONE_ROW, table, sparse=True).sum().backward()
    assert table.grad.is_sparse


@pytest.mark.parametrize("policy", ["torch", "standard; index:leave"])
def test_other_policies_add_as_pytorch_does(policy: str) -> None:
    h = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with autocast(DEVICE, torch.bfloat16, policy=policy):
        h[ONE_ROW].backward(torch.ones(N, 8, dtype=torch.bfloat16))
    assert h.grad is not None
    if h.grad.max() != 256:
        pytest.skip("PyTorch adds these in float32 now: docs/autocast.md can say so")


# --- losses and products --------------------------------------------------------------------------

CLASSES = 1000
TARGETS = {
    "class indices": torch.arange(64) % CLASSES,
    "probabilities": torch.full((64, CLASSES), 1 / CLASSES),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [
    {"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": torch.rand(CLASSES)},
    {"ignore_index": 3}, {"label_smoothing": 0.1, "weight": torch.rand(CLASSES), "ignore_index": 3},
], ids=lambda options: ", ".join(options))  # fmt: skip
def test_cross_entropy_is_that_of_float32_logits(options, target, dtype):
    torch.manual_seed(0)
    if target == "probabilities" and "ignore_index" in options:
        options = {k: v for k, v in options.items() if k != "ignore_index"}
    logits = (torch.randn(64, CLASSES) * 4).to(dtype).requires_grad_()
    exact = logits.detach().float().requires_grad_()
    with autocast(DEVICE, dtype):
        loss = F.cross_entropy(logits, TARGETS[target], **options)
    reference = F.cross_entropy(exact, TARGETS[target], **options)
    assert torch.equal(loss, reference)
    loss.sum().backward()
    reference.sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, exact.grad.to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_convolution_adds_a_batch_and_a_window_in_float32(dtype: torch.dtype) -> None:
    # Where oneDNN has no kernel, PyTorch's own rounds the sum after each image.
    images = torch.ones(600, 2, 8, 8)
    weight = torch.ones(2, 2, 3, 3, requires_grad=True)
    with autocast(DEVICE, dtype):
        result = F.conv2d(images, weight)
        large = F.conv_transpose2d(torch.ones(1, 1, 40, 40), torch.ones(1, 1, 31, 31))
    result.backward(torch.ones_like(result))
    assert result.dtype is large.dtype is dtype
    assert weight.grad.max().item() == pytest.approx(600 * 36, rel=4e-3)
    assert large.max().item() == pytest.approx(31 * 31, rel=4e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("output_padding", [1, (0, 1)])
def test_a_convolution_that_onednn_leaves_to_pytorch(dtype, output_padding):
    """An output padding that reaches the stride, where only dilation allows it."""
    weight = torch.ones(1, 1, 2, 2, requires_grad=True)
    with autocast(DEVICE, dtype):
        result = F.conv_transpose2d(
            torch.ones(600, 1, 4, 4), weight, output_padding=output_padding, dilation=2
        )
    result.backward(torch.ones_like(result))
    assert result.dtype is dtype
    assert weight.grad.tolist() == [[[[9600.0, 9600.0], [9600.0, 9600.0]]]]


# --- where a Python function is out of place ------------------------------------------------------


def test_a_traced_model_can_be_saved(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(2))
    x = torch.rand(1, 1, 8, 8)
    with autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        expected = net(x)
        torch.jit.trace(net, x).save(tmp_path / "net.pt")
    assert torch.equal(torch.jit.load(tmp_path / "net.pt")(x), expected)


def test_a_node_has_the_attributes_of_a_node() -> None:
    with autocast(DEVICE, torch.bfloat16):
        result = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)[:, ONE_ROW]
    assert "Float32Backward" in result.grad_fn.name()


@pytest.mark.skipif(DEVICE != "cpu", reason="only there index_select and gather add in float32")
def test_rows_and_entries_are_selected_without_python_in_the_backward_pass() -> None:
    h, index = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True), torch.tensor([0, 2, 2])
    with autocast(DEVICE, torch.bfloat16):
        found = h[index], F.embedding(index, h), h.take(index), h[:, 0][index]
        assert all(torch.equal(each, torch.ones_like(each)) for each in found)
        for wrong in (lambda: h[index + 2], lambda: h.take(index + 11)):
            with pytest.raises(IndexError):
                wrong()
    nodes = [type(each.grad_fn).__name__ for each in found]
    assert nodes == ["IndexSelectBackward0"] * 2 + ["GatherBackward0"] * 2


def test_masks_repeat_no_entry_and_need_nothing() -> None:
    h = torch.ones(4, 3, dtype=torch.bfloat16, requires_grad=True)
    mask, index = torch.tensor([True, False, True, True]), torch.tensor([0, 2, 2])
    with autocast(DEVICE, torch.bfloat16):
        assert type(h[mask].grad_fn).__name__ == "IndexBackward0"
        assert type(h[:, mask[:3]].grad_fn).__name__ == "IndexBackward0"
        assert type(h[index].grad_fn).__name__ != "IndexBackward0"
        assert type(h[mask, index].grad_fn).__name__ != "IndexBackward0"


def test_what_cuda_adds_in_float32_is_left_to_it() -> None:
    policy = PolicyOnDevice(preset("standard"), "cuda", "", 0, only_observed=False)
    assert "embedding.default" not in policy.ops()
    assert "index_select.default" in policy.ops()


def test_sparse_gradients_of_bags_and_nested_indices() -> None:
    bags = nn.EmbeddingBag(10, 4, mode="sum", sparse=True).bfloat16()
    table = torch.ones(10, 4, dtype=torch.bfloat16, requires_grad=True)
    nested = torch.nested.nested_tensor([ONE_ROW[:3], ONE_ROW[:2]], layout=torch.jagged)
    with autocast(DEVICE, torch.bfloat16):
        bags(torch.tensor([[1, 2]])).sum().backward()
        F.embedding(nested, table).values().sum().backward()
    assert bags.weight.grad.is_sparse
    assert table.grad[0, 0] == 5


def test_channels_last_stays() -> None:
    x = torch.rand(2, 8, 16, 16).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    with autocast(DEVICE, torch.bfloat16):
        F.max_pool2d(x, 3, 2).sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_promotion_of_sparse_tensors_is_as_in_pytorch() -> None:
    sparse = torch.eye(4).bfloat16().to_sparse()
    with autocast(DEVICE, torch.bfloat16, policy="standard; add:promote"):
        assert torch.equal((sparse + sparse).to_dense(), 2 * torch.eye(4).bfloat16())


@pytest.mark.skipif(DEVICE != "cpu", reason="torch.autocast has no rules for this device")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_language_model_costs_what_it_costs_under_torch_autocast(dtype: torch.dtype) -> None:
    training = step_time.Training("tiny", 2, 16, DEVICE, compiled=False)
    training.step(autocast(DEVICE, dtype))  # the optimizer's state
    theirs = step_time.ops_of(training, torch.autocast(DEVICE, dtype))
    ours = step_time.ops_of(training, autocast(DEVICE, dtype))
    assert (ours.count, ours.bytes) == (theirs.count, theirs.bytes)
