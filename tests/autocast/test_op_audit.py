"""No op of the audit is further off than roundings explain, but for what is known."""

import pytest
from benchmarks import op_audit
from benchmarks.op_audit import DTYPES, Work, audit_all, database, works

pytestmark = pytest.mark.filterwarnings("ignore")
SHARE = 12


def check(todo: list[Work]) -> None:
    verdicts = audit_all(todo, list(DTYPES), "standard")
    assert len(verdicts) > len(todo)
    assert not [verdict for verdict in verdicts if not verdict.is_explained]


def test_calls_of_our_own() -> None:
    todo = works({}, None)
    assert len(todo) > 75
    check(todo)


def test_a_share_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_audit, "SECONDS_AN_OP", 0.3)
    ops = database()
    names = set(list(ops)[::SHARE])
    assert len(names) > 50
    check(works({name: ops[name] for name in names}, names))


def test_the_audit_finds_what_adds_in_lower_precision() -> None:
    names = {"h[index]", "index_add, 1d", "histc", "nn.functional.fold"}
    verdicts = audit_all(works({}, names), ["bf16"], "torch")
    assert {verdict.op for verdict in verdicts} == names
    assert min(verdict.worst.of_steps for verdict in verdicts) > 50
