"""Steps that several ranks decide: who decides, what they tell each other, and what if not."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import cases
from tests.ranks.pool import Pool
from tests.scaler.containers import Bare
from torch import distributed, nn

import halfstep

WORLD = "all"


def scaler(group: str | None = None, **options: Any) -> halfstep.GradScaler:
    given = {None: None, WORLD: cases.world(), "local": "local"}[group]
    return halfstep.GradScaler(init_scale=2.0**10, process_group=given, **options)


def made(kind: str, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    module: nn.Module = getattr(cases, kind)()
    kind_of = torch.optim.AdamW if fused else torch.optim.SGD
    return module, kind_of(module.parameters(), lr=0.01, fused=fused)


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def spoil(module: nn.Module) -> None:
    """Make a gradient bad behind the back of PyTorch's counts of writes."""
    local(list(module.parameters())[-2].grad).data.view(-1)[0] = math.inf


def moved(module: nn.Module, step: Callable[[], object]) -> list[bool]:
    """Return which parameters a step changes."""
    before = [local(param).detach().clone() for param in module.parameters()]
    step()
    return [
        not torch.equal(*pair) for pair in zip(before, map(local, module.parameters()), strict=True)
    ]


def whole_step(rank: int, module: nn.Module, optimizer: Any, books: halfstep.GradScaler) -> None:
    optimizer.zero_grad()
    cases.backward(books, module, cases.batch(rank))
    books.step(optimizer)
    books.update()


def reason_of(books: halfstep.GradScaler, optimizer: Any) -> str | None:
    reason = books.outcome(optimizer).reason
    return reason and reason.value


# --- one step -------------------------------------------------------------------------------------


def step_with_inf_on_rank_1(rank: int, kind: str, group: str | None, fused: bool) -> Any:
    module, optimizer = made(kind, fused)
    books = scaler(group)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        cases.backward(books, module, cases.batch(rank if kind != "tensor_parallel" else 0, step))
        if step == 1 and rank == 1:
            spoil(module)
        with cases.counted() as collectives:
            books.step(optimizer)
        books.update()
        outcome, reason = books.outcome(optimizer), reason_of(books, optimizer)
        seen.append((outcome.taken, reason, outcome.rank, outcome.scale_after, len(collectives)))
        if step == 1:
            culprits = outcome.culprits
    return seen, culprits


@pytest.mark.parametrize(
    ("kind", "group", "fused"),
    [
        ("fsdp2", None, False),
        ("fsdp2", None, True),
        ("tensor_parallel", None, False),  # PyTorch steps DTensors and others not fused only
        ("model", WORLD, False),
        ("model", WORLD, True),
        ("ddp", WORLD, False),
    ],
)
def test_an_inf_on_one_rank_is_skipped_on_all(pool, kind, group, fused):
    first, second = pool.run(step_with_inf_on_rank_1, kind, group, fused)
    assert first[0] == second[0]
    skipped = (False, "overflow", 1, 512.0)
    steps = [(True, None, None, 1024.0), skipped, (True, None, None, 512.0)]
    assert [entry[:4] for entry in first[0]] == steps
    assert first[1] == []
    assert len(second[1]) == 1


def step_written_to_on_rank_1(rank: int, kind: str, group: str | None, fused: bool) -> Any:
    module, optimizer = made(kind, fused)
    books = scaler(group)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        cases.backward(books, module, cases.batch(rank, step))
        books.unscale_(optimizer)
        if step == 1 and rank == 1:
            spoil(module)
        with cases.counted() as collectives:
            books.step(optimizer)
        books.update()
        outcome, reason = books.outcome(optimizer), reason_of(books, optimizer)
        seen.append((reason, outcome.rank, outcome.scale_after, len(collectives)))
    is_finite = all(bool(local(param).isfinite().all()) for param in module.parameters())
    return seen, is_finite, books.counts().skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "group"), [("fsdp2", None), ("model", WORLD), ("ddp", WORLD)])
