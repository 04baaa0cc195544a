"""The names of torch.amp while they are replaced, and afterwards."""

import copy
import inspect
import pickle
import sys
import threading
import warnings
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler as sharded
from tests.run import several
from torch import nn

import halfstep
from halfstep import preset
from halfstep._autocast.region import current_policy
from halfstep._tools.run import stand_ins
from halfstep._tools.run.stand_ins import NAMES, replaced

STANDARD = preset("standard")
ALL = [*NAMES, ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")]
ORIGINALS = {key: getattr(import_module(key[0]), key[1]) for key in ALL}
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")


def meanings() -> dict[tuple[str, str], object]:
    return {(module, name): getattr(sys.modules[module], name) for module, name in ALL}


@pytest.fixture
def names():
    with replaced(STANDARD):
        yield
    assert meanings() == ORIGINALS


# --- what code reads of them ----------------------------------------------------------------------

NOT_THERE = {"__deprecated__"}


def attributes(what: object) -> set[str]:
    return {name for name in dir(what) if hasattr(what, name)}


@pytest.mark.parametrize(("name", "args"), [("torch", ("cpu",)), ("torch.cpu.amp", ())])
def test_contexts_have_the_attributes_of_pytorchs(names, name, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = ORIGINALS[name, "autocast"](*args)
    ours = sys.modules[name].autocast(*args)
    assert attributes(theirs) - attributes(ours) <= NOT_THERE
    with theirs, ours:
        assert attributes(theirs) - attributes(ours) <= NOT_THERE
        read = {"device", "fast_dtype", "_enabled", "_cache_enabled", "custom_backend_name"}
        assert read <= vars(theirs).keys()
        for each in read:
            assert getattr(ours, each) == getattr(theirs, each)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("has_scaled", [True, False])
def test_scalers_have_the_attributes_of_pytorchs(names, enabled, has_scaled):
    theirs = ORIGINALS["torch", "GradScaler"]("cpu", enabled=enabled)
    ours = torch.GradScaler("cpu", enabled=enabled)
    if has_scaled:
        theirs.scale(torch.ones(()))
        ours.scale(torch.ones(()))
    assert attributes(theirs) - attributes(ours) <= NOT_THERE
    for name in vars(theirs).keys() - {"_per_optimizer_states"}:
        assert getattr(ours, name) == getattr(theirs, name), name


# --- the names ------------------------------------------------------------------------------------


def test_every_name_of_pytorch_is_in_the_table():
    """A new place where PyTorch shows one of the classes must not be missed."""
    classes = {id(meaning) for meaning in ORIGINALS.values()}
    places = {
        (module_name, name)
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] == "torch"
        and not module_name.startswith(("torch.testing", "torch._dynamo"))
        for name, value in list(vars(module).items())
        if id(value) in classes
    }
    # The base class that the module of ShardedGradScaler has imported for itself.
    assert places - {("torch.distributed.fsdp.sharded_grad_scaler", "GradScaler")} == set(ALL)


def test_all_names_are_replaced_and_come_back():
    with replaced(STANDARD):
        inside = meanings()
        assert all(meaning.__module__ == stand_ins.__name__ for meaning in inside.values())
        assert issubclass(torch.autocast, halfstep.autocast)
        assert issubclass(torch.cuda.amp.GradScaler, halfstep.GradScaler)
        with replaced(preset("fp32")):
            assert meanings() == inside
        assert meanings() == inside
    assert meanings() == ORIGINALS


def test_they_come_back_after_an_exception():
    finders = list(sys.meta_path)
    with pytest.raises(KeyError), replaced(preset("fp32")):
        raise KeyError
    assert meanings() == ORIGINALS
    assert sys.meta_path == finders
    assert stand_ins._use.policy == STANDARD


@pytest.mark.parametrize("key", ALL, ids=".".join)
def test_the_arguments_are_those_of_pytorch(key, names):
    def parameters(cls: object) -> list[tuple[str, object]]:
        function = inspect.signature(cls.__init__)
        return [(p.name, p.default) for p in function.parameters.values()]

    assert parameters(getattr(sys.modules[key[0]], key[1])) == parameters(ORIGINALS[key])


def test_modules_that_derive_from_the_names_see_the_originals():
    """ShardedGradScaler derives from what GradScaler means when its module is imported."""
    name = "torch.distributed.fsdp.sharded_grad_scaler"
    loaded, package = sys.modules.pop(name), sys.modules["torch.distributed.fsdp"]
    try:
        with replaced(STANDARD):
            module = import_module(name)
            assert module.ShardedGradScaler is stand_ins.ShardedGradScaler
            assert module.GradScaler is ORIGINALS["torch.amp", "GradScaler"]
            assert torch.amp.GradScaler is stand_ins.GradScaler
        assert issubclass(module.ShardedGradScaler, torch.amp.GradScaler)
    finally:
        sys.modules[name] = package.sharded_grad_scaler = loaded


def test_the_sharded_scaler_speaks_for_all_ranks(names, pool):
    assert pool.run(several.sharded) == [([True, False, True], 4.0)] * 2


# --- autocast -------------------------------------------------------------------------------------

LINEAR = nn.Linear(4, 4)
X = torch.ones(2, 4)


def dtype_of_linear() -> torch.dtype:
    return LINEAR(X).dtype


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.autocast("cpu"), torch.bfloat16),
        (lambda: torch.autocast(device_type="cpu", dtype=torch.float16), torch.float16),
        (lambda: torch.amp.autocast("cpu", torch.float16, True, False), torch.float16),
        (lambda: torch.amp.autocast("cpu", enabled=False), torch.float32),
        (lambda: torch.amp.autocast_mode.autocast("cpu"), torch.bfloat16),
        (lambda: torch.cpu.amp.autocast(), torch.bfloat16),
        (lambda: torch.cpu.amp.autocast(True, torch.float16), torch.float16),
        (lambda: torch.cpu.amp.autocast_mode.autocast(enabled=False), torch.float32),
        (lambda: nullcontext(), torch.float32),
    ],
)
def test_contexts_and_decorators(make, dtype, names):
    context = make()
    for _ in range(2):
        with context:
            assert dtype_of_linear() is dtype
    assert dtype_of_linear() is torch.float32
    if not isinstance(context, nullcontext):
        assert context(dtype_of_linear)() is dtype
        assert isinstance(context, torch.autocast)
        assert isinstance(context, halfstep.autocast)


