"""Products by PyTorch's kernels: when halfstep's leave and come back, and what a step enters."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.autocast.corpus.models import MODELS
from tests.device import DEVICE
from torch import Tensor, nn

from halfstep._autocast import autocast, kernels, native, preset, use_policy
from halfstep._autocast.casts import pytorch_kernel
from halfstep._autocast.kernels import observe_ops
from halfstep._autocast.plans import PolicyOnDevice
from halfstep._pytorch import dispatch

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="is about the CPU's kernels of products")

BF16, FP32 = torch.bfloat16, torch.float32
LARGE = 200, 200  # 156 KiB: casts of it are kept


@pytest.fixture(autouse=True)
def _only_standard() -> Iterator[None]:
    """Remove the kernels of other tests' policies, such as that of linear:fp32, for a while."""
    kernels.prepare(preset("standard"), DEVICE)

    def register(is_kept: Callable[[PolicyOnDevice], bool]) -> None:
        kernels._permanent.remove()
        kernels._permanent = dispatch.PythonKernels()
        for here in native.products.values():
            here._permanent.clear()
        for policy in kernels._prepared:
            if is_kept(policy) and not policy.only_observed:
                device = policy.device
                kernels._register(kernels._permanent, policy.ops(), kernels._kernel, device)
                products = {op: kernels._kernel(op, device) for op in policy.products()}
                native.products[device].add(products, policy.ops())

    register(lambda policy: policy.policy == preset("standard"))
    yield
    register(lambda policy: True)


def is_native() -> bool:
    return native.products[DEVICE].registered is None


def step(weight: Tensor, *, times: int = 1, policy: str | None = None) -> Tensor:
    """Use a weight in one context; return its gradient."""
    x = torch.ones(2, weight.shape[1])
    with autocast(DEVICE, BF16, policy=policy):
        loss = sum((F.linear(x, weight).float().square().sum() for _ in range(times)), x.sum())
    return torch.autograd.grad(loss, weight)[0] if torch.is_grad_enabled() else loss


def weight_of(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(shape or LARGE))


# --- leaving --------------------------------------------------------------------------------------


def test_they_leave_after_contexts_without_need() -> None:
    weight, seen = weight_of(), []
    for _ in range(native.NUM_WATCHED + 1):
        step(weight)
        seen.append(is_native())
    assert seen == [False, True, True]


def test_they_leave_after_ops_that_take_lists() -> None:
    weight, x = weight_of(4, 3, 3, 3), torch.ones(1, 3, 8, 8)
    for _ in range(native.NUM_WATCHED):
        with autocast(DEVICE, BF16, policy="torch"):
            F.conv2d(x, weight, stride=2)
            torch.linalg.multi_dot([torch.ones(2, 2)] * 3)
    assert is_native()


def test_they_stay_while_weights_are_used_again() -> None:
    weight = weight_of()
    for _ in range(4):
        step(weight, times=2)
        assert not is_native()
    for _ in range(native.NUM_WATCHED):
        step(weight)
    assert is_native()


def test_each_gradient_mode_is_watched() -> None:
    weight = weight_of()
    for _ in range(2):
        step(weight)
    with torch.no_grad():
        for expected in (False, True, True):
            step(weight)
            assert is_native() is expected
    step(weight)
    assert is_native()


def test_both_compute_the_same_bits() -> None:
    weight = weight_of()
    for times in (1, 3):
        ours = step(weight, times=times)
        for _ in range(2):
            step(weight)
        assert is_native()
        assert torch.equal(step(weight, times=times), ours)
        native.products[DEVICE].watches.clear()
        native.products[DEVICE].settle()


def test_after_them_plain_autocast_enters_no_python() -> None:
    weight, entered = weight_of(2, 2), []
    for _ in range(2):
        step(weight)

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "/halfstep/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_qualname)

    with torch.autocast(DEVICE, BF16):
        sys.setprofile(note)
        F.linear(torch.ones(1, 2), weight)
        sys.setprofile(None)
    assert not entered


