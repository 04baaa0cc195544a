"""The presets against PyTorch's dispatcher: the test that speaks up when a new version comes."""

from pathlib import Path

import pytest
import torch
from tests.autocast.versions import CAME_WITH, LEFT_WITH, has_op
from tests.device import DEVICE

from halfstep._autocast import autocast, preset
from halfstep._autocast.policy import meant_by
from halfstep._autocast.written import PRESETS
from halfstep._pytorch import dispatch

DEVICES = ["cpu", "cuda", "xpu", "mps"]
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
def test_the_dispatcher_has_kernels_to_compare_with(device: str) -> None:
    assert len(dispatch.overloads_with_autocast_kernel(device)) > 80


@pytest.mark.parametrize("name", ["standard", "torch"])
def test_every_op_that_pytorch_casts_has_a_rule(name: str) -> None:
    missing = {
        op.removesuffix(".default"): device
        for device in DEVICES
        for op in sorted(dispatch.overloads_with_autocast_kernel(device))
        if any(preset(name).rule(op, device, dtype) is None for dtype in DTYPES)
    }
    assert not missing, (
        f"PyTorch {torch.__version__} casts ops that src/halfstep/_autocast/presets/{name}.policy "
        "does not know. Add each to the ops of the action that ATen/autocast_mode.h gives it, and "
        "to tests/autocast/versions.py the version that it came with:\n"
        + "\n".join(f'    "{op}",  # {device}' for op, device in missing.items())
    )


@pytest.mark.parametrize("device", DEVICES)
def test_torch_names_no_op_that_pytorch_does_not_cast(device: str) -> None:
    policy = preset("torch")
    named = {op for op in meant_by(policy.rules) if policy.rule(op, device, torch.bfloat16)}

    assert named <= dispatch.overloads_with_autocast_kernel(device)


def test_torch_cuda_is_the_cuda_list_on_every_device() -> None:
    for op in dispatch.overloads_with_autocast_kernel("cuda"):
        on_cuda = preset("torch").action(op, "cuda", torch.float16)
        assert preset("torch-cuda").action(op, "cpu", torch.float16) == on_cuda


def test_standard_does_what_pytorch_does_on_cuda() -> None:
    """Except where standard.policy says otherwise.

    bfloat16 has room for the gradient of BCE; some matrix norms refuse an input in lower precision;
    what adds many terms promotes, and adds in float32; an outer product is no contraction;
    recurrent layers and the states of cells are wide.
    """
    names = ("linalg_matrix_norm.default", "linalg_matrix_norm.str_ord", "addr.default")
    wide = ("_thnn_fused_lstm_cell.default", "_thnn_fused_gru_cell.default")
    recurrent = ("_cudnn_rnn.default", "miopen_rnn.default")
    in_bf16 = {(op, torch.bfloat16) for op in ("binary_cross_entropy.default", *recurrent)}
    on_purpose = in_bf16 | {(name, dtype) for name in (*names, *wide) for dtype in DTYPES}
    for dtype in DTYPES:
        for op in sorted(dispatch.overloads_with_autocast_kernel("cuda")):
            if (op, dtype) not in on_purpose:
                expected = preset("torch").action(op, "cuda", dtype)
                action = preset("standard").action(op, "cpu", dtype)
                assert ("promote" if action == "fp32-sums" else action) == expected, op


def test_standard_is_one_table_for_every_device() -> None:
    assert {rule.device for rule in preset("standard").rules} == {None}


def test_presets_name_only_ops_that_exist() -> None:
    """A misspelt name would be a rule for nothing."""
    known = dispatch.aten_overloads()
    for rule in (rule for name in PRESETS for rule in preset(name).rules if not rule.is_glob):
        op, _, of_op = rule.op.partition(".")
        assert (op in known) == has_op(op), (
            f"{rule}: tests/autocast/versions.py says otherwise of PyTorch {torch.__version__}"
        )
        assert not of_op or of_op in known.get(op, [of_op]), rule


def test_the_docs_say_which_ops_only_some_versions_have() -> None:
    page = (Path(__file__).parents[2] / "docs" / "versions.md").read_text(encoding="utf-8")
    assert {op for op in CAME_WITH | LEFT_WITH if f"`{op}`" not in page} == set()


def test_bf16_lean_differs_in_bfloat16_only() -> None:
    added = set(preset("bf16-lean").rules) - set(preset("standard").rules)
    assert {rule.dtype for rule in added} == {torch.bfloat16}
    assert {rule.action for rule in added} == {"leave", "lower"}
    norms = torch.nn.LayerNorm(4), torch.nn.GroupNorm(2, 4), torch.nn.RMSNorm(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *norms, torch.nn.Softmax(-1))
    for name, dtype in (("standard", torch.float32), ("bf16-lean", torch.bfloat16)):
        with autocast(DEVICE, torch.bfloat16, policy=name):
            assert model(torch.ones(2, 4)).dtype is dtype
        with autocast(DEVICE, torch.float16, policy=name):
            assert model(torch.ones(2, 4)).dtype is torch.float32


def test_bf16_lean_takes_class_weights_in_float32() -> None:
    with autocast(DEVICE, torch.bfloat16, policy="bf16-lean"):
        chances = torch.zeros(2, 3, dtype=torch.bfloat16).log_softmax(-1)
        loss = torch.nn.functional.nll_loss(chances, torch.tensor([0, 2]), torch.ones(3))
    assert (chances.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


def test_fp32_lowers_nothing() -> None:
    with autocast(DEVICE, torch.bfloat16, policy="fp32"):
        assert torch.nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float32
        assert torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype is torch.bfloat16
