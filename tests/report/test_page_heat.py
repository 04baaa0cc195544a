"""Heat maps: which cell has which colour, and which layers have room for their names."""

import base64
import re
import zlib
from itertools import pairwise

import pytest
from tests.report import records

from halfstep._tools.record.read import read_run
from halfstep._tools.report.page_layers import (
    FIRST_LEVEL,
    HEADROOM,
    LOST,
    MOST_COLUMNS,
    NO_VALUE,
    NOT_FINITE,
    heat,
    ticks_of,
)
from halfstep._tools.report.summarize import summarize


def maps_of(folder, samples, dtype="float16", has_policy=True):
    """The maps of a run with these samples, each a list of (kind, name, statistics)."""
    events = [records.header(), *([records.policy()] if has_policy else [])]
    for number, tensors in enumerate(samples, start=1):
        rows = [records.tensor(*tensor, dtype) for tensor in tensors]
        events += [records.step(number), records.sample(number, rows)]
    run = read_run(records.write(folder, events))
    return heat(summarize(run), run)


def pixels(map):
    """The indices in the picture of a map, row by row."""
    image = base64.b64decode(map.image.removeprefix("data:image/png;base64,"))
    width = int.from_bytes(image[16:20], "big")
    start = image.index(b"IDAT")
    length = int.from_bytes(image[start - 4 : start], "big")
    lines = zlib.decompress(image[start + 4 : start + 4 + length])
    return [list(lines[i + 1 : i + 1 + width]) for i in range(0, len(lines), width + 1)]


def label(levels, pixel):
    return levels.labels[pixel - FIRST_LEVEL]


def test_nothing_is_drawn_without_samples(tmp_path):
    assert maps_of(tmp_path, []) is None


def test_each_cell_has_the_value_of_its_layer_and_step(tmp_path):
    fc = records.counted({4: 9, -30: 1})  # amax 12, one entry in ten underflows
    head = records.counted({-5: 9})
    drawn = maps_of(
        tmp_path, [[("output", "fc", fc)], [("output", "fc", fc), ("output", "head", head)]]
    )
    (tab,) = drawn.tabs
    headroom, lost = map(pixels, tab.maps)
    assert [title.split("\n")[0] for _, title in tab.rows] == ["fc", "head"]
    assert [[label(HEADROOM, p) if p else None for p in row] for row in headroom] == [
        ["about 12.5 bits", "about 12.5 bits"],
        [None, "20 bits or more"],
    ]
    assert [[label(LOST, p) if p else None for p in row] for row in lost] == [
        ["about 10 %", "about 10 %"],
        [None, "none"],
    ]


def test_a_gradient_that_never_was_in_fp16_has_lost_nothing(tmp_path):
    samples = [[("parameter_gradient", "norm.weight", records.norm_like())]]
    for has_policy, told in ((True, "none"), (False, "about 100 %")):  # 90 %, by the nearest level
        drawn = maps_of(tmp_path / told, samples, "float32", has_policy)
        lost = drawn.tabs[0].maps[1]
        assert label(LOST, pixels(lost)[0][0]) == told
        assert ("underflow" in drawn.tabs[0].rows[0][1]) == (not has_policy)


def test_where_nan_or_inf_was_seen_is_told_by_colour_and_dot(tmp_path):
    good, bad = records.counted({1: 9}), records.counted({1: 9}, inf=1)
    drawn = maps_of(tmp_path, [[("output", "fc", each)] for each in (good, bad, bad)])
    headroom = drawn.tabs[0].maps[0]
    assert [pixel == NOT_FINITE for pixel in pixels(headroom)[0]] == [False, True, True]
    assert headroom.not_finite == [(1.5, 0.5)]


def test_a_tensor_of_zeros_has_no_headroom(tmp_path):
    drawn = maps_of(tmp_path, [[("output", "fc", records.counted({}, zeros=5))]])
    headroom, lost = (pixels(map)[0][0] for map in drawn.tabs[0].maps)
    assert headroom == NO_VALUE
    assert label(LOST, lost) == "none"