# --- coming back ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda x: F.linear(x.double(), torch.ones(2, 2)), torch.float64),
        (lambda x: torch.ones(2, 2) @ x.double(), torch.float64),
        (lambda x: torch.mm(torch.eye(2).to_sparse_csr(), x), FP32),
    ],
)
def test_they_come_back_after_an_error_about_dtypes(product, expected):
    weight, x = weight_of(2, 2), torch.ones(2, 2)
    for _ in range(3):
        step(weight)
    assert is_native()
    with pytest.raises(RuntimeError) as caught, autocast(DEVICE, BF16):
        product(x)
    assert 'policy="standard; mm:fp32"' in caught.value.__notes__[0]
    for _ in range(4):
        with autocast(DEVICE, BF16):
            assert product(x).dtype is expected
        assert not is_native()


def test_the_rule_of_the_note() -> None:
    weight, x = weight_of(2, 2), torch.ones(2, 2)
    for _ in range(3):
        step(weight)
    # A policy of no other test, since kernels are registered when a policy is met first.
    with autocast(DEVICE, BF16, policy="standard; linear:fp32; digamma:fp32"):
        assert F.linear(x.double(), x).dtype is torch.float64


def test_other_errors_get_no_note() -> None:
    weight = weight_of(2, 2)
    for _ in range(2):
        step(weight)
    with pytest.raises(RuntimeError) as caught, autocast(DEVICE, BF16):
        F.linear(torch.ones(1, 3), weight)
    assert not hasattr(caught.value, "__notes__")
    assert is_native()


@pytest.mark.parametrize("num_other_ops", [0, 200])
def test_they_come_back_after_contexts_of_another_size(num_other_ops: int) -> None:
    """Only the first context with a loop uses a weight natively again and again."""
    weight = weight_of()

    def other() -> None:
        with autocast(DEVICE, BF16):
            x = F.linear(torch.ones(2, LARGE[1]), weight)
            for _ in range(num_other_ops):
                x = x.sin()

    for _ in range(2):
        other()
    assert is_native()
    step(weight, times=20)
    for _ in range(3):
        step(weight, times=20)
        assert not is_native()


def test_contexts_that_vary_are_not_watched_for_ever() -> None:
    weight, seen = weight_of(), []
    for num_ops in range(60):
        with autocast(DEVICE, BF16):
            x = F.linear(torch.ones(2, LARGE[1]), weight)
            for _ in range(num_ops % 30):
                x = x.sin()
        seen.append(is_native())
    assert all(seen[-15:])


def test_contexts_are_watched_again_after_many() -> None:
    weight = weight_of(2, 2)
    for _ in range(native.NUM_WATCHED + native.NUM_UNWATCHED - 1):
        step(weight)
    assert is_native()
    step(weight)
    assert not is_native()
    step(weight)
    assert is_native()


def test_use_policy_has_them() -> None:
    """A plain torch.autocast in any thread has PyTorch's cache, which may be stale."""
    weight, x = weight_of(), torch.ones(1, LARGE[1])
    for _ in range(2):
        step(weight)
    with use_policy("standard"):
        assert not is_native()
        with torch.autocast(DEVICE, BF16), torch.no_grad():
            for value in (1.0, 2.0, 3.0):
                weight.fill_(value)
                assert F.linear(x, weight).unique().item() == value * LARGE[1]
    step(weight)
    assert is_native()


def test_an_observer_sees_products() -> None:
    weight, seen = weight_of(2, 2), []
    for _ in range(2):
        step(weight)

    def observe(op: str, *_: object) -> Any:
        seen.append(op)
        return nullcontext()

    with observe_ops(observe):
        step(weight)
    assert "linear.default" in seen
    assert is_native()


def test_an_autocast_that_began_before_has_no_stale_cast() -> None:
    """It was made outside, so it turns PyTorch's cache on inside of halfstep's context."""
    weight, plain = weight_of(), torch.autocast(DEVICE, BF16)
    for _ in range(4):
        with torch.no_grad(), autocast(DEVICE, BF16), plain:
            for value in (1.0, 2.0, 3.0):
                weight.fill_(value)
                x = torch.ones(1, LARGE[1])
                assert F.linear(x, weight).unique().item() == value * LARGE[1]
        assert not is_native()