def test_the_policy_of_the_run_gives_way_to_one_of_the_script():
    with replaced(preset("fp32")):
        with torch.autocast("cpu"):
            assert current_policy("cpu") == preset("fp32")
            assert dtype_of_linear() is torch.float32
        with halfstep.autocast("cpu", policy="torch"), torch.autocast("cpu", torch.float16):
            assert current_policy("cpu") == preset("torch")
            assert dtype_of_linear() is torch.float16
        seen = []
        with torch.autocast("cpu"):
            thread = threading.Thread(target=lambda: seen.append(current_policy("cpu")))
            thread.start()
            thread.join()
        assert seen == [None]


@no_cuda
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.autocast("cuda"),
        lambda: torch.amp.autocast_mode.autocast("cuda", torch.bfloat16),
        lambda: torch.cuda.amp.autocast(),
        lambda: torch.autocast("cpu", dtype=torch.float32),
        lambda: torch.cpu.amp.autocast(dtype=torch.float64),
    ],
)
def test_where_pytorch_warns_and_is_off_so_is_ours(make, names):
    with pytest.warns(UserWarning, match="autocast is off in this block"):
        context = make()
    with context:
        assert not torch.is_autocast_enabled("cpu")
        assert dtype_of_linear() is torch.float32


@no_cuda
def test_the_warning_names_the_line_of_the_script(names):
    for make in (lambda: torch.cuda.amp.autocast(), lambda: torch.cuda.amp.GradScaler()):
        with pytest.warns(UserWarning, match="no CUDA device") as seen:
            make()
        assert seen[0].filename == __file__


def test_off_it_warns_of_nothing(names):
    with torch.cuda.amp.autocast(enabled=False), torch.autocast("cuda", enabled=False):
        assert dtype_of_linear() is torch.float32
    assert not torch.amp.GradScaler(enabled=False).is_enabled()


def test_an_unknown_device_is_the_error_of_pytorch(names):
    for make in (torch.autocast, ORIGINALS["torch", "autocast"]):
        with pytest.raises(RuntimeError):
            make("no-such-device")


