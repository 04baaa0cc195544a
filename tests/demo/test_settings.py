import pytest
import torch

from halfstep._demo.gpt import SIZES
from halfstep._demo.train import BATCHES, PRECISIONS, DemoSettings
from halfstep.errors import DemoError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": -3}, "steps must be at least 1, got -3"),
        ({"precisions": ()}, "no precision given; choose some of fp32, bf16"),
        ({"precisions": ("fp32", "fp8")}, "'fp8'; choose fp32, bf16, fp16-unscaled, fp16"),
        ({"size": "big"}, "'big'; choose tiny, small"),
        ({"mean_over": 0}, "at least 1 token, got 0"),
        ({"seed": -1}, "seed must be from 0 .* got -1"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"device": "tpu"}, "cpu or cuda, not on 'tpu'"),
    ],
)
def test_bad_values_are_refused(bad, message):
    with pytest.raises(DemoError, match=message):
        DemoSettings(**bad)


def test_cuda_without_cuda_names_the_cure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DemoError, match=r"sees no CUDA device; use --device cpu"):
        DemoSettings(device="cuda")


def test_precisions_run_once_each_with_fp32_first():
    chosen = DemoSettings(precisions=("fp16", "fp32", "fp16")).ordered_precisions
    assert [precision.name for precision in chosen] == ["fp32", "fp16"]


def test_only_fp16_is_ever_scaled():
    assert [p.name for p in PRECISIONS.values() if p.scaling] == ["fp16"]
    assert PRECISIONS["fp16"].dtype == PRECISIONS["fp16-unscaled"].dtype == torch.float16


def test_every_size_has_a_batch():
    assert BATCHES.keys() == SIZES.keys()
