"""One number, wherever it is told: in sentences, tables and pages."""

from tests.report import records
from tests.report.markup import page_of
from tests.report.records import skip, step

from halfstep._tools.cli import main


def growing(folder):
    """Write a run of two optimizers that skips at the start, after growth, and once besides."""

    def both(make, number, scale):
        return [make(number, scale=scale), make(number, scale=scale, optimizer="SGD")]

    events = [*both(skip, 1, 4096.0), *both(skip, 2, 2048.0)]
    for number in range(3, 101):
        scale = {40: 2048.0, 41: 2048.0, 80: 1024.0}.get(number, 1024.0 if number < 80 else 512.0)
        make = skip if number in (41, 80) else step
        events += [
            event if make is skip else event | {"scale_after": scale}
            for event in both(make, number, scale)
        ]
    return records.write(
        folder, [records.header(), records.policy(), *events, records.end(9.0, 200)]
    )


def test_skips_are_counted_in_one_way_everywhere(tmp_path, capsys):
    page = page_of(growing(tmp_path))
    steps = page.summary.steps
    counted = (steps.num_skipped, len(steps.start_up), len(steps.after_growth))
    assert (*counted, steps.num_skipped_later) == (4, 2, 1, 1)
    kinds = "3 by dynamic scaling (2 at the start and 1 after the scale had grown)"
    (tile,) = (t for t in page.tree.one("dl", class_="tiles").all("div") if "Skipped" in t.text)
    assert [data.text for data in tile.all("data")] == ["4", "4 %", "2", "1", "1"]
    main(["report", str(tmp_path)])
    assert kinds in capsys.readouterr().out


def test_a_mean_of_samples_is_not_told_as_one_of_steps(tmp_path):
    events = [step(n, norm=9.0 / n if n % 10 == 1 else None) for n in range(1, 101)]
    run = records.write(tmp_path, [records.header(), *events, records.end(9.0, 100)])
    told = [div.text for div in page_of(run).tree.one("dl", class_="tiles").all("div")]
    assert any("Last measured" in x and x.endswith("in the last 20 measured") for x in told)


def test_a_record_has_one_share_of_underflow_per_layer(tmp_path, capsys):
    page = page_of(records.flushing(tmp_path, (1024.0, 65536.0)))
    (worst,) = [x for x in page.summary.layers if x.name == "head.weight"]
    assert (worst.share_lost, worst.share_lost_worst) == (0.06, 0.12)
    main(["report", str(tmp_path)])
    told = capsys.readouterr().out
    assert "6 % of the gradient entries of `head.weight`" in told
    assert "12 %" not in told
    row = next(r for r in page.tree.all("tr") if r.attributes.get("id") == "layer-20")
    assert "6 %" in row.text
    assert "12 %" not in row.text
