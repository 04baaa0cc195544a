"""Master weights on several ranks against float32 copies of what each rank holds, made by hand."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ranks import cases
from tests.ranks.pool import Pool
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import master_weights
from halfstep._master_weights.exchange import STORES, chunks_of
from halfstep._pytorch.distributed import in_place_of, is_dtensor, local_part

BF16, FP16 = torch.bfloat16, torch.float16


def net(dtype: torch.dtype = BF16) -> nn.Sequential:
    """Of two ranks, the second one has less of 3 rows, and nothing of 1."""
    return nn.Sequential(*cases.model(), nn.Linear(3, 1)).to(dtype)


def tensor_parallel() -> nn.Module:
    """Shards, replicas (bias of the rows, the norm), and parameters that are no DTensors."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    plan = {
        "1": ColwiseParallel(),
        "2": RowwiseParallel(),
        "3": SequenceParallel(sequence_dim=0, use_local_output=True),
    }
    parallelize_module(module.to(BF16), mesh, plan)  # type: ignore[arg-type]
    return module


def fsdp_reducing_in_float32() -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = net()
    fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return module


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DistributedDataParallel(net()),
    "ddp, views": lambda: DistributedDataParallel(net(), gradient_as_bucket_view=True),
    "fsdp": lambda: cases.fsdp2(net()),
    "fsdp, reduce_dtype": fsdp_reducing_in_float32,
    "tensor parallel": tensor_parallel,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def rounded(weight: Tensor, store: str) -> Tensor:
    """Return a weight in bfloat16, as a store rounds it."""
    if store == "float32":
        return weight.bfloat16()
    upper = (weight.contiguous().view(torch.int32) + 0x8000) >> 16
    return upper.to(torch.int16).view(BF16)


class ByHand:
    """A float32 copy of what this rank holds of each parameter, which is stepped and rounded."""

    def __init__(self, params: list[nn.Parameter], name: str, store: str) -> None:
        self.params, self.store = params, store
        self.weights = [nn.Parameter(local_part(param).detach().float()) for param in params]
        self.optimizer = OPTIMIZERS[name](self.weights)

    def step(self) -> None:
        for param, weight in zip(self.params, self.weights, strict=True):
            weight.grad = None if param.grad is None else whole_gradient(param).float()
        self.optimizer.step()
        with torch.no_grad():
            for param, weight in zip(self.params, self.weights, strict=True):
                local_part(param.detach()).copy_(rounded(weight, self.store))


def whole_gradient(param: nn.Parameter) -> Tensor:
    """Return a gradient of this rank's part; tensor parallel may leave each rank a summand."""
    grad: Any = param.grad
    if not is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    wide = in_place_of(grad, local_part(grad).float())
    return local_part(wide.redistribute(placements=param.placements))  # type: ignore[attr-defined]


def take_step(
    rank: int, step: int, module: nn.Module, optimizer: Any, max_norm: float | None = None
) -> Tensor:
    module.zero_grad(set_to_none=step % 3 != 2)
    loss: Tensor = module(cases.batch(rank, step).bfloat16()).float().square().mean()
    loss.backward()
    if max_norm is not None:  # PyTorch cannot measure DTensors beside other tensors
        params = list(module.parameters())
        clipped = list(filter(is_dtensor, params)) or params
        nn.utils.clip_grad_norm_(clipped, max_norm)
    optimizer.step()
    return loss.detach()


def both(rank: int, form: str, name: str, store: Any, max_norm: float | None) -> list[Tensor]:
    """Train with master weights and by hand; return the parameters, whole."""
    ours, theirs = WRAPPED[form](), WRAPPED[form]()
    params = list(ours.parameters())
    optimizer = master_weights(OPTIMIZERS[name](params), store)
    by_hand = ByHand(list(theirs.parameters()), name, store)
    places = [local_part(param).data_ptr() for param in params]
    data = 0 if form == "tensor parallel" else rank
    for step in range(6):
        loss = take_step(data, step, ours, optimizer, max_norm)
        assert torch.equal(loss, take_step(data, step, theirs, by_hand, max_norm))
        for param, reference in zip(params, by_hand.params, strict=True):
            assert param.dtype is BF16
            assert type(param) is type(reference)
            assert torch.equal(local_part(param), local_part(reference))
    assert [local_part(param).data_ptr() for param in params] == places
    for param, weight in zip(params, by_hand.weights, strict=True):
        for key, value in by_hand.optimizer.state[weight].items():
            found = optimizer.state[param][key]
            assert is_dtensor(found) == (is_dtensor(param) and key != "step")
            if is_dtensor(found) and found.placements != param.placements:
                # SGD of 2.15 leaves a buffer of summands what it is: they are added up later.
                settled = found.redistribute(placements=param.placements)
                torch.testing.assert_close(local_part(settled), value)
            else:
                assert torch.equal(local_part(found), value), key
    return whole(ours)