def test_what_went_bad_on_one_rank_after_unscaling_is_skipped_on_all(pool, kind, group, fused):
    first, second = pool.run(step_written_to_on_rank_1, kind, group, fused)
    taken = (None, None, 1024.0, 1)
    steps = [taken, ("non-finite after unscale_", 1, 1024.0, 1), taken]
    assert first == second == (steps, True, 1)


def summed_by_hand_on_rank_0(rank: int) -> Any:
    """A sum over ranks bumps no version, and rank 1 has added inf to it."""
    module = cases.model()
    optimizer = cases.sgd(module)
    books = scaler("local")
    cases.backward(books, module, cases.batch(rank))
    books.unscale_(optimizer)
    for param in module.parameters():
        if rank == 1:
            param.grad.view(-1)[0] = math.inf
        distributed.all_reduce(param.grad)
    books.step(optimizer)
    books.update()
    return reason_of(books, optimizer), books.get_scale()


def test_sums_over_ranks_by_hand_are_checked(pool: Pool) -> None:
    assert pool.run(summed_by_hand_on_rank_0) == [("non-finite after unscale_", 1024.0)] * 2


def containers_with_inf_on_rank_1(rank: int, kind: str, group: str | None) -> Any:
    """The bad gradient is one of the last optimizer."""
    module: nn.Module = getattr(cases, kind)()
    params = list(module.parameters())
    parts = [torch.optim.SGD(params[:3], lr=0.01, momentum=0.9), torch.optim.AdamW(params[3:])]
    container: Any = Bare(parts)
    books = scaler(group)
    seen = []
    for step in range(5):
        container.zero_grad()
        cases.backward(books, module, cases.batch(rank, step))
        if step == 1 and rank == 1:
            spoil(module)
        with cases.counted() as collectives:
            is_moved = moved(module, lambda: books.step(container))
        books.update()
        outcome = books.outcome(parts[0])
        seen.append((outcome.taken, outcome.rank, all(is_moved), any(is_moved)))
    return seen, len(collectives)


@pytest.mark.parametrize(("kind", "group"), [("fsdp2", None), ("model", WORLD)])
def test_a_container_of_optimizers_is_one_decision(pool, kind, group):
    taken, skipped = (True, None, True, True), (False, 1, False, False)
    for seen, collectives in pool.run(containers_with_inf_on_rank_1, kind, group):
        assert seen == [taken, skipped, taken, taken, taken]
        assert collectives == 1  # as for one optimizer, after the first, which are measured


def guarded_with_inf_on_rank_1(rank: int, kind: str, group: str | None, fused: bool) -> Any:
    module, optimizer = made(kind, fused)
    given = None if group is None else cases.world()
    guard = halfstep.guard(
        optimizer, math.inf, on_skips=lambda report: None, module=module, process_group=given
    )
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        module(cases.batch(rank, step)).sum().backward()
        if step == 1 and rank == 1:
            spoil(module)
        is_moved = any(moved(module, optimizer.step))
        seen.append((guard.outcome().taken, guard.outcome().rank, is_moved))
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "group"), [("fsdp2", None), ("model", WORLD), ("ddp", WORLD)])
def test_guards_of_all_ranks_agree(pool: Pool, kind: str, group: str | None, fused: bool) -> None:
    for seen in pool.run(guarded_with_inf_on_rank_1, kind, group, fused):
        assert seen == [(True, None, True), (False, 1, False), (True, None, True)]


def guarded_without_gradients_on_rank_1(rank: int) -> Any:
    module = cases.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    guard = halfstep.guard(optimizer, on_skips=lambda report: None, process_group=cases.world())
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        if (step, rank) != (1, 1):
            factor = math.inf if (step, rank) == (1, 0) else 1.0
            (module(cases.batch(rank, step)).sum() * factor).backward()
        optimizer.step()
        seen.append(guard.outcome().taken)
    return seen


def test_a_guard_without_gradients_decides_with_the_others(pool: Pool) -> None:
    assert pool.run(guarded_without_gradients_on_rank_1) == [[True, False, True]] * 2


