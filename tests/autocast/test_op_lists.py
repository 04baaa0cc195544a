"""PyTorch's own lists of ops, with arguments and expected dtypes, against halfstep's kernels.

Every entry runs under autocast and is compared bit for bit with the same op on arguments that were
cast by hand: the slow obvious reference for policies, plans and kernels together.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tests.device import DEVICE
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from halfstep._autocast import autocast
from halfstep._autocast.sums import are_products_rounded, is_left_to_pytorch
from halfstep._pytorch.dispatch import has_onednn

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*deprecated")]

HALVES = (torch.float16, torch.bfloat16)

# What each group of PyTorch's lists promises: the dtype that an op runs in and returns.
# None stands for the lower precision.
CUDA_GROUPS = {
    "torch_fp16": None,
    "nn_fp16": None,
    "linalg_fp16": None,
    "methods_fp16": None,
    "torch_fp32": torch.float32,
    "nn_fp32": torch.float32,
    "methods_fp32": torch.float32,
    "torch_need_autocast_promote": torch.float32,
    "torch_expect_builtin_promote": None,
    "methods_expect_builtin_promote": None,
}
CPU_GROUPS = {
    "torch_16": None,
    "nn_16": None,
    "torch_fp32": torch.float32,
    "nn_fp32": torch.float32,
    "torch_need_autocast_promote": torch.float32,
    "torch_expect_builtin_promote": None,
    "methods_expect_builtin_promote": None,
}
CANNOT_RUN = {
    "cudnn_convolution": "needs CUDA",
    "cudnn_convolution_transpose": "needs CUDA",
    "einsum": "the entry's arguments are not einsum's; test_kernels.py has one of our own",
    "lstm_cell": "on a CPU its products are lowered, not its state: test_kept_wide.py",
    "gru_cell": "the same",
}


class Entry(NamedTuple):
    group: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    runs_in: torch.dtype | None
    returns: torch.dtype | None

    def __call__(self, args: tuple[Any, ...]) -> list[Any]:
        modules: list[Any] = [torch, torch._C._nn, torch.ops.aten]
        if self.group.startswith("nn"):
            modules = [torch._C._nn, torch.nn.functional]
        elif self.group.startswith("methods"):
            modules = [torch.Tensor]
        function = next(found for m in modules if (found := getattr(m, self.op, None)))
        result = function(*args, **self.kwargs)
        return list(result) if isinstance(result, tuple) else [result]


def entries(
    lists: Any, groups: dict[str, torch.dtype | None], half: torch.dtype
) -> Iterator[Entry]:
    for group, runs_in in groups.items():
        for op, args, *rest in getattr(lists, group):
            if op in CANNOT_RUN:
                continue
            kwargs = rest.pop(0) if rest and isinstance(rest[0], dict) else {}
            returns = runs_in or half
            if rest and isinstance(rest[-1], torch.dtype):
                runs_in = returns = rest[-1]  # the op promotes by itself, whatever autocast does
            if rest and isinstance(rest[0], tuple) and half is torch.float16:
                args = rest[0]  # the CPU's lists have arguments for both halves
            if op == "conv_transpose3d":  # a third of a second in lower precision
                args = (args[0][:1, :, :2, :2, :2], args[1][..., :3, :3, :3], *args[2:])
            yield Entry(group, op, args, kwargs, runs_in, returns)


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def cases() -> Iterator[Any]:
    torch.manual_seed(0)
    cuda, cpu = AutocastTestLists(torch.device(DEVICE)), AutocastCPUTestLists(torch.device(DEVICE))
    for half in HALVES:
        for policy, lists, groups in (
            ("torch", cpu, CPU_GROUPS),
            ("torch-cuda", cuda, CUDA_GROUPS),
            ("standard", cuda, CUDA_GROUPS),
        ):
            for number, entry in enumerate(entries(lists, groups, half)):
                if (policy, entry.op) == ("standard", "addr"):
                    continue  # no contraction: test_kept_wide.py
                name = f"{policy}-{str(half)[6:]}-{entry.op}-{number}"
                yield pytest.param(policy, half, entry, id=name)


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize(("policy", "half", "entry"), list(cases()))
def test_an_op_is_what_it_is_on_arguments_cast_by_hand(policy, half, entry):
    with autocast(DEVICE, half, policy=policy):
        results = entry(entry.args)

    promotes_itself = "builtin_promote" in entry.group
    args = entry.args if promotes_itself else cast(entry.args, entry.runs_in or half)
    expectations = entry(args)
    name = f"{entry.op}.default"
    is_left = not has_onednn(half) or is_left_to_pytorch(name, entry.args, {})
    if policy != "torch" and is_left and are_products_rounded(name, "cpu", half):
        # PyTorch's own kernel rounds the sums of products.
        expectations = [each.to(half) for each in entry(cast(args, torch.float32))]
    for result, expected in zip(results, expectations, strict=True):
        if isinstance(expected, torch.Tensor):
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected)
            assert promotes_itself or result.dtype == entry.returns
        else:
            assert result == expected


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("policy", ["standard", "torch-cuda"])
def test_banned_ops_say_what_to_use(policy: str) -> None:
    context = autocast(DEVICE, torch.float16, policy=policy)
    for op, args, module in AutocastTestLists(torch.device(DEVICE)).banned:
        with context, pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            getattr(module, op)(*args)
        with autocast(DEVICE, torch.float16, policy="torch"):
            getattr(module, op)(*args)  # PyTorch's list for the CPU allows it
