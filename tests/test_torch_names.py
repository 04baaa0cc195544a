"""Every private name of PyTorch that halfstep uses still does what it is used for.

A failure here names what a new version of PyTorch took away; ``_pytorch/`` is the folder to change.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.utils.checkpoint
from torch import Tensor, nn

from halfstep._pytorch import (
    amp,
    autograd,
    compiler,
    dispatch,
    distributed,
    modes,
    modules,
    optim,
    storages,
)

ATEN = torch.ops.aten
ONES, MATRIX = torch.ones(2), torch.ones(2, 2)
LINEAR, NORM = nn.Linear(2, 2), nn.BatchNorm1d(2)
COMPILED: Any = torch.compile(LINEAR, backend="eager")
COMPILED_IN_PLACE = nn.Linear(2, 2)
COMPILED_IN_PLACE.compile(backend="eager")
CPU = dispatch.autocast_key("cpu")
OFF = torch.autocast("cpu", torch.float16, enabled=False, cache_enabled=False)


def in_inference_mode(call: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return call()


def is_inside(transform: Any, x: Tensor) -> list[float]:
    return transform(lambda x: (x * modes.is_inside_functorch(x)).sum())(x).tolist()  # type: ignore[no-any-return]


# The name, a call, and what it returns.
CALLS: list[tuple[str, Callable[[], Any], Any]] = [
    ("autocast_key", lambda: CPU.name, "AutocastCPU"),
    ("autocast_key", lambda: dispatch.autocast_key("cuda").name, "AutocastCUDA"),
    ("autocast_keys", lambda: dispatch.autocast_keys("cpu").has(CPU), True),
    ("keys_below", lambda: dispatch.keys_below(CPU).has(CPU), False),
    ("aten_overloads", lambda: "int" in dispatch.aten_overloads()["softmax"], True),
    (
        "overloads_with_autocast_kernel",
        lambda: "linear.default" in dispatch.overloads_with_autocast_kernel("cpu"),
        True,
    ),
    ("is_made_of_others", lambda: dispatch.is_made_of_others(ATEN.linear.default, "cpu"), True),
    ("is_made_of_others", lambda: dispatch.is_made_of_others(ATEN.addmm.default, "cpu"), False),
    ("schema_of", lambda: dispatch.schema_of(ATEN.add_.Tensor).name, "aten::add_"),
    ("schema_of", lambda: dispatch.schema_of(ATEN.add_.Tensor).is_mutable, True),
    (
        "schema_of",
        lambda: [argument.name for argument in dispatch.schema_of(ATEN.add_.Tensor).arguments],
        ["self", "other", "alpha"],
    ),
    ("overload_of", lambda: dispatch.overload_of(ATEN.add_.Tensor), "Tensor"),
    ("running_node", autograd.running_node, None),
    ("backward_number", autograd.backward_number, -1),
    ("version_of", lambda: autograd.version_of(torch.ones(1).add_(1)), 1),
    (
        "version_of",
        lambda: in_inference_mode(lambda: autograd.version_of(torch.ones(1).add_(1))),
        0,
    ),
    ("saves_as_always", autograd.saves_as_always, True),
    ("is_inside_functorch", lambda: modes.is_inside_functorch(ONES), False),
    ("is_inside_functorch", lambda: is_inside(torch.func.grad, ONES), [1, 1]),
    ("is_inside_functorch", lambda: is_inside(torch.func.vmap, MATRIX), [2, 2]),
    ("is_exporting", compiler.is_exporting, False),
    ("is_compiled", lambda: compiler.is_compiled(LINEAR), False),
    ("is_compiled", lambda: compiler.is_compiled(COMPILED), True),
    ("is_compiled", lambda: compiler.is_compiled(COMPILED_IN_PLACE), True),
    ("compiled_from", lambda: compiler.compiled_from(LINEAR), None),
    ("compiled_from", lambda: compiler.compiled_from(COMPILED) is LINEAR, True),
    ("NUM_GUARD_VALUES", lambda: compiler.NUM_GUARD_VALUES > 20, True),
    ("switches_of", lambda: amp.switches_of(OFF), ("cpu", torch.float16, False, False)),
    (
        "number_of",
        lambda: len({storages.number_of(x.untyped_storage()) for x in (ONES, ONES[1:], MATRIX)}),
        2,
    ),
    ("plain_parameters_of", lambda: modules.plain_parameters_of(LINEAR), []),
    (
        "registers_of",
        lambda: [list(each) for each in modules.registers_of(nn.Sequential(NORM))],
        [[], [], ["0"]],
    ),
    ("registers_of", lambda: sorted(modules.registers_of(NORM)[0]), ["bias", "weight"]),
    (
        "registers_of",
        lambda: modules.registers_of(NORM)[1]["running_mean"] is NORM.running_mean,
        True,
    ),
    ("is_dtensor", lambda: distributed.is_dtensor(ONES), False),
    ("local_part", lambda: distributed.local_part(ONES) is ONES, True),
    ("in_place_of", lambda: distributed.in_place_of(ONES, MATRIX) is MATRIX, True),
    ("spec_of", lambda: distributed.spec_of(ONES), None),
    ("gathered_dtype", lambda: distributed.gathered_dtype(LINEAR), None),
]


@pytest.mark.parametrize(("name", "call", "expected"), CALLS)
def test_a_call(name: str, call: Callable[[], Any], expected: Any) -> None:
    assert call() == expected


def test_parts_of_the_scaler_of_pytorch() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.tensor([8.0, torch.inf], dtype=torch.float16)
    optimizer = torch.optim.SGD([param], lr=1.0)
    inverse, found = amp.reciprocal_of(torch.tensor(8.0)), torch.zeros(())
    flags = amp.unscale_grads_(None, optimizer, inverse, found, True)
    assert (param.grad[0].item(), flags[torch.device("cpu")].item()) == (1.0, 1.0)
    amp.maybe_opt_step(None, optimizer, {"found_inf_per_device": flags})
    assert torch.equal(param, torch.ones_like(param))
    amp.maybe_opt_step(None, optimizer, {"found_inf_per_device": {}}, None)
    assert param[0] == 0.0


@pytest.mark.usefixtures("one_rank")
def test_ranks_may_end_early_in_join() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    found = [distributed.may_end_early(module)]
    for options in ({}, {"throw_on_early_termination": True}, {}, {"enable": False}):
        with module.join(**options):
            found.append(distributed.may_end_early(module))
    assert found == [False, True, False, True, False]


def test_a_storage_that_is_gone_does_not_give_its_number_away() -> None:
    references = [storages.memory_of(torch.ones(2)) for _ in range(9)]
    assert len({reference.cdata for reference in references}) == 9
    x = torch.ones(2)
    one, other = (storages.memory_of(y) for y in (x, x[1:]))
    assert one.cdata == other.cdata


@pytest.mark.slow
def test_what_a_new_process_finds() -> None:
    """In this one, what torch.utils.checkpoint keeps is wrapped, and torch.compile is imported."""
    code = (
        "import inspect, torch.utils.checkpoint as c\n"
        "from halfstep._pytorch import compiler\n"
        "for f in (c.CheckpointFunction.forward, c._CheckpointFrame.__init__):\n"
        "    print(list(inspect.signature(f).parameters)[1])  # what is run again stands first\n"
        "print(compiler.is_loaded())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["run_function", "recompute_fn", "False"]

    assert (compiler.is_loaded(), compiler.MODULE_OF_CONTEXTS in sys.modules) == (True, True)


MARK = compiler.CompileMark(compiler.numbered_guard(0), "a", backward_off=True)


def test_the_tag_of_the_compile_caches_keeps_what_the_user_wrote() -> None:
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for mark in (MARK, MARK._replace(tag="b")):
            compiler.set_compile_mark(mark)
            assert torch.compiler.config.cache_key_tag == f"mine|halfstep:{mark.tag}"
        compiler.set_compile_mark(None)
        assert torch.compiler.config.cache_key_tag == "mine"


@pytest.mark.parametrize("users", ["same_as_forward", "off", [{"device_type": "cpu"}]])
def test_backward_passes_are_compiled_outside_of_autocast(users: Any) -> None:
    config = torch._functorch.config
    with config.patch(backward_pass_autocast=users):
        compiler.set_compile_mark(MARK)
        assert config.backward_pass_autocast == users if isinstance(users, list) else "off"
        compiler.set_compile_mark(None)
        assert config.backward_pass_autocast == users


def test_switches_come_back() -> None:
    before = amp.autocast_switches("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    amp.set_autocast_switches(before)
    assert amp.autocast_switches("cpu") == before
    devices = amp.autocast_devices()
    assert {"cpu", "cuda", "xpu", "mps"} <= set(devices)
    assert "ipu" not in devices  # that of the guard
    for device in devices:
        assert dispatch.autocast_key(device).name.startswith("Autocast")
    assert {*devices, "mtia", "xla"} <= set(amp.switch_devices())
    assert "ipu" not in amp.switch_devices()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_pytorch_can_register_kernels_where_there_are_ours() -> None:
    op, key = torch.ops.aten.asinh.default, torch._C.DispatchKey.AutocastCPU
    kernels = dispatch.PythonKernels()
    kernels.register(op, key, lambda *_: torch.zeros(()))
    theirs = torch.library.Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]
    theirs.impl(op, lambda x: x + 1, key.name)  # type: ignore[no-untyped-call]
    theirs._destroy()  # type: ignore[no-untyped-call]
    kernels.remove()


def test_optimizers_are_hooked_when_the_first_is_made() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            pass

    assert not optim.is_hooked(Own)
    Own([torch.nn.Parameter(torch.ones(1))])
    assert optim.is_hooked(Own)


def test_the_step_of_an_optimizer_alone() -> None:
    seen = []

    class Own(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen.append("step")

    optimizer = Own([torch.nn.Parameter(torch.ones(1))])
    assert not optim.has_step_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    assert optim.has_step_hooks(optimizer)
    alone = optim.step_without_hooks(optimizer)
    assert alone is not None
    alone()
    optim.with_step_hooks(lambda optimizer: alone())(optimizer)
    assert seen == ["step", "before", "step"]
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    assert optim.step_without_hooks(optimizer) is None


def test_the_code_that_every_backward_pass_begins_in() -> None:
    seen: list[bool] = []

    def look(gradient: torch.Tensor) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code is not autograd.ENGINE_CODE:
            frame = frame.f_back  # type: ignore[assignment]
        seen.append(frame is not None)

    x = torch.ones(2, requires_grad=True)
    x.register_hook(look)  # type: ignore[no-untyped-call]
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    assert seen == [True, True]


def test_hooks_for_what_autograd_saves_are_known() -> None:
    assert autograd.saves_as_always()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not autograd.saves_as_always()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not autograd.saves_as_always()


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_parts_of_a_dtensor() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    values = torch.arange(6.0).view(2, 3)
    tensor = distribute_tensor(values, init_device_mesh("cpu", (1,)), [Shard(1)])
    local = distributed.local_part(tensor)

    assert distributed.is_dtensor(tensor)
    assert not distributed.is_dtensor(values)
    assert type(local) is torch.Tensor
    assert torch.equal(local, values)
    assert distributed.local_part(values) is values
    again = distributed.in_place_of(tensor, local * 2)
    assert distributed.is_dtensor(again)
    assert again.placements == tensor.placements
    assert torch.equal(again.full_tensor(), values * 2)
    assert distributed.in_place_of(values, local) is local


@pytest.mark.usefixtures("one_rank")
def test_fully_shard_tells_in_which_dtype_it_gathers() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    lower, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fully_shard(lower, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(plain)

    assert distributed.gathered_dtype(lower) is torch.bfloat16
    assert distributed.gathered_dtype(plain) is None
    assert distributed.gathered_dtype(torch.nn.Linear(2, 2)) is None


def test_functions_without_torch_function() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> str:
            return "own"

    tensor = torch.ones(1).as_subclass(Own)
    assert torch.neg(tensor) == "own"
    with modes.no_torch_function():
        assert torch.neg(tensor).tolist() == [-1]


@pytest.mark.usefixtures("one_rank")
def test_fully_shard_gathers_into_memory_that_it_shares_with_the_weight() -> None:
    """It counts no write then; that the memory is shared is how a gathered weight is known."""
    from torch.distributed.fsdp import fully_shard

    layer = torch.nn.Linear(4, 4)
    fully_shard(layer)
    seen: list[tuple[bool, int]] = []

    def look(module: torch.nn.Module, _: object) -> None:
        weight = module.get_parameter("weight")
        seen.append((storages.is_used_once(weight), weight._version))

    layer.register_forward_pre_hook(look)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    assert seen[0] == seen[1]
    assert not seen[0][0]


@pytest.mark.usefixtures("one_rank")
def test_the_spec_of_a_parameter_is_that_of_its_gradient_under_fully_shard() -> None:
    from torch.distributed.fsdp import fully_shard

    layer = torch.nn.Linear(4, 4)
    fully_shard(layer)
    layer(torch.ones(1, 4)).sum().backward()
    assert distributed.spec_of(layer.weight.grad) is distributed.spec_of(layer.weight) is not None
    assert distributed.spec_of(torch.ones(1)) is None


@pytest.mark.usefixtures("one_rank")
def test_where_the_ranks_of_a_process_group_meet() -> None:
    group = torch.distributed.group.WORLD
    # What it asks of a group where there is an accelerator.
    assert torch.device("cpu") in group._device_types
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    assert distributed.exchange_device(group) == torch.device("cpu")  # gloo for all


@pytest.mark.usefixtures("one_rank")
def test_what_ddp_leaves_alone_and_how_it_reduces() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    layer = torch.nn.Linear(2, 2)
    layer._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    ddp = torch.nn.parallel.DistributedDataParallel(layer)
    assert distributed.names_left_out(ddp) == {"bias"}
    assert not distributed.has_comm_hook(ddp)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)  # type: ignore[operator]
    assert distributed.has_comm_hook(ddp)


@pytest.mark.usefixtures("one_rank")
def test_ddp_keeps_its_buckets() -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    reducer = ddp.reducer
    distributed.keep_buckets(ddp)
    # Else the second forward pass makes them anew, which asks the other ranks.
    assert not ddp.reducer._rebuild_buckets()
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    ddp.reducer = reducer
    assert reducer._rebuild_buckets()


def test_modes_stand_aside() -> None:
    ours, function_mode = modes.DispatchMode(), modes.FunctionMode()
    with function_mode, ours:
        assert modes.function_modes() == [function_mode]
        with modes.without_ours():
            assert not modes.num_dispatch_modes()
        assert modes.dispatch_modes() == [ours]
        with modes.FunctionMode() as inner:
            with function_mode.suspended():
                assert modes.function_modes() == [inner]
            assert modes.function_modes() == [inner, function_mode]


def test_the_default_device_holds_where_no_mode_is_seen() -> None:
    with torch.device("meta"):
        ones, written = map(modes.on_default_device, (torch.ones, torch.relu))
        with modes.unseen_by_modes():
            assert torch.ones(2).device.type == "cpu"
            assert ones(2).device.type == "meta"
            assert ones(2, device="cpu").device.type == "cpu"
            assert written(torch.ones(2)).device.type == "cpu"
    assert modes.on_default_device(torch.ones) is torch.ones


def test_temporary_kernels_are_taken_back() -> None:
    # An op that no other test uses: PyTorch may remember what it saw of one.
    op, key = torch.ops.aten.addbmm.default, dispatch.autocast_key("cpu")
    x = torch.ones(2, 2)
    args = x, x[None], x[None]
    kernels = dispatch.PythonKernels()
    kernels.register(op, key, lambda *_: torch.zeros(()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.addbmm(*args).shape == ()
        kernels.remove()
        assert torch.addbmm(*args).dtype == torch.bfloat16


def test_tracing_by_jit_is_seen() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(modes.is_jit_tracing())
        return x + 1

    function(torch.ones(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*(deprecated|not supported)")
        torch.jit.trace(function, torch.ones(1), check_trace=False)
    assert seen == [False, True]


def test_a_scheduler_that_is_being_made() -> None:
    seen: list[bool] = []

    class Noting(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            seen.append(optim.is_being_made(self))
            super().step()

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = Noting(optimizer, lambda epoch: 1.0)
    optimizer.step()
    scheduler.step()
    assert seen == [True, False]
    assert not optim.is_being_made(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_hooks_stand_aside_in_an_export() -> None:
    import torch.export._trace as trace

    before = trace._export
    hooks = modules.GlobalHooks(lambda *_: None, lambda *_: None)
    hooks.install()
    assert trace._export is not before
    hooks.remove()
    assert trace._export is before