def whole(module: nn.Module) -> list[Tensor]:
    return [full(param) for param in module.parameters()]


def full(tensor: Any) -> Tensor:
    """Return all of a tensor; no backend sends int16."""
    if is_dtensor(tensor):
        wide = tensor.int() if tensor.dtype is torch.int16 else tensor
        tensor = wide.full_tensor().to(tensor.dtype)
    copy: Tensor = tensor.detach().clone()
    return copy


def assert_same(ranks: list[list[Tensor]]) -> None:
    for values in zip(*ranks, strict=True):
        assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("form", WRAPPED)
def test_a_step_is_that_of_float32_weights(pool: Pool, form: str, name: str) -> None:
    assert_same(pool.run(all_stores, form, name))


def all_stores(rank: int, form: str, name: str) -> list[Tensor]:
    courses = ("split", None), ("split", 0.1), ("float32", 0.1)
    return [value for store, norm in courses for value in both(rank, form, name, store, norm)]


def distribute(values: Tensor, like: Tensor) -> Tensor:
    """Return values that lie on the ranks as another tensor."""
    from torch.distributed.tensor import distribute_tensor

    if not is_dtensor(like):
        return values.clone()
    tensor: Any = like
    return distribute_tensor(values, tensor.device_mesh, tensor.placements)


# --- chunks ---------------------------------------------------------------------------------------


def test_all_ranks_step_the_same_parameters_at_a_time(pool: Pool) -> None:
    """Else collectives of a step, of gradients that are summands, would not meet."""
    first, second = pool.run(chunks)
    assert len(first) > 2
    assert first == second


def chunks(rank: int) -> list[list[int]]:
    sizes = 1, 2, 3, 1, 1, 5, 1, 2
    module = cases.fsdp2(nn.Sequential(*(nn.Linear(2, size, dtype=BF16) for size in sizes)))
    params = list(module.parameters())
    for param in params:
        param.grad = torch.zeros_like(param)
    numbers = {id(param): number for number, param in enumerate(params)}
    with patch("halfstep._master_weights.exchange.CACHED", 8):
        return [[numbers[id(param)] for param in chunk] for (chunk,) in chunks_of([params])]


# --- gradients in float32 -------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_are_reduced_in_float32(pool, dtype, views, static_graph, is_late):
    """With a scaler; of micro-batches, only the last of which is reduced."""
    options = {"gradient_as_bucket_view": views, "static_graph": static_graph}
    assert_same(pool.run(float32_gradients, dtype, options, is_late))


