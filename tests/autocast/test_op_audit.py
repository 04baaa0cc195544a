"""No op of the audit is further off than roundings explain, but for what is known."""

from pathlib import Path

import pytest
from benchmarks.op_audit import DTYPES, Verdict, audit_cases, works
from tests import forked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "op_audit.py"


def verdicts_of(names: set[str] | None, dtypes: list[str], policy: str) -> list[Verdict]:
    found = (audit_cases(work.own, dtypes, policy) for work in works({}, names))
    return [verdict for verdicts in found for verdict in verdicts]


def test_calls_of_our_own() -> None:
    verdicts = verdicts_of(None, list(DTYPES), "standard")
    assert len(verdicts) > 150
    assert not [verdict for verdict in verdicts if not verdict.is_explained]


def test_a_share_of_the_database(tmp_path: Path) -> None:
    """In a process of its own, which forks: some kernels read outside of their tensors."""
    done = forked.python(SCRIPT, "--share", 80, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "| compared | " in done.out


def test_the_audit_finds_what_adds_in_lower_precision() -> None:
    names = {"h[index]", "index_add, 1d", "histc", "nn.functional.fold"}
    verdicts = verdicts_of(names, ["bf16"], "torch")
    assert {verdict.op for verdict in verdicts} == names
    assert min(verdict.worst.of_steps for verdict in verdicts) > 50
