"""The page in a browser: no requests, tooltips, sorting; and what is there without script."""

import csv
import io
import json
import re
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright
from tests.report import records
from tests.report.markup import at, page_of

from halfstep._tools.report.text import summary_json

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason=f"needs Chromium: none of {', '.join(NAMES)} is on the PATH"
    ),
]


# Only for this module: while it is open, an event loop of playwright's runs in this thread.
@pytest.fixture(scope="module")
def browser():
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=PROGRAM, args=FLAGS) as browser,
    ):
        yield browser


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The pages of two records, as files and as values."""
    made = {}
    for write in (records.with_skips, records.hostile):
        folder = tmp_path_factory.mktemp(write.__name__)
        made[write.__name__] = page_of(write(folder))
        path = folder / "report.html"
        path.write_text(made[write.__name__].text, encoding="utf-8")
        made[write.__name__].url = path.as_uri()
    return made


@pytest.fixture(scope="module")
def pages(browser):
    """A page with script and one without: to make a page takes longer than most tests do."""
    return {has_script: watched(browser, has_script) for has_script in (True, False)}


@pytest.fixture
def opened(pages, made):
    """Open a report by name; it must ask for nothing but itself, and have nothing to say."""
    visits = []

    def open_page(name="with_skips", *, has_script=True, width=1280, **media):
        page, noticed = pages[has_script]
        page.set_viewport_size({"width": width, "height": 720})
        page.emulate_media(**{"color_scheme": "light", "media": "null"} | media)
        page.mouse.move(0, 0)
        noticed.clear()
        page.goto(made[name].url)
        visits.append((made[name].url, noticed))
        return page

    yield open_page
    for url, noticed in visits:
        assert noticed == [url]


def watched(browser, has_script=True):
    """Make a page; also a list of what it asks for, writes to the console and does wrong."""
    page = browser.new_page(java_script_enabled=has_script)
    page.set_default_timeout(10_000)
    noticed = []
    page.on("request", lambda request: noticed.append(request.url))
    page.on("console", lambda message: noticed.append(message.text))
    page.on("pageerror", lambda error: noticed.append(error.message))
    return page, noticed


def visit(browser, url):
    page, noticed = watched(browser)
    page.goto(url)
    return page, noticed


def hover(element, x, y=0.5):
    """Move the pointer to a place in an element, in shares of its sides."""
    box = element.bounding_box()
    # force: the rows of a map lie over it, and take the pointer.
    element.hover(position={"x": x * box["width"], "y": y * box["height"]}, force=True)


def tip(page):
    return page.locator(".tip:visible").inner_text()


def column(page, number):
    """The texts of a column of the table of layers, without the rows that are hidden."""
    cells = page.locator(f".layers tbody tr:visible > :nth-child({number})")
    return [text.strip() for text in cells.all_text_contents()]


def head(page, number):
    return page.locator(f".layers tr.sort th:nth-child({number})")


# --- it opens -------------------------------------------------------------------------------------


def test_an_error_on_a_page_would_be_noticed(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x'><script>nothing.at.all()</script>")
    page, noticed = visit(browser, path.as_uri())
    page.close()
    assert {path.as_uri(), "http://127.0.0.1:9/x", "nothing is not defined"} < set(noticed)
    assert "Failed to load resource" in "".join(noticed)


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["with_skips", "hostile"])
def test_the_page_itself_never_scrolls_sideways(opened, name, width):
    page = opened(name, width=width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".curves").bounding_box()["width"] > 300


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_enough_contrast(opened, scheme):
    page = opened(color_scheme=scheme)

    def brightness(selector, style="color"):
        script = f"element => getComputedStyle(element).{style}"
        return luminance(page.locator(selector).first.evaluate(script))

    ground = brightness("body", "backgroundColor")
    assert (ground < 0.1) == (scheme == "dark")
    for selector in ("body", ".soft", ".hint", ".tiles dt", "nav a", ".says .mood", ".b, .says li"):
        ink = brightness(selector)
        assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5, selector


def luminance(colour):
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (s / 12.92 if s <= 0.04 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_hostile_names_are_inert(opened):
    page = opened("hostile")
    expect(page.locator("[src=x], [onerror]")).to_have_count(0)
    assert records.HOSTILE in column(page, 1)
    hover(page.locator(".panel-output .map").first, 0.3, 0.1)
    assert records.HOSTILE in tip(page)
    expect(page.locator(".tip img")).to_have_count(0)


def test_the_numbers_that_are_seen_are_those_of_the_json(opened, made):
    data = summary_json(made["with_skips"].summary)
    visible = opened().evaluate(
        "[...document.querySelectorAll('data')].filter(e => e.checkVisibility())"
        ".map(e => [e.dataset.key, e.value, e.innerText])"
    )
    keys = {key for key, _, _ in visible}
    assert keys >= {"steps.num_skipped", "scale.last", "loss.last", "gradients.share_lost"}
    for key, value, text in visible:
        assert json.loads(value) == at(data, key)
        assert text


# --- tooltips -------------------------------------------------------------------------------------


def test_the_curves_tell_the_step_under_the_pointer(opened):
    page = opened()
    expect(page.locator(".tip")).to_be_hidden()
    hover(page.locator(".plot").first, (41 - 1) / 99)
    assert tip(page).split("\n") == [
        "step 41",
        "loss 2.049",
        "scale 2^14",
        "gradient norm inf",
        "skipped: overflow",
    ]
    expect(page.locator(".cross").first).to_be_visible()
    page.locator("h1").hover()
    expect(page.locator(".tip")).to_be_hidden()


def test_the_curves_can_be_read_with_the_keyboard(opened):
    page = opened()
    curves = page.locator(".curves")
    curves.press("ArrowRight")
    assert tip(page).startswith("step 1\n")
    curves.press("ArrowRight")
    assert tip(page).startswith("step 2\n")
    curves.press("Escape")
    expect(page.locator(".tip")).to_be_hidden()


def test_the_maps_tell_layer_step_and_value(opened, made):
    page = opened()
    page.locator("[for=tab-output]").click()
    hover(page.locator(".panel-output .map").first, 0.5)
    name, step, headroom, lost, *_ = tip(page).split("\n")
    layers = made["with_skips"].summary.of_kind("output")
    assert name == layers[len(layers) // 2].name
    assert step == "step 50"
    assert headroom == f"Headroom: about {round(2 * layers[2].headroom) / 2:g} bits"
    assert lost == "Underflow: none"


def test_the_maps_can_be_read_with_the_keyboard(opened):
    page = opened()
    page.locator("[for=tab-output]").click()
    heat = page.locator(".panel-output .heat")
    heat.press("ArrowDown")
    assert tip(page).startswith("embed\nstep 10\n")
    heat.press("ArrowDown")
    heat.press("ArrowRight")
    assert tip(page).startswith("blocks.0.attn\nstep 20\n")


# --- tables and tabs ------------------------------------------------------------------------------

HEADROOM, LOST = 5, 6


def test_a_click_sorts_and_a_second_click_turns_it_round(opened):
    page = opened()
    worst_first = column(page, 1)
    head(page, HEADROOM).get_by_role("button").click()
    down = [float(text) for text in column(page, HEADROOM) if text != "-"]
    assert down == sorted(down, reverse=True)
    expect(head(page, HEADROOM)).to_have_attribute("aria-sort", "descending")
    head(page, HEADROOM).get_by_role("button").click()
    assert [float(text) for text in column(page, HEADROOM) if text != "-"] == sorted(down)
    expect(head(page, HEADROOM)).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("[aria-sort=ascending], [aria-sort=descending]")).to_have_count(1)
    assert sorted(column(page, 1)) == sorted(worst_first)


def test_enter_sorts_too_and_text_goes_up_first(opened):
    page = opened()
    head(page, 1).get_by_role("button").press("Enter")
    names = column(page, 1)
    assert names == sorted(names)
    expect(page.locator("th:focus-within")).to_have_attribute("aria-sort", "ascending")


def test_shares_are_sorted_as_numbers(opened):
    page = opened()
    head(page, LOST).get_by_role("button").click()
    shares = column(page, LOST)
    assert shares[0] == "12 %"
    assert set(shares[1:]) == {"0"}


def test_layers_can_be_filtered_by_name(opened):
    page = opened()
    page.get_by_label("Filter layers by name").fill("HEAD")
    assert column(page, 1) == ["head.weight"]


def test_there_is_no_other_name_in_the_window(opened):
    names = "Object.getOwnPropertyNames(window).filter(name => !/^\\d+$/.test(name))"
    blank = opened(has_script=False)
    assert set(opened().evaluate(names)) == set(blank.evaluate(names))


# --- zoom, hash, links, CSV -----------------------------------------------------------------------


def drag(page, element, start, end):
    box = element.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()


def test_dragging_zooms_and_a_button_shows_all_again(opened):
    page = opened()
    plot, reset = page.locator(".plot").first, page.get_by_role("button", name="Show all steps")
    expect(reset).to_be_hidden()
    marks = page.locator(".lane .mark:visible")
    expect(marks).to_have_count(5)
    plot.scroll_into_view_if_needed()
    drag(page, plot, 0.35, 0.5)
    expect(marks).to_have_count(2)  # steps 41 and 42; 1, 2 and 80 are outside
    ticks = [int(text) for text in page.locator(".curves .x-axis text").all_text_contents()[:-1]]
    assert ticks
    assert min(ticks) >= 35
    assert max(ticks) <= 51
    hover(plot, 0.5)
    assert tip(page).split("\n")[0] in ("step 43", "step 44")
    reset.click()
    expect(marks).to_have_count(5)
    expect(reset).to_be_hidden()
    hover(plot, (41 - 1) / 99)
    assert tip(page).startswith("step 41\n")


def test_a_click_zooms_nowhere(opened):
    page = opened()
    page.locator(".plot").first.click()
    expect(page.get_by_role("button", name="Show all steps")).to_be_hidden()


def test_tab_filter_and_sort_live_in_the_address(opened, browser):
    page = opened()
    page.locator("[for=tab-output]").click()
    page.locator("#only [value=parameter_gradient]").click()
    page.get_by_label("Filter layers by name").fill("mlp")
    head(page, HEADROOM).get_by_role("button").click()
    page.get_by_label("all columns").check()
    shown = column(page, 1)
    again, _ = visit(browser, page.url)
    assert column(again, 1) == shown
    assert len(shown) == 2
    expect(again.locator(".box:visible")).to_have_class("box panel-output")
    expect(head(again, HEADROOM)).to_have_attribute("aria-sort", "descending")
    expect(head(again, 13)).to_be_visible()
    again.close()


def test_an_address_that_makes_no_sense_is_no_harm(browser, made):
    page, noticed = visit(browser, made["with_skips"].url + "#tab=x&sort0=99up&kind=%00&filter=zzz")
    assert column(page, 1) == []
    assert len(noticed) == 1
    page.close()


def test_a_cell_leads_to_its_layer_also_if_it_is_filtered_out(opened, made):
    page = opened()
    page.get_by_label("Filter layers by name").fill("embed")
    rows = page.locator(".panel-parameter_gradient .rows a")
    rows.last.click()
    number = rows.last.get_attribute("href").removeprefix("#layer-")
    target = page.locator("tr:target")
    expect(target).to_be_in_viewport()
    expect(target).to_have_id(f"layer-{number}")
    assert made["with_skips"].summary.layers[int(number)].name == "head.weight"


def test_a_sentence_leads_to_what_shows_it(opened):
    page = opened()
    page.get_by_role("link", name="the skipped steps").click()
    expect(page.locator("#skips")).to_be_in_viewport()


def test_the_table_is_copied_as_csv(browser, made):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(made["with_skips"].url)
    page.get_by_label("Filter layers by name").fill("head")
    page.get_by_role("button", name="Copy as CSV").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    rows = list(csv.DictReader(io.StringIO(page.evaluate("navigator.clipboard.readText()"))))
    assert [(row["name"], row["underflow"]) for row in rows] == [("head.weight", "12 %")]
    context.close()


@pytest.mark.parametrize("width", [360, 1400])
def test_the_table_of_layers_fits(opened, width):
    page = opened(width=width)
    region = page.get_by_role("region", name="Table of layers")
    assert region.evaluate("element => element.scrollWidth <= element.clientWidth")
    page.get_by_label("all columns").check()
    expect(head(page, 20)).to_be_attached()
    assert head(page, 20).evaluate("element => element.checkVisibility()")


def test_no_heading_stands_at_the_foot_of_a_printed_page(opened):
    page = opened()
    for height in range(700, 1200, 80):
        printed = page.pdf(width="800px", height=f"{height}px", outline=True, tagged=True)
        outline = re.findall(rb"/Dest \[\d+ 0 R /XYZ [\d.-]+ ([\d.-]+) 0\]", printed)
        assert len(outline) == page.locator("h1:visible, h2:visible, h3").count()
        assert min(map(float, outline)) > 90  # points


def test_no_word_at_the_head_of_a_printed_column_is_broken(opened):
    page = opened(width=500, media="print")
    lines = """all => all.filter(head => !head.textContent.includes(" ")).map(head => {
        const range = document.createRange();
        range.selectNodeContents(head);
        return range.getClientRects().length;
    })"""
    assert set(page.locator("#policy thead th").evaluate_all(lines)) == {1}


# --- without JavaScript ---------------------------------------------------------------------------


def test_without_script_all_is_there(opened, made):
    page = opened(has_script=False)
    expect(page.locator(".tip")).to_have_count(0)
    expect(page.locator("body")).to_contain_text("of 100 steps were skipped", use_inner_text=True)
    assert len(column(page, 1)) == len(made["with_skips"].summary.layers)
    expect(page.get_by_label("Filter layers by name")).to_be_hidden()


def test_without_script_tabs_and_kinds_work(opened):
    page = opened(has_script=False)
    box = page.locator(".box:visible")
    expect(box).to_have_class("box panel-parameter_gradient")
    page.locator("[for=tab-output]").click()
    expect(box).to_have_class("box panel-output")
    page.locator("#only [value=output]").click()
    assert set(column(page, 3)) == {"Outputs"}


def test_without_script_marks_have_titles(opened):
    page = opened(has_script=False)
    assert page.locator(".lane title").first.text_content() == "step 1: skipped: overflow"
    assert page.locator(".rows title").first.text_content().startswith("embed\n")
