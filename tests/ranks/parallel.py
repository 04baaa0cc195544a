"""The parallel forms of the run of training.py: each makes one rank's ``Job``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.training import IN, NUM_SAMPLES, WIDTH, Block, Job, Net, Plan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import halfstep

NUM_MICROBATCHES = 4


def ddp(rank: int, plan: Plan) -> Job:
    net = Net(plan.seed)
    return _data_parallel(net, DistributedDataParallel(net), rank, dist.get_world_size())


def fsdp(rank: int, plan: Plan) -> Job:
    return _fsdp(rank, plan, init_device_mesh("cpu", (dist.get_world_size(),)), OffloadPolicy())


def fsdp_offloaded(rank: int, plan: Plan) -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _fsdp(rank, plan, mesh, CPUOffloadPolicy(pin_memory=False))


def hsdp(rank: int, plan: Plan, num_replicas: int) -> Job:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return _fsdp(rank, plan, mesh, OffloadPolicy())


def tensor_parallel(rank: int, plan: Plan) -> Job:
    """Linear layers of the blocks are sharded; all else is plain and the same on all ranks."""
    net = _tensor_parallel(Net(plan.seed), init_device_mesh("cpu", (dist.get_world_size(),)))
    return _data_parallel(net, net, 0, 1)


def fsdp_and_tensor_parallel(rank: int, plan: Plan, num_data: int) -> Job:
    shape = (num_data, dist.get_world_size() // num_data)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    net = _tensor_parallel(Net(plan.seed), mesh["tensor"])
    _shard(net, mesh=mesh["data"])
    return _data_parallel(net, net, mesh["data"].get_local_rank(), num_data)


def _fsdp(rank: int, plan: Plan, mesh: DeviceMesh, offload: OffloadPolicy) -> Job:
    net = Net(plan.seed)
    _shard(net, mesh=mesh, offload_policy=offload)
    return _data_parallel(net, net, rank, mesh.size())


def _shard(net: Net, **arguments: Any) -> None:
    """Each block is a group of its own, the first and the last layer are one."""
    for layer in net.children():
        if isinstance(layer, Block):
            fully_shard(layer, **arguments)
    fully_shard(net, **arguments)


def _tensor_parallel(net: Net, mesh: DeviceMesh) -> Net:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in (net.left, net.right):
        parallelize_module(block, mesh, plan)
    return net


def _data_parallel(net: Net, model: nn.Module, rank: int, num_parts: int) -> Job:
    """The model itself averages the gradients of the parts of the batch."""

    def backward(scaler: halfstep.GradScaler, step: int, x: Tensor, y: Tensor) -> None:
        mine = model(x.chunk(num_parts)[rank])
        scaler.scale(F.mse_loss(mine, y.chunk(num_parts)[rank])).backward()

    return Job(dict(net.named_parameters()), backward, lambda on: setattr(net, "poisoned", on))


def stages_by_hand(rank: int, plan: Plan) -> Job:
    """One micro-batch; activations go up and gradients come down."""
    net, last = _layers_of_stage(plan, rank, dist.get_world_size()), dist.get_world_size() - 1

    def backward(scaler: halfstep.GradScaler, step: int, x: Tensor, y: Tensor) -> None:
        if rank > 0:
            x = torch.empty(NUM_SAMPLES, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = net(x)
        if rank == last:
            scaler.scale(F.mse_loss(out, y)).backward()
        else:
            dist.send(out.detach(), rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)

    return _pipeline_job(net, backward)


def gpipe(rank: int, plan: Plan) -> Job:
    count = dist.get_world_size()
    net = _layers_of_stage(plan, rank, count)
    shapes: dict[str, Any] = {}
    # Told, not found by a first pass over memory that nobody has written, as in the others.
    rows = NUM_SAMPLES // NUM_MICROBATCHES
    shapes["input_args"] = torch.zeros(rows, WIDTH if rank else IN, requires_grad=rank > 0)
    shapes["output_args"] = net(shapes["input_args"])
    stage = PipelineStage(net, rank, count, torch.device("cpu"), **shapes)
    return _scheduled(net, stage, ScheduleGPipe)


def one_forward_one_backward(rank: int, plan: Plan) -> Job:
    count = dist.get_world_size()
    net = _layers_of_stage(plan, rank, count)
    return _scheduled(net, PipelineStage(net, rank, count, torch.device("cpu")), Schedule1F1B)


def pipeline_of_fsdp(rank: int, plan: Plan, num_stages: int) -> Job:
    """The ranks of a stage shard its layers and share the batch."""
    shape = (num_stages, dist.get_world_size() // num_stages)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "data"))
    number = mesh["stage"].get_local_rank()
    net = _layers_of_stage(plan, number, num_stages)
    _shard(net, mesh=mesh["data"])
    stage = PipelineStage(
        net, number, num_stages, torch.device("cpu"), group=mesh["stage"].get_group()
    )
    return _scheduled(net, stage, Schedule1F1B, mesh["data"])


def _layers_of_stage(plan: Plan, number: int, num_stages: int) -> Net:
    each = len(Net.NAMES) // num_stages
    return Net(plan.seed, Net.NAMES[number * each : (number + 1) * each])


def _scheduled(
    net: Net,
    stage: PipelineStage,
    kind: type[ScheduleGPipe | Schedule1F1B],
    data: DeviceMesh | None = None,
) -> Job:
    scalers: list[halfstep.GradScaler] = []

    def scaled_loss(out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = scalers[0].scale(F.mse_loss(out, target))
        return loss

    schedule = kind(stage, NUM_MICROBATCHES, loss_fn=scaled_loss)

    def backward(scaler: halfstep.GradScaler, step: int, x: Tensor, y: Tensor) -> None:
        scalers[:] = [scaler]
        if data is not None:
            x, y = (each.chunk(data.size())[data.get_local_rank()] for each in (x, y))
        target = {"target": y} if stage.is_last else {}
        schedule.step(*([x] if stage.is_first else []), **target)

    return _pipeline_job(net, backward)


def _pipeline_job(net: Net, backward: Callable[..., None]) -> Job:
    return Job(
        dict(net.named_parameters()),
        backward,
        lambda on: setattr(net, "poisoned", on),
        process_group=dist.group.WORLD,
    )


class Experts(nn.Module):
    """An expert for each part of the batch, below layers that all share."""

    def __init__(self, seed: int, here: range, num_experts: int) -> None:
        super().__init__()
        self.shared = Net(seed)
        made = [nn.Linear(IN, IN) for _ in range(num_experts)]
        self.experts = nn.ModuleDict({str(number): made[number] for number in here})
        self.num_experts = num_experts

    def loss(self, number: int, step: int, x: Tensor, y: Tensor) -> Tensor:
        """Return the share of this expert's part of the batch in the mean over all samples."""
        x, y = x.chunk(self.num_experts)[number], y.chunk(self.num_experts)[number]
        # In every fourth step the last expert has nothing to do and gets no gradient.
        if step % 4 != 3 or number < self.num_experts - 1:
            x = x + self.experts[str(number)](x)
        return F.mse_loss(self.shared(x), y) / self.num_experts


def experts(rank: int, plan: Plan) -> Job:
    """Each rank has its expert, plain and its own, beside plain copies of all other layers."""
    net = Experts(plan.seed, range(rank, rank + 1), dist.get_world_size())
    shared = list(net.shared.parameters())

    def backward(scaler: halfstep.GradScaler, step: int, x: Tensor, y: Tensor) -> None:
        scaler.scale(net.loss(rank, step, x, y)).backward()
        for parameter in shared:
            dist.all_reduce(parameter.grad)

    return Job(
        dict(net.named_parameters()),
        backward,
        lambda on: setattr(net.shared, "poisoned", on),
        lambda scaler: scaler.replicated(shared, dist.group.WORLD),
        process_group=dist.group.WORLD,
    )


def experts_alone(plan: Plan, num_experts: int) -> Job:
    """The reference: all experts in one process."""
    net = Experts(plan.seed, range(num_experts), num_experts)

    def backward(scaler: halfstep.GradScaler, step: int, x: Tensor, y: Tensor) -> None:
        for number in range(num_experts):
            scaler.scale(net.loss(number, step, x, y)).backward()

    return Job(
        dict(net.named_parameters()), backward, lambda on: setattr(net.shared, "poisoned", on)
    )
