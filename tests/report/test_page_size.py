"""How large the page of a large run is."""

from dataclasses import replace

import pytest
from tests.report import records
from tests.report.markup import parse

from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Measured, Sample
from halfstep._tools.report.page import render
from halfstep._tools.report.summarize import summarize

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A page of 1,000 steps and 200 layers, every fourth step sampled.

    The record of it would have 200,000 lines of numbers to read, so the run is put together here.
    """
    folder = tmp_path_factory.mktemp("large")
    names = [f"transformer.blocks.{n // 8}.part{n % 8}" for n in range(200)]
    of_kinds = [
        *(("output", name, "float16", 0) for name in names),
        *(("output_gradient", name, "float16", -14) for name in names),
        *(("parameter_gradient", f"{name}.{p}", "float32", -18) for name in names for p in "wb"),
    ]
    pool = [records.bell(center) for center in range(-24, 12)]
    small = [records.header(every=1), records.policy()]
    rows = [
        records.tensor(kind, name, pool[24 + center + n % 7], dtype)
        for n, (kind, name, dtype, center) in enumerate(of_kinds)
    ]
    steps = [
        (records.skip if n % 97 == 0 else records.step)(n, loss=2 + (n * 7919 % 1000) / 999)
        for n in range(1, 1001)
    ]
    run = read_run(records.write(folder, [*small, *steps, records.sample(1, rows)]))
    samples = tuple(
        Sample(
            step,
            1024.0,
            tuple(
                Measured.of(kind, name, dtype, pool[24 + center + (n * step * 7919 >> 7) % 7])
                for n, (kind, name, dtype, center) in enumerate(of_kinds)
            ),
        )
        for step in range(1, 1001, 4)
    )
    return render(summarize(run), replace(run, samples=samples))


def test_a_page_of_a_thousand_steps_and_two_hundred_layers_has_less_than_a_megabyte(large):
    assert 300_000 < len(large.encode()) < 1_000_000


def test_it_says_what_it_left_out(large):
    tree = parse(large)
    assert "the worst of up to 2 sampled steps (250 in all)" in tree.one("section", id="heat").text
    assert "The worst 240 of 800 have a histogram" in tree.one("section", id="layers").text
    assert len([row for row in tree.all("tr") if "id" in row.attributes]) == 800
