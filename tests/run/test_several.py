"""Several ranks under the runner: scripts with DDP and FSDP2."""

import math
from pathlib import Path

import pytest
import torch
from tests.run import several

SCRIPTS = Path(__file__).parent / "corpus" / "scripts"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_script_that_knows_nothing_of_halfstep(kind, pool, tmp_path):
    path = tmp_path / "train.py"
    path.write_text((SCRIPTS / "sharded.py").read_text().replace("KIND", kind))
    assert pool.run(several.script, str(path)) == ["train.py"] * 2


def test_a_script_whose_ranks_cannot_agree_is_told_the_cure(pool, tmp_path):
    path = tmp_path / "train.py"
    path.write_text((SCRIPTS / "sharded.py").read_text().replace("KIND", "plain"))
    for text in pool.run(several.script, str(path)):
        assert "RanksError" in text
        assert "GradScaler(process_group=torch.distributed.group.WORLD)" in text


def test_ranks_with_float16_gradients_get_masters_before_a_forward_pass(pool):
    (one, said), (other, _) = pool.run(several.with_float16, "added", False)
    assert said[0] == "--masters: SGD steps 2 float16 parameters in float32 (store: float32)"
    assert one == other == pool.run(several.with_float16, "by hand", False)[0][0]


def test_ranks_whose_gradients_have_to_stay_float16_train_as_before(pool):
    (one, said), (other, _) = pool.run(several.with_float16, "added", True)
    assert len(said) == 1
    assert said[0].startswith("--masters: SGD steps without masters: the gradients of a Distri")
    assert one == other == pool.run(several.with_float16, "unmodified", True)[0][0]


@pytest.mark.parametrize(
    ("dtype", "line"),
    [
        (torch.bfloat16, "AdamW steps 4 bfloat16 parameters in float32 (store: split)"),
        # What a MixedPrecisionPolicy casts for the forward pass alone is stored in float32.
        (torch.float32, "AdamW has no bfloat16 or float16 parameters"),
    ],
    ids=str,
)
def test_ranks_of_fsdp_train_as_with_the_calls(dtype, line, pool):
    added = pool.run(several.fully_sharded, "added", dtype)
    by_hand = pool.run(several.fully_sharded, "by hand", dtype)
    for (numbers, said), (expected, _) in zip(added, by_hand, strict=True):
        assert numbers == expected
        assert all(math.isfinite(number) for each in numbers for number in each)
        assert f"--masters: {line}" in said
        assert sum("--guard: AdamW skips steps" in text for text in said) == 1


@pytest.mark.parametrize(("ranks", "norm"), [("alone", None), ("alone", 0.5), ("together", None)])
def test_ranks_that_average_by_hand_are_guarded(ranks, norm, pool):
    """Gradients of rank 0 hold inf, which the average brings to all."""
    first, second, third = zip(*pool.run(several.guarded, ranks, True, norm), strict=True)
    assert first[0] == first[1] == second[0] == second[1] != third[0] == third[1]


@pytest.mark.parametrize("norm", [None, 0.5])
def test_ranks_that_hold_parts_are_guarded_together(norm, pool):
    for first, second, third in pool.run(several.guarded, "together", False, norm):
        assert first == second != third


def test_ranks_that_cannot_be_guarded_are_told_the_option(pool):
    for text in pool.run(several.guarded, None, True, 0.5):
        assert "--guard-ranks=alone" in text
        assert "nothing says which ranks" in text
