"""The page as text: its sections, its numbers, which are those of the JSON, and hostile names."""

import json
import re
from importlib.resources import files

import pytest
from tests.report import records
from tests.report.markup import at, page_of, told

from halfstep._common import numbers
from halfstep._common.formats import FORMATS
from halfstep._tools.report.page import MOST_SKIPS
from halfstep._tools.report.text import sentences, summary_json


@pytest.fixture(scope="module", params=records.WRITERS, ids=lambda write: write.__name__)
def page(request, tmp_path_factory):
    return page_of(request.param(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def skips(tmp_path_factory):
    return page_of(records.with_skips(tmp_path_factory.mktemp("skips")))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return page_of(records.hostile(tmp_path_factory.mktemp("hostile")))


# --- every page -----------------------------------------------------------------------------------


def test_the_sections_are_in_order(page):
    sections = [section.attributes["id"] for section in page.tree.all("section")]
    always = ["steps", "heat", "layers", "policy", "machine", "reading"]
    assert sections == ["diagnoses"] * bool(page.summary.bad_places) + always
    links = [link.attributes["href"] for link in page.tree.one("nav").all("a")]
    assert links == [f"#{section}" for section in sections]


def test_the_page_asks_nobody_for_anything(page):
    (policy,) = page.tree.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy.attributes["content"].startswith("default-src 'none'; img-src data:;")
    for element in page.tree.all():
        assert element.tag not in ("iframe", "object", "embed", "base", "form", "audio", "video")
        for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
            value = element.attributes.get(name)
            assert value is None or value.startswith(("data:", "#"))
    (style,) = page.tree.all("style")
    assert "@import" not in style.text
    assert "url(" not in style.text


def test_no_element_brings_script_of_its_own(page):
    for element in page.tree.all():
        assert not [name for name in element.attributes if name.startswith("on")]
    kinds = [script.attributes.get("type") for script in page.tree.all("script")]
    assert kinds.count(None) == 1
    assert set(kinds) <= {None, "application/json"}


def test_islands_are_json_without_markup(page):
    for script in page.tree.all("script", type="application/json"):
        assert json.loads(script.text)
        assert not re.search("[<>&]", script.text)


def test_ids_are_unique_and_uses_find_them(page):
    ids = [e.attributes["id"] for e in page.tree.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    for element in page.tree.all("use"):
        assert element.attributes["href"].removeprefix("#") in ids
    for label in page.tree.all("label"):
        assert label.attributes.get("for", ids[0]) in ids


def test_marked_numbers_are_those_of_the_json(page):
    data = summary_json(page.summary)
    marked = list(page.tree.all("data"))
    assert len({element.attributes["data-key"] for element in marked}) >= 4
    for element in marked:
        assert json.loads(element.attributes["value"]) == at(data, element.attributes["data-key"])
        assert element.text


def test_all_sentences_come_first_and_their_severity_is_a_word(page):
    items = [item for says in page.tree.all("ul", class_="says") for item in says.all("li")]
    words = {"good": "Good", "notice": "Note", "warning": "Warning", "bad": "Problem"}
    expected = summary_json(page.summary)["sentences"]
    assert [item.classes[0] for item in items] == [s["severity"] for s in expected]
    for item, sentence in zip(items, expected, strict=True):
        assert words[sentence["severity"]] in item.text
        said = re.sub(r"\s+", " ", item.text.replace("`", ""))
        assert re.sub(r"\s+", " ", sentence["text"].replace("`", "")) in said
    assert page.text.index('class="says"') < page.text.index('id="steps"')


def test_the_table_of_layers_has_the_numbers_of_the_json(page):
    layers = summary_json(page.summary)["layers"]
    rows = {id: row for row in page.tree.all("tr") if (id := row.attributes.get("id"))}
    assert rows.keys() == {f"layer-{n}" for n in range(len(layers))}
    for id, row in rows.items():
        layer = layers[int(id.removeprefix("layer-"))]
        (
            name,
            _,
            _,
            dtype,
            headroom,
            lost,
            lost_updates,
            amax,
            amin,
            zeros,
            nan,
            inf,
            *of_formats,
        ) = (cell.text.strip() for cell in cells(row))
        assert name == layer["name"].strip()
        assert dtype in ("fp16", "bf16", "fp32")
        assert headroom + " bits" == numbers.bits(layer["headroom"])
        assert lost == share(layer["share_lost"])
        assert lost_updates == share(layer["share_lost_updates"])
        assert (amax, amin) == (numbers.number(layer["amax"]), numbers.number(layer["amin"]))
        of = [layer[what][name] for what in ("underflow", "overflow") for name in FORMATS]
        assert of_formats == [share(n / layer["measured"]) for n in of]
        assert zeros == share(layer["zeros"] / layer["measured"])
        assert (nan, inf) == (numbers.count(layer["nan"]), numbers.count(layer["inf"]))


def test_sentences_and_cells_lead_to_what_they_tell_of(page):
    ids = {e.attributes["id"] for e in page.tree.all() if "id" in e.attributes}
    links = [link.attributes["href"] for link in page.tree.all("a", class_="see")]
    found = [sentence.evidence for sentence in sentences(page.summary) if sentence.evidence]
    assert links == [f"#{each}" for each in found]
    assert set(found) <= ids
    for tab in page.tree.all("svg", class_="rows"):
        for link in tab.all("a"):
            number = int(link.attributes["href"].removeprefix("#layer-"))
            assert link.one("title").text.startswith(page.summary.layers[number].name or "(the")


def cells(row):
    return [element for element in row.all() if element.tag in ("td", "th")]


def share(value):
    return numbers.percent(value) if value != 0 else "0"


# --- what they tell -------------------------------------------------------------------------------


TOLD = (records.with_skips, records.diagnosed, records.killed)


def test_what_pages_tell(tmp_path, golden):
    """``golden/pages.txt`` has it; ``pytest tests/report --accept`` writes it anew."""
    parts = []
    for write in TOLD:
        tree = page_of(write(tmp_path / write.__name__)).tree
        parts += [f"# {write.__name__}", *told(tree), ""]
    golden("pages.txt", "\n".join(parts).replace(str(tmp_path), "FOLDER"))


def test_tabs_work_without_script(skips):
    heat = skips.tree.one("section", id="heat")
    radios = list(heat.all("input", class_="tab"))
    assert [radio.attributes["id"] for radio in radios] == [
        "tab-output",
        "tab-output_gradient",
        "tab-parameter_gradient",
        "tab-parameter",
    ]
    # The worst layer, with underflow of 12 %, is a gradient of a parameter.
    assert ["checked" in radio.attributes for radio in radios] == [False, False, True, False]
    assert [label.text.split("s ")[-1] for label in heat.all("label")] == [
        "5",
        "5",
        "6 1 to check",
        "5",
    ]
    style = skips.tree.one("style").text
    for radio in radios:
        kind = radio.attributes["id"].removeprefix("tab-")
        assert f"#{radio.attributes['id']}:checked~.panel-{kind}" in style
        assert len(list(heat.all(class_=f"panel-{kind}"))) == 1


def test_many_skips_are_counted(tmp_path):
    steps = (records.skip(n) for n in range(1, MOST_SKIPS + 51))
    page = page_of(records.write(tmp_path, [records.header(), *steps]))
    policy = page.tree.one("section", id="policy")
    assert len(list(policy.one("tbody").all("tr"))) == MOST_SKIPS
    assert f"The first {MOST_SKIPS} of {MOST_SKIPS + 50}." in policy.text


# --- hostile names --------------------------------------------------------------------------------


def test_hostile_names_are_text(hostile):
    assert not [e for e in hostile.tree.all("img") if e.attributes.get("src") == "x"]
    assert hostile.text.count(records.HOSTILE) == 0
    names = [row for row in hostile.tree.all("th", scope="row") if "title" in row.attributes]
    assert records.HOSTILE in [name.text for name in names]
    assert records.HOSTILE in [name.attributes["title"] for name in names]
    pieces = [pre.text for pre in hostile.tree.all("pre")]
    assert [records.HOSTILE in piece for piece in pieces] == [True] * 3  # two diagnoses, the policy


def test_a_name_with_quotes_stays_in_its_attribute(tmp_path):
    name = "a\" onmouseover=alert(1) x='"
    tensors = [records.tensor("output", name, records.bell(0), "float16")]
    events = [records.header(), records.step(1, optimizer=name), records.sample(1, tensors)]
    page = page_of(records.write(tmp_path, events))
    assert not [e for e in page.tree.all() if "onmouseover" in e.attributes]
    assert name in [e.attributes.get("title") for e in page.tree.all("th")]


def test_the_script_is_small(skips):
    (script,) = (s for s in skips.tree.all("script") if "type" not in s.attributes)
    assert len(script.text) < 13_000


def test_styles_and_scripts_are_in_the_package():
    names = {file.name for file in (files("halfstep._tools.report") / "templates").iterdir()}
    assert {"page.html.jinja", "comparison.html.jinja", "page.css", "page.js"} <= names


def test_what_is_invisible_or_reorders_text_is_shown_by_its_number(tmp_path):
    name = "a\x1b[2J\u202eb\u2066\u200bc\u0085"
    events = [records.header(command=["x\u202e.py"]), records.step(1, optimizer=name)]
    events += [records.note(1, name), records.culprits(1, name), records.policy(text=name)]
    page = page_of(records.write(tmp_path, events))
    assert all(each.isprintable() or each.isspace() for each in page.text)
    assert "a\\u001b[2J\\u202eb\\u2066\\u200bc\\u0085" in page.text