def test_a_guard_of_which_no_rank_has_a_gradient_is_told_so(pool: Pool) -> None:
    for kind, message in pool.run(guarded_without_gradients):
        assert kind == "CallOrderError"
        assert "no rank has a gradient. Call backward() before it" in message


def guarded_without_gradients(rank: int) -> tuple[str, str]:
    optimizer = cases.sgd(cases.model())
    halfstep.guard(optimizer, process_group=cases.world())
    return cases.raised(optimizer.step)


def test_a_step_is_one_small_collective_and_none_under_ddp(pool: Pool) -> None:
    # The second of a step after unscale_: a rank may have written to what was unscaled.
    with_group = [["max"], ["max", "max"], ["sum", "max"]]
    found = [with_group, [[], [], []], with_group]
    assert pool.run(collectives_of_steps) == [found] * 2


def collectives_of_steps(rank: int) -> Any:
    found: list[list[list[str]]] = []
    for kind, group in [("fsdp2", None), ("ddp", None), ("ddp", WORLD)]:
        module, optimizer = made(kind, False)
        books = scaler(group)
        found.append([])
        for step in range(6):
            optimizer.zero_grad()
            cases.backward(books, module, cases.batch(rank, step))
            with cases.counted() as collectives:
                if step == 4:
                    books.unscale_(optimizer)
                books.step(optimizer, max_norm=1.0 if step == 5 else None)
            books.update()
            assert sum(size for _, size in collectives) <= 128
            if step >= 3:  # the first three are measured, to notice gradients clipped too early
                found[-1].append([op for op, _ in collectives])
    return found


def test_after_a_non_finite_loss_on_one_rank_the_scale_is_back_on_all(pool: Pool) -> None:
    told, untold = (pool.run(bad_loss_on_rank_1, group) for group in (WORLD, None))
    assert told == [("loss", [512.0, 1024.0, 1024.0])] * 2
    # DDP: nobody tells the others of a loss.
    assert untold == [("overflow", [512.0, 512.0, 512.0])] * 2