def float32_gradients(
    rank: int, dtype: torch.dtype, options: dict[str, Any], is_late: bool
) -> list[Tensor]:
    ours, theirs = net(dtype), net(dtype)
    module = DistributedDataParallel(ours, **options)
    if is_late:  # the buckets were made anew after the first backward pass
        for _ in range(2):
            module(cases.batch(rank).to(dtype)).sum().backward()
        module.zero_grad()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    master_weights(optimizer, "float32", gradients="float32")
    scaler = halfstep.GradScaler("cpu", init_scale=64.0)
    weights = [nn.Parameter(param.detach().float()) for param in theirs.parameters()]
    by_hand = torch.optim.AdamW(weights, lr=1e-3)

    num_parts = 1 if options["static_graph"] else 2

    def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
        loss: Tensor = model(cases.batch(rank, number).to(dtype)).float().square().mean()
        return loss

    for step in range(5):
        numbers = range(num_parts * step, num_parts * (step + 1))
        module.zero_grad(set_to_none=step % 2 == 0)
        for number in numbers:
            with nullcontext() if number == numbers[-1] else module.no_sync():
                scaler.scale(loss_of(module, rank, number)).backward()
        found = [param.grad.clone() for param in ours.parameters() if param.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome(optimizer).taken

        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        for other in range(2):
            for param in theirs.parameters():
                param.grad, param.grad_dtype = None, torch.float32
            for number in numbers:
                (loss_of(theirs, other, number) * 64).backward()
            for param, weight in zip(theirs.parameters(), weights, strict=True):
                weight.grad += param.grad / 2
        for weight, grad in zip(weights, found, strict=True):
            assert grad.dtype is torch.float32
            assert torch.equal(grad, weight.grad)
            weight.grad /= 64
        by_hand.step()
        for mine, reference, weight in zip(
            ours.parameters(), theirs.parameters(), weights, strict=True
        ):
            reference.data.copy_(weight)
            assert mine.dtype is dtype
            assert torch.equal(mine, reference)
    return whole(ours)


# --- checkpoints ----------------------------------------------------------------------------------


class Training:
    """A sharded model and an optimizer with master weights; the same data on all ranks.

    Gradients are given, so that they do not depend on the number of ranks.
    """

    def __init__(self, name: str, store: Any, *, is_sharded: bool = True) -> None:
        self.module = cases.fsdp2(net()) if is_sharded else net()
        self.params = dict(self.module.named_parameters())
        self.optimizer = master_weights(OPTIMIZERS[name](self.params.values()), store)

    def steps(self, first: int, last: int) -> dict[str, Tensor]:
        """Train; return parameters and all state, whole."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for param in self.params.values():
                grad = torch.randn(param.shape, generator=generator).bfloat16()
                param.grad = distribute(grad, param)
            self.optimizer.step()
        self.optimizer.zero_grad()
        found = dict(self.params.items())
        for name, param in self.params.items():
            state = self.optimizer.state[param]
            found |= {f"{name} {key}": value for key, value in state.items()}
        return {name: full(value) for name, value in found.items()}

    def state(self, **options: Any) -> dict[str, Any]:
        chosen = StateDictOptions(**options)
        optimizer = get_optimizer_state_dict(self.module, self.optimizer, options=chosen)
        return {"model": get_model_state_dict(self.module), "optimizer": optimizer}

    def load(self, folder: str, **options: Any) -> None:
        state = self.state(**options)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.module, state["model"])
        set_optimizer_state_dict(
            self.module, self.optimizer, state["optimizer"], options=StateDictOptions(**options)
        )


def save(rank: int, folder: str, name: str, store: str, options: dict[str, Any]) -> Any:
    training = Training(name, store)
    before = training.steps(0, 4)
    dcp.save(training.state(**options), checkpoint_id=folder)
    return before, training.steps(4, 8)


def go_on(rank: int, folder: str, name: str, store: str, options: dict[str, Any]) -> Any:
    training = Training(name, store)
    training.load(folder, **options)
    return training.steps(4, 4), training.steps(4, 8)


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name].dtype is value.dtype, name
            assert torch.equal(one[name], value), name


COURSES = [
    ("AdamW", "split", {}),
    ("AdamW", "split", {"flatten_optimizer_state_dict": True}),
    ("AdamW", "float32", {}),
    ("SGD", "split", {}),
    ("SGD", "split", {"flatten_optimizer_state_dict": True}),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("name", "store", "options"), COURSES)
def test_training_goes_on_bit_for_bit(pool, tmp_path, name, store, options):
    folder = str(tmp_path / "checkpoint")
    saved = pool.run(save, folder, name, store, options)
    for found in pool.run(go_on, folder, name, store, options):
        assert_equal(found, saved[0])
    alone = Training(name, store, is_sharded=False)
    alone.load(folder, **options)
    found = alone.steps(4, 4), alone.steps(4, 8)
    assert_equal(found, saved[0])


def gathered(rank: int, store: str) -> Any:
    """Gather all state on every rank, and give it to a fresh optimizer from the first one."""
    first, second = Training("AdamW", store), Training("AdamW", store)
    before = first.steps(0, 3)
    state = copy.deepcopy(first.state(full_state_dict=True))
    set_model_state_dict(second.module, get_model_state_dict(first.module))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    optimizer = state["optimizer"] if rank == 0 else {}
    set_optimizer_state_dict(second.module, second.optimizer, optimizer, options=options)
    return (before, first.steps(3, 6)), (second.steps(3, 3), second.steps(3, 6))


@pytest.mark.parametrize("store", STORES)
def test_state_that_is_gathered_goes_on(pool: Pool, store: str) -> None:
    for expected, found in pool.run(gathered, store):
        assert_equal(found, expected)


def save_in_int16(rank: int, folder: str) -> Any:
    training = Training("AdamW", "split")
    before = training.steps(0, 4)
    state = training.state()
    for each in state["optimizer"]["state"].values():
        each["master_remainder"] = each["master_remainder"].short()
    dcp.save(state, checkpoint_id=folder)
    return before, training.steps(4, 8)


def test_remainders_that_were_saved_in_int16_load(pool: Pool, tmp_path: Path) -> None:
    """As those of DTensors were, before gathering them needed int32."""
    folder = str(tmp_path / "checkpoint")
    saved = pool.run(save_in_int16, folder)
    for found in pool.run(go_on, folder, "AdamW", "split", {}):
        assert_equal(found, saved[0])


def test_a_fresh_optimizer_of_float32_gradients_has_no_state_for_checkpoint(pool: Pool) -> None:
    """PyTorch makes its state by a step with gradients in the dtype of the parameters."""
    for first, has_state in pool.run(fresh_state):
        assert first[0] == "RuntimeError"
        assert "attempting to assign a gradient with dtype" in first[1]
        assert has_state


def fresh_state(rank: int) -> Any:
    module = net(FP16)
    optimizer = master_weights(OPTIMIZERS["AdamW"](module.parameters()), "float32")
    first = cases.raised(lambda: get_optimizer_state_dict(module, optimizer))
    module(cases.batch(rank).half()).sum().backward()
    optimizer.step()
    return first, bool(get_optimizer_state_dict(module, optimizer)["state"])


def export(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """As in docs/half_parameters.md: rank 0 gets all, the others one tensor at a time."""
    (block,) = [each for each in blocks_of("half_parameters.md") if "full_tensor" in each]
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    exported: dict[str, Tensor] = namespace["export"](model, optimizer)
    return exported


def blocks_of(page: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("store", ["split", "float32"])
def test_weights_are_gathered_once(pool: Pool, store: str) -> None:
    """Those in bfloat16 and then the remainders of the optimizer would be two gathers of each."""
    (found, num_before, num_gathers), (other, *counts) = pool.run(exported_once, store)
    assert (num_before, num_gathers) == (0, 8)  # the parameters
    assert counts == [0, 8]
    assert other == {}
    assert {value.dtype for value in found.values()} == {torch.float32}
    alone = Training("AdamW", store, is_sharded=False)
    alone.steps(0, 3)
    assert_equal([found], [halfstep.float32_weights(alone.module, alone.optimizer)])
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.values())


def exported_once(rank: int, store: str) -> tuple[dict[str, Tensor], int, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    training = Training("AdamW", store)
    training.steps(0, 3)
    with CommDebugMode() as before:
        halfstep.float32_weights(training.module, training.optimizer)
    with CommDebugMode() as during:
        found = export(training.module, training.optimizer)
    return found, before.get_total_counts(), during.get_total_counts()


def test_under_ddp_each_rank_has_the_weights(pool: Pool) -> None:
    """Rank 0 exports alone: a collective would wait for the other one."""
    found, other = pool.run(exported_by_the_first)
    assert found.keys() == net().state_dict().keys()
    assert other == {}


def exported_by_the_first(rank: int) -> dict[str, Tensor]:
    module = DistributedDataParallel(net())
    optimizer = master_weights(OPTIMIZERS["AdamW"](module.parameters()))
    take_step(rank, 0, module, optimizer)
    return halfstep.float32_weights(module.module, optimizer) if rank == 0 else {}


@pytest.mark.ranks4
@pytest.mark.parametrize(("name", "store", "options"), COURSES[:3])
def test_on_four_ranks_too(pool, pool4, tmp_path, name, store, options):
    folder = str(tmp_path / "checkpoint")
    saved = pool.run(save, folder, name, store, options)
    for found in pool4.run(go_on, folder, name, store, options):
        assert_equal(found, saved[0])


# --- wrong use ------------------------------------------------------------------------------------


def test_unused_parameters_cannot_have_float32_gradients(pool: Pool) -> None:
    for kind, message in pool.run(unused):
        assert kind == "ValueError"
        assert "find_unused_parameters=True" in message
        assert "static_graph=True" in message


def unused(rank: int) -> tuple[str, str]:
    module = DistributedDataParallel(net(FP16), find_unused_parameters=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return cases.raised(lambda: master_weights(optimizer, "float32"))


def test_a_model_that_is_wrapped_too_late(pool: Pool) -> None:
    for kind, message in pool.run(too_late):
        assert kind == "ValueError"
        assert "a DistributedDataParallel that was made later cannot" in message
        assert "Make it first" in message


def too_late(rank: int) -> tuple[str, str]:
    alone = net(FP16)
    optimizer = master_weights(torch.optim.SGD(alone.parameters(), lr=0.1), "float32")
    alone(cases.batch(rank).half()).sum().backward()
    optimizer.step()
    model = net(FP16)
    master_weights(torch.optim.SGD(model.parameters(), lr=0.1), "float32")
    module = DistributedDataParallel(model)
    return cases.raised(lambda: module(cases.batch(rank).half()).sum().backward())


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["", "static"])
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_call_between_forward_and_backward(pool, num_before, options):
    """The reducer forgets the forward pass: each rank would keep the gradients of its own batch."""
    for (kind, message), reduced in pool.run(between, num_before, options):
        assert kind == "CallOrderError"
        assert "between the forward and the backward pass" in message
        assert "Call it before the forward pass." in message
        # A program may catch it; with static_graph PyTorch needs all of the first pass.
        assert reduced or (options and num_before == 0)


def between(rank: int, num_before: int, options: dict[str, bool]) -> Any:
    module = DistributedDataParallel(net(FP16), **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(num_before):
        loss_of(module, rank, step).backward()
    loss = loss_of(module, rank, 0)
    master_weights(optimizer, "float32")
    error = cases.raised(loss.backward)
    module.zero_grad()
    loss_of(module, rank, 0).backward()
    return error, are_same_on_all_ranks(module)


@pytest.mark.parametrize("views", [False, True])
def test_master_weights_of_some_parameters(pool: Pool, views: bool) -> None:
    """Each dtype has its own buckets, which are those of the parameters, or all are float32."""
    for (kind, message), reduced in pool.run(of_some, views):
        assert kind == "CallOrderError"
        assert "Call it on all optimizers of the model" in message
        assert reduced


def of_some(rank: int, views: bool) -> Any:
    def halves() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        module = DistributedDataParallel(net(FP16), gradient_as_bucket_view=views)
        params = list(module.parameters())
        return module, [torch.optim.SGD(half, lr=0.1) for half in (params[:4], params[4:])]

    module, optimizers = halves()
    master_weights(optimizers[0], "float32")
    error = cases.raised(loss_of(module, rank, 0).backward)
    module, optimizers = halves()
    for optimizer in optimizers:
        master_weights(optimizer, "float32")
    loss_of(module, rank, 0).backward()
    return error, are_same_on_all_ranks(module)


def test_backward_passes_without_a_reduction_are_no_error(pool: Pool) -> None:
    """In no_sync(), also of the wrapped module alone; a forward pass without gradients beside."""
    assert pool.run(without_reduction) == [[False, True, True]] * 2


def without_reduction(rank: int) -> list[bool]:
    module = DistributedDataParallel(net(FP16))
    master_weights(torch.optim.SGD(module.parameters(), lr=0.1), "float32")
    with module.no_sync():
        loss_of(module.module, rank, 0).backward()
        loss_of(module, rank, 1).backward()
    found = [are_same_on_all_ranks(module)]
    for step in range(2):
        loss = loss_of(module, rank, step)
        with torch.no_grad():
            loss_of(module, rank, step)
        loss.backward()
        found.append(are_same_on_all_ranks(module))
    return found


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = module(cases.batch(rank, step).half()).float().square().mean()
    return loss


def are_same_on_all_ranks(module: nn.Module) -> bool:
    """Return whether the gradients are equal on both ranks."""
    grads = nn.utils.parameters_to_vector(p.grad for p in module.parameters() if p.grad is not None)
    first, second = torch.empty_like(grads), torch.empty_like(grads)
    distributed.all_gather([first, second], grads)
    return torch.equal(first, second)


@pytest.mark.parametrize("form", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_of_dtensors_cannot_be_float32(pool: Pool, form: str, dtype: torch.dtype) -> None:
    for kind, message in pool.run(wrong_use, form, dtype):
        assert kind == "ValueError"
        assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in message
        assert "a DTensor of torch." in message


def wrong_use(rank: int, form: str, dtype: torch.dtype) -> tuple[str, str]:
    module = WRAPPED[form]().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if dtype is FP16:
        return cases.raised(lambda: master_weights(optimizer, "float32"))
    return cases.raised(lambda: master_weights(optimizer, gradients="float32"))
