"""Training loops of many kinds, each a function that returns its modules; batches 3 and 6 are bad.

Each notes its losses in ``LOSSES``.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8
BAD = {3: 1e6, 6: float("nan")}
LOSSES: list[str] = []


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8) * BAD.get(step, 1.0), torch.randn(4, 2)


def net(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *inner, nn.Linear(16, 2))


def see(loss: Tensor) -> None:
    LOSSES.append(loss.detach().double().item().hex())


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step, and stay finite without a scaler too."""
    for param in model.parameters():
        assert param.grad is not None
        param.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
    optimizer.step()
    optimizer.zero_grad()


def plain() -> nn.Module:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        see(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def overflowing() -> nn.Module:
    """Its gradients overflow at the first scales, and some become NaN: inf - inf."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        x, y = batch(step)
        loss = 100 * F.mse_loss(model(x), y, reduction="sum")
        see(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def clipped() -> nn.Module:
    model = net(nn.Dropout(0.5), nn.BatchNorm1d(16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        see(loss)
        loss.backward()
        see(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        take(model, optimizer)
    return model


def accumulated() -> nn.Module:
    model = net(nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for part in range(2):
            x, y = batch(step if part else -1)
            loss = F.mse_loss(model(x), y) / 2
            see(loss)
            loss.backward()
        take(model, optimizer)
    return model


def scheduled() -> nn.Module:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        see(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        LOSSES.append(str(schedule.get_last_lr()))
    return model


def lbfgs() -> nn.Module:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(3, 6):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            see(loss)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def two_optimizers() -> nn.Module:
    generator, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.Adam(judge.parameters(), lr=0.01)
    for step in range(STEPS):
        fake = generator(torch.randn(4, 4))
        for optimizer, x in ((second, batch(step)[0]), (second, fake.detach()), (first, fake)):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(judge(x), torch.ones(4, 1))
            see(loss)
            loss.backward()
            optimizer.step()
    return nn.ModuleList([generator, judge])


def loader() -> nn.Module:
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 2, (24,)))
    data.tensors[0][5] = float("nan")
    model, criterion = net(nn.BatchNorm1d(16)), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            loss = criterion(model.train()(x), y)
            see(loss)
            loss.backward()
            take(model, optimizer)
        with torch.no_grad():
            see(criterion(model.eval()(data.tensors[0][:4]), data.tensors[1][:4]))
    return model


class Counting(nn.Module):
    """Computes with all that Python holds: nested containers, an object, an array, generators."""

    class Meter:
        def __init__(self) -> None:
            self.count, self.seen = 0, [0]

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.meter, self.array = nn.Linear(8, 2), self.Meter(), np.zeros(2)
        self.book: dict[str, list[dict[str, int]]] = {"all": [{"count": 0}]}
        self.random, self.numpy = random.Random(1), np.random.default_rng(1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.book["all"][0]["count"] += 1
        self.meter.count += 1
        self.meter.seen.append(self.meter.count)
        self.array += 1
        y = self.linear(x) * (1 + 0.01 * self.random.random() * self.numpy.random())
        self.mean.lerp_(y.detach().float().nan_to_num(0, 0, 0).mean(0), 0.1)
        counts = self.book["all"][0]["count"], len(self.meter.seen), float(self.array[0])
        return y * (1 + 0.01 * sum(counts)) + random.random() * np.random.rand()


def counting() -> nn.Module:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        see(loss)
        loss.backward()
        take(model, optimizer)
    return model


def recomputed() -> nn.Module:
    first, second = net(nn.Dropout(0.5)), nn.Linear(2, 2)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        out = checkpoint(first, x.requires_grad_(), use_reentrant=step % 2 == 0)
        loss = F.mse_loss(second(out), y)
        see(loss)
        loss.backward()
        take(model, optimizer)
    return model


def step_in_backward() -> nn.Module:
    """The first batch is bad: the optimizers have no state yet when it is replayed."""
    model = net()
    optimizers = {param: torch.optim.Adam([param], lr=0.01) for param in model.parameters()}

    def step_one(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.nan_to_num_(0, 0, 0)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_one)
    for step in range(3, STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        see(loss)
        loss.backward()
    return model


def scripted() -> nn.Module:
    """A module of torch.jit, with no dictionary of buffers."""
    model = torch.jit.trace(net(nn.BatchNorm1d(16)), torch.randn(4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        see(loss)
        loss.backward()
        take(model, optimizer)
    return model


def bfloat16_by_hand() -> nn.Module:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        see(loss)
        loss.backward()
        take(model, optimizer)
    return model


def own_scaler() -> nn.Module:
    model = net(nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        see(loss)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        see(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        LOSSES.append(str(scaler.state_dict()))
    return model


def old_imports() -> nn.Module:
    from torch.cpu.amp import GradScaler, autocast

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler(init_scale=256.0)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with autocast(dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        see(loss)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


PLAIN = (
    *(plain, overflowing, clipped, accumulated, scheduled, lbfgs, two_optimizers, loader, counting),
    *(recomputed, step_in_backward, scripted),
)
"""Those without autocast."""
KINDS = (*PLAIN, bfloat16_by_hand, own_scaler, old_imports)
