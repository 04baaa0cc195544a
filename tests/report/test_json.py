"""The summary as JSON."""

import json

import pytest
from tests.report import records
from tests.report.records import WRITERS, step, summary_of

from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.json import to_plain
from halfstep._tools.report.page import tiles
from halfstep._tools.report.text import sentences, summary_json


def refuse(constant):
    raise AssertionError(constant)


@pytest.mark.parametrize("write", WRITERS)
def test_json_is_strict_and_holds_every_number(tmp_path, write):
    summary = summary_of(write(tmp_path))
    text = json.dumps(summary_json(summary), allow_nan=False)
    values = json.loads(text, parse_constant=refuse)
    assert values["steps"]["num"] == summary.steps.num
    assert values["steps"]["reasons"] == summary.steps.reasons
    assert [layer["share_lost"] for layer in values["layers"]] == [
        layer.share_lost for layer in summary.layers
    ]
    assert [layer["histogram"] for layer in values["layers"]] == [
        to_plain(layer.histogram) for layer in summary.layers
    ]
    assert [s["text"] for s in values["sentences"]] == [s.text for s in sentences(summary)]


def test_json_has_the_whole_diagnosis_of_each_place(tmp_path):
    summary = summary_of(records.diagnosed(tmp_path))
    first, second = summary_json(summary)["bad_places"]
    assert (first["steps"], first["ranks"]) == ([41, 42], [0])
    assert Diagnosis.from_json(json.dumps(first["diagnosis"])) == records.found()
    assert second["diagnosis"]["bad"]["name"] == "log"


def test_json_has_nan_as_a_string(tmp_path):
    assert summary_json(summary_of(records.failed(tmp_path)))["loss"]["last"] == "nan"


@pytest.mark.parametrize("losses", [(2.0, 30.0), (2.0, 2.0)])
def test_numbers_that_are_of_each_optimizer_in_turn_are_left_out(tmp_path, losses):
    steps = [step(n, loss=loss, number=i) for n in range(1, 6) for i, loss in enumerate(losses, 1)]
    summary = summary_of(records.write(tmp_path, [records.header(), *steps]))
    values = summary_json(summary)
    assert (values["num_optimizers"], values["norm"]) == (2, None)
    assert (values["loss"] is None) == bool(values["losses"]) == (losses[0] != losses[1])
    assert not any("norm" in tile.title for tile in tiles(summary))