def test_a_column_has_the_worst_of_its_samples(tmp_path):
    usual, peak = records.counted({1: 9}), records.counted({15: 9, -40: 1})
    by_number = {100: peak, 301: peak, 200: records.counted({1: 9}, nan=1)}
    samples = [[("output", "fc", by_number.get(n, usual))] for n in range(2 * MOST_COLUMNS)]
    drawn = maps_of(tmp_path, samples)
    headroom, lost = (pixels(map)[0] for map in drawn.tabs[0].maps)
    assert drawn.columns == [(n + 1, n + 2) for n in range(0, len(samples), 2)]
    assert [label(HEADROOM, headroom[column]) for column in (50, 150)] == ["about 1.5 bits"] * 2
    assert [label(LOST, lost[column]) for column in (50, 150)] == ["about 10 %"] * 2
    assert headroom[100] == lost[100] == NOT_FINITE
    assert len({headroom[n] for n in range(len(headroom)) if n not in (50, 100, 150)}) == 1


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        ([1], ["1"]),
        ([1, 10], ["1", "10"]),
        (range(7, 71, 7), ["7", "21", "42", "63"]),
        (range(1, 101), ["1", "20", "40", "60", "80", "100"]),
        (range(50, 4001, 50), ["50", "1,000", "2,000", "3,000", "4,000"]),
        (range(10, 51), ["10", "20", "30", "40", "50"]),
        (range(18, 51), ["20", "30", "40", "50"]),
    ],
)
def test_ticks_name_steps_that_were_sampled(steps, labels):
    ticks = ticks_of([(step, step) for step in steps])
    assert [label for _, label in ticks] == labels
    for place, label in ticks:
        assert list(steps)[int(place * len(steps) / 100)] == int(label.replace(",", ""))


def test_the_colours_of_headroom_and_loss_are_bright_where_it_is_bad():
    def brightness(levels, value):
        return sum(levels.colours[FIRST_LEVEL + levels.level(value)])

    assert brightness(HEADROOM, -3.0) > brightness(HEADROOM, 5.0) > brightness(HEADROOM, 40.0)
    assert brightness(LOST, 1.0) > brightness(LOST, 0.01) > brightness(LOST, 0.0)


@pytest.mark.parametrize("share", [1.0, 0.1, 0.01, 0.001, 1e-4])
def test_the_label_of_a_share_is_near_it(share):
    said = float(re.findall(r"[\d.]+(?:e-\d+)?", LOST.labels[LOST.level(share)])[0])
    assert said == pytest.approx(100 * share, rel=0.02)


def test_the_smallest_share_is_not_none():
    assert LOST.labels[LOST.level(1e-12)] == "about 0.001 %"


def test_labels_do_not_overlap(tmp_path):
    drawn = maps_of(tmp_path, [[("output", f"l{n}", records.bell(0)) for n in range(200)]])
    places = [place for place, _, _ in drawn.tabs[0].labels]
    assert len(places) == 50
    assert min(b - a for a, b in pairwise(places)) >= 12


def test_all_layers_are_labelled_where_there_is_room(tmp_path):
    drawn = maps_of(tmp_path, [[("output", f"l{n}", records.bell(0)) for n in range(50)]])
    assert [full for _, _, full in drawn.tabs[0].labels] == [f"l{n}" for n in range(50)]


def test_long_names_are_shortened_from_the_left(tmp_path):
    name = "transformer.encoder.blocks.12.attention.qkv"
    drawn = maps_of(tmp_path, [[("output", name, records.bell(0))]])
    ((_, text, full),) = drawn.tabs[0].labels
    assert (text, full) == ("…12.attention.qkv", name)
    assert drawn.tabs[0].rows[0][1].startswith(name)
