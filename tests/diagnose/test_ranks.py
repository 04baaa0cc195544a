"""Two ranks of data parallel training: each replays its own step, and knows if it is innocent."""

from __future__ import annotations

import pytest
from tests.diagnose.ranks import diagnose_bad_rank
from tests.ranks.pool import Pool

from halfstep._tools.diagnose.diagnose import INNOCENT
from halfstep._tools.diagnose.diagnosis import Diagnosis

pytestmark = pytest.mark.slow


def test_each_rank_replays_its_own(pool: Pool) -> None:
    zero, one = pool.run(diagnose_bad_rank)
    innocent, guilty = (Diagnosis.from_json(each["on request"]) for each in (zero, one))
    assert (guilty.verdict, guilty.rank) == ("data", 1)
    assert str(guilty).endswith(" s, on rank 1")
    assert (innocent.verdict, innocent.rank, innocent.happened) == ("none", 0, INNOCENT)
    assert str(innocent).startswith(INNOCENT)
    assert zero["same"]
    assert one["same"]
    # After the exchange of gradients both skip; only rank 1 has a bad batch.
    assert [Diagnosis.from_json(text).verdict for text in one["in a loop"]] == ["data"]
    # Both step with NaN: one rank has the batch and is told what the others wait for.
    for kind in ("without a scaler", "summed by hand"):
        (innocent,), (guilty,) = (
            [Diagnosis.from_json(text) for text in each[kind]] for each in (zero, one)
        )
        assert (innocent.verdict, innocent.happened) == ("none", INNOCENT)
        assert guilty.cure is not None
        assert "leave this batch out on all ranks" in guilty.cure.text
    assert zero["digest"][:6] == one["digest"][:6]
