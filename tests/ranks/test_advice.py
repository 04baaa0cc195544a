"""What a message tells several ranks to call works in the situation in which it is shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks import cases
from tests.ranks.pool import Pool
from torch import distributed, nn

import halfstep

Tried = tuple[str, list[bool]]
"""The message, and for each call that it advises whether it worked."""


def scaler(group: Any = None, **options: Any) -> halfstep.GradScaler:
    return halfstep.GradScaler(init_scale=2.0**10, process_group=group, **options)


def told(books: halfstep.GradScaler, module: nn.Module) -> str:
    """Return the message of a step that must not work."""
    return cases.raised(lambda: works(books, module))[1]


def works(books: halfstep.GradScaler, module: nn.Module) -> bool:
    """Make a step and return whether it was taken."""
    optimizer = cases.sgd(module)
    loss = module(torch.ones(2, 4)).square().mean()
    books.scale(loss).backward()
    books.step(optimizer)
    books.update()
    return books.outcome(optimizer).taken


def same_state(books: halfstep.GradScaler) -> None:
    """Give all ranks the state of rank 0, as the messages say."""
    state = [books.state_dict()]
    distributed.broadcast_object_list(state)
    books.load_state_dict(state[0])


def uneven(rank: int, module: Any, books: halfstep.GradScaler, more: int = 2, **join: Any) -> int:
    """Train with more batches on rank 1, inside ``join()``; return the number of steps taken."""
    optimizer = cases.sgd(module)
    try:
        with module.join(**join):
            for _ in range(3 + more * rank):
                optimizer.zero_grad()
                cases.backward(books, module, torch.ones(2, 4))
                books.step(optimizer)
                books.update()
    except RuntimeError as error:
        if isinstance(error, halfstep.errors.RanksError) or not join:
            raise
    return books.counts().taken


def a_group_in_join(rank: int, hooks: bool = False) -> Tried:
    module: Any = cases.ddp()
    group = None if hooks else cases.world()
    if hooks:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        module.register_comm_hook(None, default_hooks.allreduce_hook)
    message = cases.raised(lambda: uneven(rank, module, scaler(group)))[1]
    ends = uneven(rank, module, scaler(group), throw_on_early_termination=True)
    alone = uneven(rank, module, scaler("local"))
    even = uneven(rank, module, scaler(group), more=0, throw_on_early_termination=True)
    with module.join():
        pass
    with module.join(enable=False):
        pass
    over = works(scaler(group), module)
    return message, [ends == 3, alone == 3 + 2 * rank, even == 3, over]


def a_hook_in_join(rank: int) -> Tried:
    return a_group_in_join(rank, hooks=True)


def no_group(rank: int) -> Tried:
    module = cases.model()
    message = told(scaler(), module)
    copied = scaler(cases.world())
    copied.replicated(module.parameters(), cases.world())
    mesh = distributed.init_device_mesh("cpu", (2,))
    return message, [
        works(scaler(cases.world()), cases.model(rank)),
        works(scaler("local"), module),
        works(copied, module),
        works(scaler(mesh), cases.model(rank)),
    ]


def a_mesh_of_some_ranks(rank: int) -> Tried:
    from torch.distributed.fsdp import fully_shard

    meshes = [distributed.DeviceMesh("cpu", [each]) for each in range(2)]
    module = cases.model()
    fully_shard(module, mesh=meshes[rank])
    message = told(scaler(), module)
    return message, [
        works(scaler(meshes[rank]), module),
        works(scaler(meshes[rank].get_group()), module),
        works(scaler(cases.world()), module),
        works(scaler("local"), module),
    ]


def a_group_of_too_few(rank: int) -> Tried:
    groups = [distributed.new_group([each]) for each in range(2)]
    module = cases.fsdp2()
    message = told(scaler(groups[rank]), module)
    return message, [works(scaler(cases.world()), module)]


def scales_that_differ(rank: int) -> Tried:
    module, books = cases.ddp(), scaler(cases.world())
    books.update(2.0 ** (8 + rank))
    message = told(books, module)
    books.update(2.0**8)
    found = [works(books, module)]
    books.load_state_dict(books.state_dict() | {"_growth_tracker": 3 + rank})
    assert "disagree on the scale" in told(books, module)
    same_state(books)
    return message, [*found, works(books, module)]


def nothing_to_step_with(rank: int) -> Tried:
    module, books = cases.ddp(), scaler(cases.world())
    optimizer = cases.sgd(module)
    message = cases.raised(lambda: books.step(optimizer))[1]
    books.scale(torch.ones(()))
    assert "no rank has a gradient" in cases.raised(lambda: books.step(optimizer))[1]
    return message, [works(books, module)]


def a_backward_pass_that_is_late(rank: int) -> Tried:
    module, books = cases.model(rank), scaler(cases.world())
    optimizer = cases.sgd(module)
    cases.backward(books, module, torch.ones(2, 4))
    books.unscale_(optimizer)
    cases.backward(books, module, torch.ones(2, 4))
    message = cases.raised(lambda: books.step(optimizer))[1]
    optimizer.zero_grad()
    books.update(new_scale=books.get_scale())
    return message, [works(books, module)]


ADVICE = {
    a_group_in_join: [
        "model.join(throw_on_early_termination=True)",
        "process_group='local'",
        "equally many batches",
        "with model.join(enable=False): pass",
    ],
    a_hook_in_join: [
        "model.join(throw_on_early_termination=True)",
        "process_group='local'",
        "equally many batches",
        "with model.join(enable=False): pass",
    ],
    no_group: [
        "process_group=torch.distributed.group.WORLD",
        "process_group='local'",
        "scaler.replicated(model.parameters(), process_group)",
        "or a DeviceMesh",
    ],
    a_mesh_of_some_ranks: [
        "or a DeviceMesh",
        "another process group",
        "process_group=torch.distributed.group.WORLD",
        "process_group='local'",
    ],
    a_group_of_too_few: ["process_group=torch.distributed.group.WORLD"],
    scales_that_differ: ["update(new_scale=...) with one number", "load_state_dict()"],
    nothing_to_step_with: ["Call scaler.scale(loss).backward() first"],
    a_backward_pass_that_is_late: ["zero_grad() and update(new_scale=scaler.get_scale())"],
}


@pytest.mark.parametrize("situation", ADVICE, ids=lambda each: each.__name__)
def test_advice_works(pool: Pool, situation: Any) -> None:
    for message, worked in pool.run(situation):
        assert [words for words in ADVICE[situation] if words not in message] == []
        assert dict(zip(ADVICE[situation], worked, strict=True)) == dict.fromkeys(
            ADVICE[situation], True
        )
