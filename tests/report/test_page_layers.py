"""The table of layers: which is worst, and where its histogram lies in the window of its format."""

import re

from tests.report import records

from halfstep._tools.record.read import read_run
from halfstep._tools.report.page_layers import HEIGHT, MOST_HISTOGRAMS, format_limits, layer_table
from halfstep._tools.report.summarize import summarize


def table_of(folder, tensors, dtype="float16"):
    rows = [records.tensor(kind, name, statistics, dtype) for kind, name, statistics in tensors]
    events = [records.header(), records.policy(), records.step(1), records.sample(1, rows)]
    return layer_table(summarize(read_run(records.write(folder, events))))


def bins(path, low):
    """Heights of a histogram by the exponents that its bars end at."""
    start = int(re.match(r"M(\d+)", path).group(1))
    found, height, at = {}, 0, start
    for move, number in re.findall(r"([hv])(-?\d+)", path):
        if move == "v":
            height -= int(number)
        else:
            for _ in range(int(number)):
                at += 1
                found[at + low] = height
    return {exponent: height for exponent, height in found.items() if height}


def test_the_worst_layer_comes_first(tmp_path):
    table = table_of(
        tmp_path,
        [
            ("output", "fine", records.counted({1: 10})),
            ("output", "near", records.counted({16: 10})),
            ("output_gradient", "lossy", records.counted({-40: 5, 1: 5})),
            ("output", "inf", records.counted({1: 10}, inf=1)),
            ("output", "nan", records.counted({1: 10}, nan=1)),
            ("parameter", "weight", records.counted({-40: 5, 1: 5})),
        ],
    )
    names = [row.layer.name for row in table.rows]
    assert names == ["nan", "inf", "lossy", "near", "fine", "weight"]
    assert [row.number for row in table.rows] == [4, 3, 2, 1, 0, 5]


def test_a_histogram_has_its_bars_at_its_exponents(tmp_path):
    table = table_of(tmp_path, [("output", "fc", records.counted({-3: 1000, -1: 1, 2: 10}))])
    heights = bins(table.rows[0].histogram, table.axis.low)
    assert heights.keys() == {-3, -1, 2}
    assert HEIGHT > heights[-3] > heights[2] > heights[-1] > 0


def test_the_smallest_share_is_seen(tmp_path):
    table = table_of(tmp_path, [("output", "fc", records.counted({-3: 10**9, 2: 1}))])
    assert bins(table.rows[0].histogram, table.axis.low)[2] >= 1


def test_the_window_of_fp16_is_on_the_axis(tmp_path):
    axis = table_of(tmp_path, [("output", "fc", records.counted({0: 1}))]).axis
    fp16 = next(window for window in axis.windows if window.name == "fp16")
    assert [fp16.flushed + axis.low, fp16.normal + axis.low, fp16.largest + axis.low] == [
        -25,
        -14,
        16,
    ]
    assert 0 < fp16.flushed < fp16.normal < fp16.largest < axis.width
    assert "2^-24" in fp16.title
    assert "65504" in fp16.title


def test_limits_off_the_axis_are_not_drawn(tmp_path):
    axis = table_of(tmp_path, [("output", "fc", records.counted({0: 1}))]).axis
    bf16 = next(window for window in axis.windows if window.name == "bf16")
    assert (bf16.flushed, bf16.largest) == (0, axis.width)
    assert all(0 < at < axis.width for at in format_limits(axis))


def test_what_lies_far_out_is_drawn_at_the_ends(tmp_path):
    table = table_of(tmp_path, [("output", "fc", records.counted({-140: 5, 120: 5}))], "float32")
    heights = bins(table.rows[0].histogram, table.axis.low)
    assert list(heights) == [table.axis.low + 1, table.axis.high]


def test_only_the_worst_have_histograms(tmp_path):
    names = [("output", f"l{n}", records.bell(n % 7)) for n in range(MOST_HISTOGRAMS + 7)]
    table = table_of(tmp_path, names)
    drawn = [row.histogram is not None for row in table.rows]
    assert drawn == [True] * MOST_HISTOGRAMS + [False] * 7
    assert table.num_histograms == MOST_HISTOGRAMS


def test_a_layer_of_zeros_has_no_histogram(tmp_path):
    table = table_of(tmp_path, [("output", "fc", records.counted({}, zeros=3))])
    assert table.rows[0].histogram is None


def test_what_is_not_in_the_format_leads_no_list_of_worries(tmp_path):
    rows = [
        records.tensor("output", "loss", records.counted({17: 8}), "float32"),  # beyond fp16
        records.tensor("output", "head", records.counted({10: 8}), "float16"),
    ]
    events = [records.header(), records.policy(), records.step(1), records.sample(1, rows)]
    table = layer_table(summarize(read_run(records.write(tmp_path, events))))
    assert [row.layer.name for row in table.rows] == ["head", "loss"]
