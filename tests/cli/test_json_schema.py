"""What is printed with ``--json`` is what the schema says, and the schema is that of the types."""

import copy
import json
from importlib.resources import files

import pytest
from tests.cli.json_schema import json_schema
from tests.report import records
from tests.report.records import WRITERS, summary_of

from halfstep._tools.cli import main
from halfstep._tools.report.compare_runs import compare_runs
from halfstep._tools.report.text import comparison_json, summary_json

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads((files("halfstep._tools.cli") / "json.schema.json").read_text("utf-8"))


def errors(values):
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.message for error in validator.iter_errors(values)]


def test_the_file_is_the_schema_of_the_types():
    command = "python -m tests.cli.json_schema > src/halfstep/_tools/cli/json.schema.json"
    assert json.loads(json.dumps(json_schema())) == SCHEMA, command
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("write", WRITERS)
def test_each_report_holds_to_it(tmp_path, write):
    values = json.loads(json.dumps(summary_json(summary_of(write(tmp_path)))))
    assert (values["schema"], values["kind"]) == (1, "report")
    assert not errors(values)


def test_a_comparison_holds_to_it(tmp_path):
    writers = (records.with_skips, records.failed, records.bf16)
    runs = [summary_of(write(tmp_path / write.__name__)) for write in writers]
    values = json.loads(json.dumps(comparison_json(compare_runs(*runs))))
    assert values["kind"] == "comparison"
    assert not errors(values)


@pytest.mark.parametrize(
    "words",
    [
        "doctor",
        "doctor --no-machine examples/run/why_nan.py",
        "doctor --no-machine {clips}",
    ],
)
def test_what_a_command_prints_holds_to_it(words, tmp_path, capsys):
    clips = tmp_path / "train.py"
    clips.write_text("loss.backward()\nscaler = GradScaler()\nopt.step()\nscaler.step(opt)\n")
    main([*words.format(clips=clips).split(), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert (values["schema"], values["kind"]) == (1, words.split()[0])
    assert not errors(values)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    summary = summary_of(records.failed(tmp_path_factory.mktemp("failed")))
    return json.loads(json.dumps(summary_json(summary)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema",), 2),
        (("kind",), "other"),
        (("loss", "last"), "NaN"),
        (("steps", "num"), "9"),
        (("sentences", 0, "severity"), "terrible"),
        (("new",), 1),
    ],
)
def test_what_is_otherwise_does_not(report, place, value):
    values = copy.deepcopy(report)
    assert not errors(values)
    part = values
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    assert errors(values)


@pytest.mark.parametrize("key", ["schema", "kind", "sentences", "layers"])
def test_nothing_may_be_missing(report, key):
    assert errors({name: value for name, value in report.items() if name != key})