def test_pytorchs_decorators_for_functions_of_autograd_work(names):
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, dtype_of_linear()))
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen.append((gradient.dtype, dtype_of_linear()))
            return 2 * gradient

    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu"):
        y = Double.apply(x)
    y.sum().backward()
    assert seen == [(torch.float32, torch.float32)] * 2


# --- the scaler -----------------------------------------------------------------------------------


def weight_after_a_step(scaler: torch.amp.GradScaler) -> float:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight[0].item()


def test_scalers_scale(names):
    for scaler in (
        torch.GradScaler("cpu", 8.0),
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.cpu.amp.GradScaler(8.0),
        torch.amp.GradScaler("cpu:0", 8.0),
        sharded.ShardedGradScaler("cpu", 8.0),
    ):
        assert scaler.is_enabled()
        assert scaler.get_scale() == 8.0
        assert weight_after_a_step(scaler) == 0.5
        assert isinstance(scaler, torch.amp.GradScaler)
        assert isinstance(scaler, halfstep.GradScaler)


@no_cuda
@pytest.mark.parametrize("name", ["torch", "torch.amp", "torch.cuda.amp", "sharded"])
def test_for_cuda_without_cuda_it_switches_itself_off(name, names):
    module = sharded if name == "sharded" else sys.modules[name]
    cls = module.ShardedGradScaler if name == "sharded" else module.GradScaler
    with pytest.warns(UserWarning, match="switched off"):
        scaler = cls(growth_interval=0)  # PyTorch does not look at it then
    assert not scaler.is_enabled()
    assert isinstance(scaler, cls)
    assert scaler.state_dict() == {}
    assert weight_after_a_step(scaler) == 0.5
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert isinstance(copied, cls)
        assert not copied.is_enabled()


def test_a_class_of_the_script_may_derive_from_it(names):
    class Scaler(torch.amp.GradScaler):
        def __init__(self, settings):
            super().__init__("cpu", enabled=settings["fp16"], init_scale=4.0)
            self.num_updates = 0

        def update(self, new_scale=None):
            self.num_updates += 1
            super().update(new_scale)

    for fp16, scale in ((True, 4.0), (False, 1.0)):
        scaler = Scaler({"fp16": fp16})
        assert isinstance(scaler, Scaler)
        assert (scaler.is_enabled(), scaler.get_scale()) == (fp16, scale)
        assert weight_after_a_step(scaler) == 0.5
        assert scaler.num_updates == 1


def test_it_can_be_pickled(names):
    for scaler in (torch.amp.GradScaler("cpu", 8.0), torch.cpu.amp.GradScaler(8.0)):
        assert pickle.loads(pickle.dumps(scaler)).get_scale() == 8.0
    context = pickle.loads(pickle.dumps(torch.autocast("cpu", torch.float16)))
    with context:
        assert dtype_of_linear() is torch.float16


# --- halfstep itself ------------------------------------------------------------------------------


def test_halfstep_does_not_look_the_names_up():
    """Its custom_bwd enters PyTorch's autocast while torch.compile traces."""

    class Double(torch.autograd.Function):
        @staticmethod
        @halfstep.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @halfstep.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return nn.functional.linear(gradient, gradient)

    def gradient() -> torch.Tensor:
        x = torch.ones(2, 2, requires_grad=True)
        with halfstep.autocast("cpu", torch.bfloat16):
            y = function(x)
        y.square().sum().backward()
        return x.grad

    function = Double.apply
    expected = gradient()
    with replaced(STANDARD), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
        function = torch.compile(lambda x: Double.apply(x), backend="aot_eager", fullgraph=True)
        assert torch.equal(gradient(), expected)


def test_pytorch_can_switch_autocast_off_for_every_device_in_compiled_backwards(names):
    """It enters ``torch.amp.autocast`` for devices that halfstep has no kernels for (MTIA)."""

    def gradients() -> torch.Tensor:
        x = torch.full((2, 2), 0.3, requires_grad=True)
        function(x).sum().backward()
        return x.grad

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x).float()

    expected = gradients()
    torch.compiler.reset()
    function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        assert torch.equal(gradients(), expected)


def test_the_originals_are_pytorchs():
    assert {key: ORIGINALS[key] for key in NAMES} == stand_ins._ORIGINALS
