"""Several ranks under the runner: scripts with DDP and FSDP2, and an error that all raise."""

from pathlib import Path

import pytest
from tests.run import several

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.mark.parametrize("text", ["the scales differ", "another error"])
def test_an_error_of_all_ranks_is_shown_once(text, pool):
    lines = sorted(pool.run(several.shown, text), key=len)
    assert lines[0].startswith("[rank")
    assert lines[0].endswith("RanksError, shown by another rank\n")
    assert lines[1].endswith(f"RanksError: {text}\n")


def test_errors_that_differ_are_all_shown(pool):
    lines = pool.run(several.shown_own)
    assert [f"RanksError: error of rank {rank}" in line for rank, line in enumerate(lines)] == [
        True
    ] * 2


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
    (one, said), (other, _) = pool.run(several.added_to_float16, False)
    (by_hand, _), _ = pool.run(several.added_to_float16, True)
    assert one == other == by_hand
    assert said[0] == "--masters: AdamW steps 2 float16 parameters in float32 (store: float32)"
