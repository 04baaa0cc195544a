"""No op of the audit is further off than roundings explain, but for what is known."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.op_audit import DTYPES, Verdict, audit_cases, works

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "op_audit.py"


def verdicts_of(names: set[str] | None, dtypes: list[str], policy: str) -> list[Verdict]:
    found = (audit_cases(work.own, dtypes, policy) for work in works({}, names))
    return [verdict for verdicts in found for verdict in verdicts]


def test_calls_of_our_own() -> None:
    verdicts = verdicts_of(None, list(DTYPES), "standard")
    assert len(verdicts) > 150
    assert not [verdict for verdict in verdicts if not verdict.is_explained]


def test_a_share_of_the_database() -> None:
    """In a process of its own, which forks: some kernels read outside of their tensors."""
    command = [sys.executable, str(SCRIPT), "--share", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| compared | " in done.stdout


def test_the_audit_finds_what_adds_in_lower_precision() -> None:
    names = {"h[index]", "index_add, 1d", "histc", "nn.functional.fold"}
    verdicts = verdicts_of(names, ["bf16"], "torch")
    assert {verdict.op for verdict in verdicts} == names
    assert min(verdict.worst.of_steps for verdict in verdicts) > 50
