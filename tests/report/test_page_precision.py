"""The precision map of a traced step."""

import pytest
from tests.report import records
from tests.report.markup import parse
from torch import nn, randn

import halfstep
from halfstep._tools.record.read import read_run
from halfstep._tools.report.page import render
from halfstep._tools.report.page_tables import MOST_MODULES, precision_map
from halfstep._tools.report.summarize import summarize
from halfstep._tools.trace.rows import Recording, Row


def row(number, module, compute, seconds):
    return Row(
        number, module, 0, "forward", "addmm", (), None, None, None, "cpu", compute, (), (), seconds
    )


def test_shares_are_of_ops_and_of_time():
    ops = (row(1, "a", "float16", 3.0), row(2, "a", "float32", 0.5), row(3, "b", "float32", 0.5))
    found = precision_map(Recording(ops, {"policy": "standard"}))
    assert found.dtypes == ["fp16", "fp32"]
    assert found.total.share_of_time("fp16") == 0.75
    assert found.total.share_of_ops("fp16") == pytest.approx(1 / 3)
    assert [(module.name, module.ops, module.seconds) for module in found.modules] == [
        ("a", 2, 3.5),
        ("b", 1, 0.5),
    ]


def test_many_modules_are_put_together():
    ops = tuple(row(n, f"blocks.{n % 10}.{n}", "float16", 1.0) for n in range(200))
    found = precision_map(Recording(ops, {}))
    assert [module.name for module in found.modules] == [f"blocks.{n}" for n in range(10)]
    assert len(found.modules) <= MOST_MODULES
    assert sum(module.ops for module in found.modules) == 200


def test_a_traced_step_is_shown(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = randn(2, 4)
    with halfstep.trace(model) as t, halfstep.autocast("cpu"):
        model(x)
    records.healthy(tmp_path)
    (tmp_path / "trace.json").write_text(t.to_json())
    run = read_run(tmp_path)
    found = precision_map(run.trace)
    assert {"bf16", "casts"} <= set(found.dtypes)
    section = parse(render(summarize(run), run)).one("section", id="precision")
    assert [cell.text for cell in section.all("th", scope="row")] == ["0", "1"]
    assert "% of the time" in section.text