def bad_loss_on_rank_1(rank: int, group: str | None) -> Any:
    module = cases.ddp()
    optimizer, books = cases.sgd(module), scaler(group)
    reasons, scales = list[str | None](), []
    for factor in (math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        cases.backward(books, module, cases.batch(rank) * (factor if rank == 1 else 1.0))
        books.step(optimizer)
        books.update()
        reasons.append(reason_of(books, optimizer))
        scales.append(books.get_scale())
    return reasons[0], scales


def test_a_loss_after_the_last_look_counts_on_no_rank(pool: Pool) -> None:
    assert pool.run(late_bad_loss) == [512.0] * 2


def late_bad_loss(rank: int) -> float:
    module = cases.fsdp2()
    optimizer, books = cases.sgd(module), scaler()
    cases.backward(books, module, cases.batch(0))
    for param in module.parameters():
        if rank == 0 and param.grad is not None:
            param.grad.fill_(math.inf)
    books.step(optimizer)
    if rank == 1:
        books.scale(torch.tensor(math.inf))
    books.scale(torch.tensor(1.0))
    books.update()
    return books.get_scale()


# --- ranks without something ----------------------------------------------------------------------


def test_a_rank_without_loss_or_gradients_takes_part(pool: Pool) -> None:
    first, second = pool.run(nothing_on_rank_0)
    assert first == second == [(True, 1024.0), (False, 512.0), (True, 512.0)]


def nothing_on_rank_0(rank: int) -> Any:
    module = cases.model()
    optimizer, books = cases.sgd(module), scaler(WORLD)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        if rank == 1:
            x = cases.batch(rank, step)
            cases.backward(books, module, x)
            if step == 1:
                next(module.parameters()).grad.fill_(math.nan)
        if step == 2:
            books.unscale_(optimizer)
        books.step(optimizer, max_norm=1.0)
        books.update()
        seen.append((books.outcome(optimizer).taken, books.get_scale()))
    return seen


@pytest.mark.parametrize("what", ["gradients", "scale"])
def test_what_no_rank_has_is_an_error_on_all(pool: Pool, what: str) -> None:
    told = "no rank has a gradient" if what == "gradients" else "no rank has scaled"
    for kind, message in pool.run(step_without, what):
        assert kind == "CallOrderError"
        assert told in message


def step_without(rank: int, what: str) -> tuple[str, str]:
    module = cases.fsdp2()
    optimizer, books = cases.sgd(module), scaler()
    if what == "gradients":
        books.scale(torch.ones(()))
    else:
        module(cases.batch(rank)).sum().backward()
    return cases.raised(lambda: books.step(optimizer))


def test_an_optimizer_without_parameters_needs_a_group(pool: Pool) -> None:
    assert pool.run(stage_without_parameters) == [(True, 1024.0)] * 2


def stage_without_parameters(rank: int) -> Any:
    module = cases.model()
    params = list(module.parameters()) if rank == 1 else []
    optimizer = torch.optim.SGD([{"params": params}], lr=0.1)
    books = scaler(WORLD)
    if rank == 1:
        cases.backward(books, module, cases.batch(0))
    books.step(optimizer)
    books.update()
    return books.outcome(optimizer).taken, books.get_scale()


# --- who decides ----------------------------------------------------------------------------------


def test_what_cannot_be_known_is_an_error_with_its_cure(pool: Pool) -> None:
    for found in pool.run(unknown_groups):
        guarded = found.pop("guarded")
        assert "halfstep.guard takes it too" in guarded[1]
        assert "which scale" not in guarded[1]
        for name, (kind, message) in found.items():
            assert kind == "RanksError", name
            assert "GradScaler(process_group=torch.distributed.group.WORLD)" in message
        assert "6 of its 6 parameters are neither DTensors nor in a Distr" in found["plain"][1]
        assert "1 of its 6 parameters" in found["left out"][1]
        assert "has only some of the ranks" in found["part"][1]
        assert "spread over rank" in found["mesh"][1]


def unknown_groups(rank: int) -> Any:
    def step(module: nn.Module) -> tuple[str, str]:
        books = scaler()
        cases.backward(books, module, cases.batch(rank))
        return cases.raised(lambda: books.step(cases.sgd(module)))

    def guarded(module: nn.Module) -> tuple[str, str]:
        optimizer = cases.sgd(module)
        halfstep.guard(optimizer)
        module(cases.batch(rank)).sum().backward()
        return cases.raised(optimizer.step)

    found = {"plain": step(cases.model()), "guarded": guarded(cases.model())}
    left_out = cases.model()
    left_out._ddp_params_and_buffers_to_ignore = ["0.weight"]
    found["left out"] = step(cases.ddp(left_out))
    groups = [distributed.new_group([each]) for each in range(2)]
    part = nn.parallel.DistributedDataParallel(cases.model(), process_group=groups[rank])
    found["part"] = step(part)
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))
    found["mesh"] = step(fully_shard(cases.model(), mesh=mesh["shard"]))
    return found


def test_given_groups(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(given_groups)):
        assert found["local"] == (rank == 0)
        assert found["mesh"] is False
        assert found["wrong"][0] == "TypeError"
        assert found["too small"][0] == "RanksError"
        assert "was created for only" in found["too small"][1]
        # A first step is measured, and asks whether a rank has written to what was unscaled.
        assert found["hook"] == ["sum", "max", "max"]


