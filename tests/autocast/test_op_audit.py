"""No op of the audit's own calls is further off than a few roundings, but for what is known."""

import pytest
from benchmarks.op_audit import DTYPES, audit_all, works


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_further_off_is_known(dtype: str) -> None:
    verdicts = audit_all(works({}, None), [dtype], "standard")
    assert len(verdicts) > 75
    assert not [verdict for verdict in verdicts if not verdict.is_explained]


@pytest.mark.filterwarnings("ignore")
def test_the_audit_finds_what_adds_in_lower_precision() -> None:
    verdicts = audit_all(works({}, {"h[index]", "nn.functional.fold"}), list(DTYPES), "torch")
    worst = [verdict.worst.of_steps for verdict in verdicts if verdict.dtype == "bf16"]
    assert len(worst) == 2
    assert min(worst) > 50