TOKENS_AT = torch.arange(65_536.0)[None]
COLUMN = torch.ones(4, 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda: F.linear(COLUMN.double(), COLUMN), torch.float64),
        (lambda: torch.mm(torch.eye(4).to_sparse_csr(), COLUMN), FP32),
        (lambda: COLUMN @ TOKENS_AT, FP32),
        (lambda: torch.mm(COLUMN, TOKENS_AT), FP32),
        (lambda: torch.bmm(COLUMN[None], TOKENS_AT[None].bfloat16()), FP32),
    ],
)
def test_a_product_that_needs_its_kernel_keeps_it_alone(product, expected):
    for number in range(5):
        assert is_native() is (number >= native.NUM_WATCHED)
        with autocast(DEVICE, BF16):
            assert product().dtype is expected
            assert F.linear(COLUMN, COLUMN).dtype is BF16  # a layer of one input is lowered


def test_what_contracts_nothing_after_the_watch_is_lowered_as_in_torch_autocast() -> None:
    for _ in range(2):
        step(weight_of(2, 2))
    with autocast(DEVICE, BF16):
        assert (COLUMN @ TOKENS_AT).dtype is BF16


# --- threads, memory, graphs ----------------------------------------------------------------------


def test_they_neither_leave_nor_come_while_a_thread_is_inside() -> None:
    weight, has_entered, may_leave = weight_of(2, 2), threading.Event(), threading.Event()

    def stay() -> None:
        with autocast(DEVICE, BF16):
            has_entered.set()
            may_leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    has_entered.wait()
    for _ in range(4):
        step(weight)
        assert not is_native()
    may_leave.set()
    thread.join()
    step(weight)
    assert is_native()


def test_a_cell_that_is_used_500_times_needs_no_more_memory_than_under_torch_autocast() -> None:
    cell = nn.Linear(*LARGE)

    def saved_bytes(context: Any) -> int:
        storages: dict[int, int] = {}
        kept = []

        def note(saved: Tensor) -> Tensor:
            kept.append(saved)
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        with context, torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            x = torch.ones(1, LARGE[1])
            for _ in range(500):
                x = cell(x)
        return sum(storages.values())

    theirs = saved_bytes(torch.autocast(DEVICE, BF16))
    for _ in range(4):
        assert saved_bytes(autocast(DEVICE, BF16)) <= theirs + 2 * cell.weight.nbytes


def test_the_change_of_kernels_compiles_nothing_anew() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    weight = weight_of()
    compiled = torch.compile(lambda x: F.linear(x, weight), backend=backend)
    for _ in range(4):
        with autocast(DEVICE, BF16):
            compiled(torch.ones(1, LARGE[1]))
    assert is_native()
    assert len(graphs) == 1


# --- what a step enters ---------------------------------------------------------------------------


@pytest.fixture
def entered() -> Iterator[Counter[str]]:
    """Count the ops that enter Python by CUDA's rules, at the Autocast key of the CPU."""
    policy = PolicyOnDevice(preset("standard"), "cuda", "", 0, only_observed=False)
    counts: Counter[str] = Counter()
    ours = dispatch.PythonKernels()
    for op in policy.ops():
        if dispatch.takes_numbers(dispatch.overload(op)):
            continue
        theirs = pytorch_kernel(op, "cpu")

        def counting(keys: Any, *args: Any, _op: str = op, _theirs: Any = theirs, **kw: Any) -> Any:
            counts[_op] += 1
            return _theirs(keys, *args, **kw)

        ours.register(dispatch.overload(op), dispatch.autocast_key("cpu"), counting)
    yield counts
    ours.remove()


@pytest.fixture(params=[False, True], ids=["alone", "process group"])
def _group(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("model", MODELS)
def test_a_step_enters_python_twice_at_most(model: str, entered: Counter[str]) -> None:
    net, given = MODELS[model]
    with torch.autocast("cpu", BF16):
        outputs = net(given).flatten(0, -2)
        loss = F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.int64))
    loss.backward()
    assert entered.total() <= 2, entered
    assert entered["cross_entropy_loss.default"] == 1
