"""The simulated device itself: what it refuses, shares, counts and lets wait."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.simulated import device
from tests.simulated.profiles import PROFILES
from torch import nn

if DEVICE == "cpu":
    pytest.skip("needs --device sim:PROFILE: one process, one device", allow_module_level=True)
SIM = torch.device("sim", 0)
OTHER = torch.device("sim", 1)


def ones(*sizes: int, at: torch.device = SIM) -> torch.Tensor:
    return torch.ones(*sizes, device=at)


# ---- Mixed devices


@pytest.mark.parametrize("other", [torch.device("cpu"), OTHER])
def test_tensors_of_two_devices_are_refused(other: torch.device) -> None:
    for mixed in (
        lambda: ones(2) + ones(2, at=other),
        lambda: ones(2, 2) @ ones(2, 2, at=other),
        lambda: ones(2).add_(ones(2, at=other)),
        lambda: torch._foreach_add([ones(2)], [ones(2, at=other)]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mixed()


def test_a_number_of_the_cpu_is_accepted_but_not_written_to() -> None:
    number = torch.tensor(2.0, device="cpu")
    assert (ones(2) * number).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        number.add_(torch.tensor(1.0, device=SIM))


def test_a_number_of_the_cpu_is_refused_where_cuda_does() -> None:
    number = torch.tensor(2.0, device="cpu")
    for op in (torch.stack, torch.cat):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            op([torch.tensor(1.0, device=SIM), number])
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._amp_foreach_non_finite_check_and_unscale_([ones(2)], ones(1), number)


def test_numpy_refuses() -> None:
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        ones(2).numpy()


def test_two_devices() -> None:
    assert torch.ones(1, device="sim").device == SIM
    there = ones(2).to(OTHER)
    assert there.device == (there + 1).device == OTHER
    assert torch.zeros_like(ones(2), device=OTHER).device == OTHER
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.ones(1, device="sim:2")
    with torch.get_device_module("sim").device(1):
        assert torch.ones(1, device="sim").device == OTHER


# ---- Memory


def test_views_share_memory() -> None:
    x = torch.arange(6.0, device=SIM)
    views = [x.view(2, 3), x.view(2, 3).t(), x[1:], x.detach(), x.as_strided((2,), (3,), 1), x.data]
    for view in views:
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x[1:].data_ptr() == x.data_ptr() + 4
    views[2].zero_()
    assert x.sum().item() == 0.0
    assert (x + 1).untyped_storage()._cdata != x.untyped_storage()._cdata
    assert views[2]._base is x
    assert x._version == 1


def test_resizing() -> None:
    x = ones(2)
    same = x.view(2)
    x.resize_(100)
    assert x.shape == (100,)
    assert x.untyped_storage().nbytes() == 400
    x.zero_()
    assert same.tolist() == [0.0, 0.0]
    out = torch.empty(0, device=SIM)
    torch.add(ones(3), 1, out=out)
    assert out.tolist() == [2.0] * 3
    x.set_(out)
    assert x.data_ptr() == out.data_ptr()
    x.t_()


def test_modules_move_and_change_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = model.to("cpu").to("sim")
    weight = model[0].weight
    assert type(weight) is nn.Parameter
    assert weight.device == SIM
    assert model.half()[0].weight.dtype is torch.float16
    assert model[0].weight is weight  # as on other devices: data is replaced
    assert model.to(OTHER, torch.bfloat16)[1].running_mean.device == OTHER
    assert model.to("cpu").float()[0].weight.device.type == "cpu"
    assert type(torch.ones(1, device="sim")) is torch.Tensor


@pytest.mark.parametrize("at", [SIM, OTHER])
def test_copies_and_files(at: torch.device) -> None:
    x = torch.arange(4.0, device=at)
    pair = copy.deepcopy([x, x[1:]])
    assert pair[0].device == at
    assert pair[0].untyped_storage()._cdata == pair[1].untyped_storage()._cdata
    file = io.BytesIO()
    torch.save({"x": x, "module": nn.Linear(2, 2).to(at).state_dict()}, file)
    for location in (None, "cpu", "sim:1"):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["x"].device == (at if location is None else torch.device(location))
        assert loaded["x"].tolist() == x.tolist()
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)


def test_sparse_tensors() -> None:
    embedding = nn.Embedding(4, 2, sparse=True, device=SIM)
    embedding(torch.tensor([1, 2, 1], device=SIM)).sum().backward()
    grad = embedding.weight.grad
    assert grad.device == grad._values().device == SIM
    assert grad.coalesce()._values().tolist() == [[2.0, 2.0], [1.0, 1.0]]
    grad.mul_(2)
    assert grad.cpu().to_dense()[2].tolist() == [2.0, 2.0]
    assert torch.equal(grad.cpu().to(SIM).to_dense(), grad.to_dense())


# ---- Training


@pytest.mark.parametrize("fused", [False, True])
def test_training_is_that_of_the_cpu(fused: bool) -> None:
    def trained(at: str, scaler: Any) -> tuple[list[torch.Tensor], float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8, device="cpu"), nn.ReLU(), nn.Linear(8, 1, device="cpu")
        )
        model.to(at)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        for number in range(5):
            batch = torch.randn(3, 4, device="cpu").to(at)
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if number == 2:
                model[0].weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().cpu() for p in model.parameters()], scaler.get_scale()

    ours = trained("sim", torch.amp.GradScaler("sim"))
    theirs = trained("cpu", torch.amp.GradScaler("cpu"))
    assert ours[1] == theirs[1] == 2.0**15
    assert all(map(torch.equal, ours[0], theirs[0]))


def test_autocast() -> None:
    with torch.autocast("sim", torch.bfloat16):
        assert (ones(2, 2) @ ones(2, 2)).dtype is torch.float32  # PyTorch has no rules for it
    assert "sim" in torch._C._autocast_supported_devices()


def test_backward_passes_have_a_thread_and_their_errors_arrive() -> None:
    threads = []
    param = nn.Parameter(ones(2))
    param.register_hook(lambda grad: threads.append(threading.get_ident()))
    param.sum().backward()
    assert threads != [threading.get_ident()]

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("this one")

    param.register_post_accumulate_grad_hook(lambda param: fail(param))
    for _ in range(2):
        with pytest.raises(KeyError, match="this one"):
            param.sum().backward()


def test_random_numbers_are_those_of_the_device() -> None:
    module = torch.get_device_module("sim")
    torch.manual_seed(3)
    on_cpu = torch.rand(2, device="cpu")
    first, state = torch.rand(2, device=SIM), module.get_rng_state()
    assert first.tolist() == on_cpu.tolist()
    second = torch.rand(2, device=SIM)
    torch.rand(2, device="cpu")
    torch.rand(2, device=OTHER)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=SIM), second)


# ---- Counts and races


def test_ops_are_counted() -> None:
    x = ones(2)
    device.ops.clear()
    torch._foreach_mul_([x, x], 2.0)
    assert device.ops == {"_foreach_mul_": 1}
    _ = x + x
    assert device.ops == {"_foreach_mul_": 1, "add": 1}


def test_waits_are_counted() -> None:
    x = ones(2)
    for wait, name in (
        (lambda: x.sum().item(), "item"),
        (lambda: bool((x > 0).all()), "item"),
        (lambda: x.cpu(), "copy to host"),
        (lambda: torch.tensor([1.0], device=SIM), "copy to device"),
        (lambda: x.nonzero(), "nonzero"),
        (lambda: torch.equal(x, x), "equal"),
        (lambda: torch.get_device_module("sim").synchronize(), "synchronize"),
    ):
        device.waits.clear()
        wait()
        assert device.waits == {name: 1}
    device.waits.clear()
    x.to("cpu", non_blocking=True)
    torch.zeros(2, device="cpu").to(SIM, non_blocking=True)
    torch.full((2,), 3.0, device=SIM)
    assert not device.waits


def sent() -> tuple[torch.Tensor, torch.Event]:
    """A transfer to the host, and the event after it."""
    source = ones(2)
    target = torch.empty_like(source, device="cpu", pin_memory=True)
    target.zero_()
    target.copy_(source, non_blocking=True)
    event = torch.Event("sim")
    event.record()
    source.fill_(5.0)  # the device does this later
    return target, event


def test_what_is_not_waited_for_is_not_there() -> None:
    target, event = sent()
    assert target.is_pinned()
    assert target.tolist() == [0.0, 0.0]
    event.synchronize()
    assert target.tolist() == [1.0, 1.0]
    assert ones(2).to("cpu", non_blocking=True).isnan().all()


def test_an_event_says_when_it_is_there() -> None:
    device.use(PROFILES["slow"])
    target, event = sent()
    assert [event.query(), target[0].item()] == [False, 0.0]
    assert [event.query(), target[0].item()] == [False, 0.0]
    assert [event.query(), target[0].item()] == [True, 1.0]


def test_an_event_knows_nothing_of_later_transfers() -> None:
    _, first = sent()
    target, second = sent()
    first.synchronize()
    assert target.tolist() == [0.0, 0.0]
    ones(1).item()  # waits for all that the device has to do
    assert target.tolist() == [1.0, 1.0]
    assert second.query()


def test_the_other_device_is_not_waited_for() -> None:
    target, event = sent()
    ones(1, at=OTHER).item()
    assert target.tolist() == [0.0, 0.0]
    event.synchronize()


def test_pinned_memory_must_not_change_while_it_is_sent() -> None:
    source = torch.ones(2, device="cpu").pin_memory()
    source.to(SIM, non_blocking=True)
    source.zero_()
    with pytest.raises(RuntimeError, match="race: pinned memory was written to"):
        ones(1).item()


# ---- Profiles


def test_cuda_has_no_bfloat16_in_the_kernels_of_amp() -> None:
    def unscale(dtype: torch.dtype) -> None:
        found, inverse = torch.zeros(1, device=SIM), ones(1)
        grads = [torch.ones(2, dtype=dtype, device=SIM)]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)

    unscale(torch.bfloat16)
    device.use(PROFILES["cuda"])
    unscale(torch.float32)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        unscale(torch.bfloat16)


@pytest.mark.parametrize(
    ("profile", "error", "text"),
    [("mps", TypeError, "MPS framework doesn't support"), ("xpu_arc", RuntimeError, "aspect fp64")],
)
def test_no_float64(profile: str, error: type[Exception], text: str) -> None:
    device.use(PROFILES[profile])
    for attempt in (
        lambda: torch.ones(2, dtype=torch.float64, device=SIM),
        lambda: ones(2).double(),
        lambda: torch.ones(2, dtype=torch.float64, device="cpu").to(SIM),
        lambda: ones(2).sum(dtype=torch.float64),
    ):
        with pytest.raises(error, match=text):
            attempt()
    assert ones(2).cpu().double().dtype is torch.float64


def test_a_plain_device() -> None:
    device.use(PROFILES["plain"])
    with pytest.raises(NotImplementedError, match="getPinnedMemoryAllocator"):
        torch.empty_like(ones(2), device="cpu", pin_memory=True)
    with pytest.raises(RuntimeError, match="doesn't support events"):
        torch.Event("sim").record()
    param = nn.Parameter(ones(2))
    param.sum().backward()
    with pytest.raises(NotImplementedError, match="Could not run 'aten::_fused_adamw_'"):
        torch.optim.AdamW([param], fused=True).step()
    torch.optim.AdamW([param]).step()
