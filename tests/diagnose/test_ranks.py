"""Two ranks of data parallel training: each replays its own, and rank 0 knows what both found."""

from __future__ import annotations

import pytest
from tests.diagnose.ranks import diagnose_bad_rank
from tests.ranks.pool import Pool

from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.watch.watch import INNOCENT

pytestmark = pytest.mark.slow


def test_each_rank_replays_its_own_and_rank_0_knows_all(pool: Pool) -> None:
    zero, one = pool.run(diagnose_bad_rank)
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
    # Both step with NaN: one rank has the batch and is told what the others wait for.
    (innocent,), (guilty,) = (
        [Diagnosis.from_json(text) for text in each["without a scaler"]] for each in (zero, one)
    )
    assert (innocent.verdict, innocent.notes[0]) == ("none", INNOCENT)
    assert "leave this batch out on all ranks" in guilty.cure.text
    assert zero["digest"][:6] == one["digest"][:6]
