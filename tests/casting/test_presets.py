"""The presets against PyTorch's dispatcher: the test that speaks up when a new version comes."""

import pytest
import torch

from halfstep import _torch
from halfstep.casting import preset
from halfstep.casting.overloads import named_by

DEVICES = ["cpu", "cuda", "xpu", "mps"]
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
def test_the_dispatcher_has_kernels_to_compare_with(device: str) -> None:
    assert len(_torch.overloads_with_autocast_kernel(device)) > 80


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["standard", "torch"])
def test_every_op_with_a_kernel_of_pytorch_has_a_rule(name: str, device: str) -> None:
    for dtype in DTYPES:
        missing = [
            op
            for op in sorted(_torch.overloads_with_autocast_kernel(device))
            if preset(name).rule(op, device, dtype) is None
        ]
        assert not missing, f"PyTorch {torch.__version__} casts ops that {name}.toml does not know"


@pytest.mark.parametrize("device", DEVICES)
def test_torch_names_exactly_the_ops_that_pytorch_casts(device: str) -> None:
    policy = preset("torch")
    named = {op for op in named_by(policy) if policy.rule(op, device, torch.bfloat16)}

    assert named == _torch.overloads_with_autocast_kernel(device)


def test_torch_cuda_is_the_cuda_list_on_every_device() -> None:
    for op in _torch.overloads_with_autocast_kernel("cuda"):
        on_cuda = preset("torch").action(op, "cuda", torch.float16)
        assert preset("torch-cuda").action(op, "cpu", torch.float16) == on_cuda


def test_standard_does_what_pytorch_does_on_cuda() -> None:
    """Except where standard.toml says otherwise: bfloat16 has room for the gradient of BCE."""
    on_purpose = {("binary_cross_entropy.default", torch.bfloat16)}
    for dtype in DTYPES:
        for op in sorted(_torch.overloads_with_autocast_kernel("cuda")):
            if (op, dtype) not in on_purpose:
                expected = preset("torch").action(op, "cuda", dtype)
                assert preset("standard").action(op, "cpu", dtype) == expected, op


def test_standard_is_one_table_for_every_device() -> None:
    assert {rule.device for rule in preset("standard").rules} == {None}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions lack some of the ops")
def test_presets_name_only_ops_that_exist() -> None:
    """A misspelt name would be a rule for nothing."""
    known = _torch.aten_overloads()
    for rule in (*preset("standard").rules, *preset("torch").rules):
        op, _, of_op = rule.op.partition(".")
        assert op in known, rule
        assert not of_op or of_op in known[op], rule
