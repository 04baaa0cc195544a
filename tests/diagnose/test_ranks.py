"""Two ranks of data parallel training: each replays its own, and rank 0 knows what both found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from halfstep._diagnose.diagnosis import Diagnosis

SCRIPT = Path(__file__).with_name("ranks.py")


def test_each_rank_replays_its_own_and_rank_0_knows_all(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(errors)
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    merged, own = (Diagnosis.from_json(each["on request"]) for each in (zero, one))
    assert (own.verdict, own.rank, own.others) == ("data", 1, ())
    # Rank 0 itself was finite; the answer is that of the rank which was not.
    assert (merged.verdict, merged.rank) == ("data", 1)
    assert [(other.rank, other.verdict) for other in merged.others] == [(0, "none")]
    assert "rank 0: the step is finite" in str(merged)
    assert zero["same"]
    assert one["same"]
    # After the exchange of gradients both skip; only rank 1 has a bad batch.
    assert [Diagnosis.from_json(text).verdict for text in one["in a loop"]] == ["data"]
    assert zero["digest"][:6] == one["digest"][:6]