def given_groups(rank: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    mesh = distributed.init_device_mesh("cpu", (2,))

    def takes(books: halfstep.GradScaler) -> bool:
        module = cases.model()
        optimizer = cases.sgd(module)
        cases.backward(books, module, cases.batch(rank))
        if rank == 1:
            next(module.parameters()).grad.fill_(math.inf)
        books.step(optimizer)
        books.update()
        return books.outcome(optimizer).taken

    def step(books: halfstep.GradScaler) -> None:
        module = cases.fsdp2()
        cases.backward(books, module, cases.batch(rank))
        books.step(cases.sgd(module))

    groups = [distributed.new_group([each]) for each in range(2)]
    hooked = cases.ddp()
    hooked.register_comm_hook(cases.world(), default_hooks.allreduce_hook)
    books, optimizer = scaler(), cases.sgd(hooked)
    cases.backward(books, hooked, cases.batch(rank))
    with cases.counted() as collectives:
        books.unscale_(optimizer)
        books.step(optimizer)
    return {
        "local": takes(scaler("local")),
        "mesh": takes(halfstep.GradScaler(process_group=mesh)),
        "wrong": cases.raised(lambda: halfstep.GradScaler(process_group="world")),
        "too small": cases.raised(lambda: step(halfstep.GradScaler(process_group=groups[rank]))),
        "hook": [op for op, _ in collectives],
    }


# --- drift, and ranks that do not answer ----------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_drift_is_told_on_all_ranks_with_what_each_has(pool: Pool, fused: bool) -> None:
    for rank, (kind, message, cured, weight_moved) in enumerate(pool.run(drift, fused)):
        assert kind == "RanksError"
        own = f"rank {rank}: scale 2^{6 if rank else 10}, growth tracker 1, 1 step taken, 0 skipped"
        assert own in message
        assert "the least numbers of all ranks: scale 2^6, growth tracker 1, 1 step" in message
        assert "the largest: scale 2^10, growth tracker 1, 1 step taken" in message
        assert not weight_moved
        assert cured == ("", "")


def drift(rank: int, fused: bool) -> Any:
    module = cases.fsdp2()
    books = scaler()
    step = partial(
        whole_step, rank, module, torch.optim.AdamW(module.parameters(), fused=fused), books
    )
    step()
    saved = books.state_dict()
    if rank == 1:
        books.update(new_scale=64.0)
    told: list[str] = []
    is_moved = moved(module, lambda: told.extend(cases.raised(step)))
    books.update(new_scale=1024.0)
    books.load_state_dict(saved)
    return *told, cases.raised(step), any(is_moved)


def test_no_answer_is_an_error_that_names_the_call(pool: Pool, tmp_path: Path) -> None:
    waiting, _ = pool.run(step_on_rank_0_only, tmp_path / "end", group_timeout=2.0)
    kind, message = waiting
    assert kind == "RanksError"
    assert message.startswith("step(SGD): ")
    assert "rank 0 waited for rank 1, and" in message
    assert "has died, hangs, or has not made this call" in message


def wait_for(file: Path) -> None:
    while not file.exists():  # the pool ends a rank that waits too long
        time.sleep(0.02)


def step_on_rank_0_only(rank: int, end: Path) -> Any:
    module = cases.model()
    books = scaler(WORLD)
    cases.backward(books, module, cases.batch(rank))
    if rank == 1:
        return wait_for(end)
    raised = cases.raised(lambda: books.step(cases.sgd(module)))
    end.touch()
    return raised


def test_a_copy_decides_anew(pool: Pool) -> None:
    assert pool.run(copied) == ["RanksError"] * 2


def copied(rank: int) -> Any:
    books = copy.deepcopy(scaler(WORLD))
    module = cases.model()
    cases.backward(books, module, cases.batch(rank))
    return cases.raised(lambda: books.step(cases.sgd(module)))[0]


def test_skips_in_a_row_name_the_rank(pool: Pool) -> None:
    for told in pool.run(skips_in_a_row):
        assert "the first rank with inf or NaN is 1" in told


def skips_in_a_row(rank: int) -> str:
    module = cases.fsdp2()
    optimizer, books = cases.sgd(module), scaler(max_consecutive_skips=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2):
            optimizer.zero_grad()
            cases.backward(books, module, cases.batch(rank, step))
            if rank == 1:
                next(module.parameters()).grad.to_local().fill_(math.inf)
            books.step(optimizer)
            books.update()
    return str(told[-1].message)


# --- ranks that do not all have the same to do ----------------------------------------------------


def every_use_without_gradients_on_rank_1(rank: int) -> Any:
    shared = cases.model()
    has = rank == 0

    def backward(books: halfstep.GradScaler, module: nn.Module) -> None:
        if has:
            cases.backward(books, module, cases.batch(0))
        else:
            books.scale(torch.ones(()))

    def clip_in_step(books: halfstep.GradScaler, module: nn.Module) -> None:
        backward(books, module)
        books.step(cases.sgd(module), max_norm=1.0)

    def unscale_then_clip(books: halfstep.GradScaler, module: nn.Module) -> None:
        backward(books, module)
        books.unscale_(optimizer := cases.sgd(module))
        books.step(optimizer, max_norm=1.0)

    def shared_parameters(books: halfstep.GradScaler, module: nn.Module) -> None:
        first, second = cases.sgd(module), cases.sgd(module)
        backward(books, module)
        books.step(first)
        books.step(second)

    found = {}
    for use in (clip_in_step, unscale_then_clip, shared_parameters):
        books = scaler(WORLD)
        for _ in range(2):
            shared.zero_grad()
            use(books, shared)
            books.update()
        found[use.__name__] = (books.counts().taken, books.get_scale())
    return found


def test_every_use_with_gradients_on_one_rank_only(pool: Pool) -> None:
    first, second = pool.run(every_use_without_gradients_on_rank_1)
    assert first == second
    assert set(first.values()) == {(2, 1024.0)}


def losses_between_looks(rank: int, kind: str, group: str | None) -> Any:
    """A bad loss on rank 1 that comes after the first of two optimizers was looked at."""
    modules = [getattr(cases, kind)() for _ in range(2)]
    optimizers = [cases.sgd(module) for module in modules]
    books = scaler(group)
    cases.backward(books, modules[0], cases.batch(rank))
    books.unscale_(optimizers[0])
    x = cases.batch(rank) * (math.inf if rank == 1 else 1.0)
    cases.backward(books, modules[1], x)
    books.unscale_(optimizers[1])
    for optimizer in reversed(optimizers):
        books.step(optimizer)
    books.update()
    return [reason_of(books, optimizer) for optimizer in optimizers], books.get_scale()


def test_the_reason_is_the_same_on_all_ranks(pool: Pool) -> None:
    assert pool.run(losses_between_looks, "ddp", None) == [([None, "overflow"], 512.0)] * 2
    assert pool.run(losses_between_looks, "fsdp2", None) == [([None, "loss"], 512.0)] * 2


def goes_on_after_errors(rank: int) -> Any:
    module = cases.fsdp2()
    optimizer, books = cases.sgd(module), scaler()
    step = partial(whole_step, rank, module, optimizer, books)
    step()
    saved = books.state_dict()
    optimizer.zero_grad()
    books.scale(torch.ones(()))
    found = [cases.raised(lambda: books.step(optimizer))[0], cases.raised(step)[0]]
    if rank == 1:
        books.update(new_scale=64.0)
    found.append(cases.raised(step)[0])
    books.load_state_dict(saved)
    return [*found, cases.raised(step)[0], books.counts().taken]


def test_all_go_on_after_an_error_of_all(pool: Pool) -> None:
    assert pool.run(goes_on_after_errors) == [["CallOrderError", "", "RanksError", "", 2]] * 2


def asks_again_after_no_answer(rank: int, end: Path) -> Any:
    if rank == 1:
        return wait_for(end)
    module = cases.model()
    optimizer, books = cases.sgd(module), scaler(WORLD)
    cases.backward(books, module, cases.batch(0))
    first = cases.raised(lambda: books.unscale_(optimizer) or books.step(optimizer))
    second = cases.raised(lambda: books.step(optimizer))
    end.touch()
    return first[0], second[0]


def test_nothing_is_decided_alone_after_no_answer(pool: Pool, tmp_path: Path) -> None:
    first, _ = pool.run(asks_again_after_no_answer, tmp_path / "end", group_timeout=1.0)
    assert first[0] == "RanksError"
    assert first[1] in ("RanksError", "CallOrderError")
