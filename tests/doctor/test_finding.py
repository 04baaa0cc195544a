"""Findings and checkups as values."""

import json

import pytest

from halfstep._common.text import SEVERITIES
from halfstep._tools.doctor.finding import CATALOG, Checkup, Finding

BAD = Finding("clip-before-unscale", "seen", "cure", "a = 1\nb = 2", "b.py", 7)
EARLIER = Finding("scaler-bypassed", "seen", "cure", file="b.py", line=3)
WARNING = Finding("fp16-on-cpu", "seen", "cure", file="a.py", line=1)
NOTICE = Finding("bf16-parameters", "seen", "cure", file="c.py", line=2)


def test_a_finding_knows_how_bad_it_is_and_where_it_is_explained() -> None:
    assert (BAD.severity, BAD.docs) == ("bad", "halfstep doctor --explain clip-before-unscale")


def test_every_severity_of_the_catalog_is_one() -> None:
    assert set(CATALOG.values()) <= set(SEVERITIES) - {"good"}


@pytest.mark.parametrize("finding", [BAD, EARLIER, WARNING, NOTICE])
def test_json_has_all_values(finding: Finding) -> None:
    values = json.loads(json.dumps(finding.to_json()))
    assert values.pop("severity") == finding.severity
    assert values.pop("docs") == finding.docs
    assert Finding(**values) == finding


def test_a_checkup_is_a_sequence_with_the_worst_first_each_once() -> None:
    checkup = Checkup([NOTICE, WARNING, BAD, EARLIER, BAD])
    assert list(checkup) == [EARLIER, BAD, WARNING, NOTICE]
    assert (len(checkup), checkup[0], checkup[-1]) == (4, EARLIER, NOTICE)


@pytest.mark.parametrize(
    ("findings", "worst", "is_well"),
    [
        ([], "good", True),
        ([NOTICE], "notice", True),
        ([NOTICE, WARNING], "warning", False),
        ([WARNING, BAD], "bad", False),
    ],
)
def test_the_worst(findings: list[Finding], worst: str, is_well: bool) -> None:
    checkup = Checkup(findings)
    assert (checkup.worst, checkup.is_well) == (worst, is_well)
    assert json.loads(json.dumps(checkup.to_json()))["worst"] == worst


def test_the_text_has_place_id_cure_code_and_docs() -> None:
    assert str(Checkup([BAD, NOTICE])).splitlines() == [
        "bad: b.py:7: seen [clip-before-unscale]",
        "    cure: cure",
        "        a = 1",
        "        b = 2",
        "notice: c.py:2: seen [bf16-parameters]",
        "    cure: cure",
        "more: halfstep doctor --explain clip-before-unscale --explain bf16-parameters",
    ]


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    finding = Finding("fp16-on-cpu", "a\x1b[2Jb\nc", "d\re", file="f.py", line=1)
    assert "\x1b" not in str(finding)
    assert len(str(finding).splitlines()) == 2
