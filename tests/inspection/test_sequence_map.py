"""The map of the whole sequence in the report, in headless Chromium: what it shows, how it zooms."""

import base64
import copy
import math
import re

import pytest

from support.inspections import inspection

LEFT, RIGHT, BOTTOM = 44, 2, 21  # of the canvas, around the map
HEAD = "#L1H0"  # an induction head


def cells_of(record) -> int:
    return len(record["map"]["texts"])


def mass(record, head, query, key) -> float:
    data = base64.b64decode(record["map"]["weights"][head])
    return (data[query * (query + 1) // 2 + key] / 255) ** 2


def point(page, down, across) -> tuple[float, float]:
    """The place of a share of the map's height and width on the screen."""
    page.locator("#sequence").scroll_into_view_if_needed()
    box = page.locator("#sequence").bounding_box()
    return box["x"] + LEFT + across * (box["width"] - LEFT - RIGHT), box["y"] + down * (box["height"] - BOTTOM)


def hover(page, down, across) -> str:
    page.mouse.move(*point(page, down, across))
    return page.inner_text("#sequence-readout")


def places(text) -> tuple[int, int]:
    """The first query and the first key of a reading."""
    found = re.match(r"(?:Queries|Query) (\d+).*→ (?:keys|key) (\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def test_a_cell_is_read(show):
    record = inspection()
    page, n = show(record, address=HEAD), cells_of(record)
    assert f"{record['map']['length']} tokens, cells of 2\u00a0×\u00a02" in page.inner_text("#sequence-title")
    query, key = 30, 12
    text = hover(page, (query + 0.5) / n, (key + 0.5) / n)
    words = [t.replace(" ", "␣", 1) for t in (record["map"]["texts"][query], record["map"]["texts"][key])]
    assert text.startswith(f"Queries 60–61 “{words[0]}” → keys 24–25 “{words[1]}”: "), text
    assert float(text.rpartition(": ")[2]) == pytest.approx(mass(record, 8, query, key), abs=6e-4)
    assert hover(page, 0.2, 0.8).endswith("later, not read")
    page.mouse.move(1, 1)
    assert page.inner_text("#sequence-readout") == "Point at a cell to read it."


def test_a_drag_zooms_and_reset_shows_all(show):
    record = inspection()
    page, n = show(record), cells_of(record)
    assert page.is_disabled("#sequence-out") and page.is_disabled("#sequence-reset")
    page.mouse.move(*point(page, 0.5, 0.25))
    page.mouse.down()
    page.mouse.move(*point(page, 0.75, 0.5), steps=3)
    page.mouse.up()
    query, key = places(hover(page, 0.01, 0.01))
    assert (query, key) == (2 * math.floor(n * 0.5), 2 * math.floor(n * 0.25))
    query, key = places(hover(page, 0.99, 0.99))
    assert abs(query - 1.5 * n) <= 2 and abs(key - n) <= 2
    page.click("#sequence-reset")
    assert places(hover(page, 0.01, 0.01)) == (0, 0) and page.is_disabled("#sequence-reset")
    x, y = point(page, 0.9, 0.1)
    page.mouse.dblclick(x, y)
    assert places(hover(page, 0.01, 0.01))[0] > 0.4 * n
    page.click("#sequence-out")
    assert places(hover(page, 0.01, 0.01)) == (0, 0)


def test_the_wheel_zooms_in_focus_only(show):
    page = show(inspection())
    far = places(hover(page, 0.97, 0.03))
    page.mouse.wheel(0, -100)  # the page scrolls
    assert places(hover(page, 0.97, 0.03)) == far and page.is_disabled("#sequence-reset")
    page.mouse.click(*point(page, 0.97, 0.03))
    scrolled = page.evaluate("scrollY")
    for _ in range(4):
        page.mouse.wheel(0, -100)
    page.wait_for_function("!document.getElementById('sequence-reset').disabled")
    assert page.evaluate("scrollY") == scrolled
    assert places(hover(page, 0.02, 0.97))[0] > 40  # the place under the pointer stayed, the rest moved away
    for _ in range(8):
        page.mouse.wheel(0, 100)
    page.wait_for_function("document.getElementById('sequence-reset').disabled")


def test_the_keyboard_moves_and_zooms(show):
    page, n = show(inspection()), cells_of(inspection())
    page.focus("#sequence")
    page.keyboard.press("ArrowDown")  # the cursor appears in the middle
    middle = places(page.inner_text("#sequence-readout"))
    assert middle == (2 * (n // 2), 2 * (n // 2))
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowDown")
    assert places(page.inner_text("#sequence-readout")) == (middle[0] + 16, middle[1] - 2)
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert not page.is_disabled("#sequence-reset")
    assert places(hover(page, 0.01, 0.01))[0] > 20
    for _ in range(60):
        page.keyboard.press("ArrowUp")  # the view follows
    assert places(page.inner_text("#sequence-readout"))[0] == 0
    assert places(hover(page, 0.01, 0.5))[0] == 0
    page.keyboard.press("0")
    assert page.is_disabled("#sequence-reset")
    page.keyboard.press("+")
    page.keyboard.press("-")
    assert page.is_disabled("#sequence-reset")
    for name in ("sequence-in", "sequence-out", "sequence-reset", "sequence-stretch"):
        assert page.eval_on_selector(f"#{name}", "node => node.tabIndex") == 0


def read_mass(page) -> float:
    page.mouse.move(1, 1)
    shown = page.inner_text("#sequence-readout").rpartition(": ")[2]
    return 0.0 if shown == "less than 0.00001" else float(shown.replace("−", "-"))


def test_another_head_is_shown_at_the_same_place(show):
    first, second = inspection(), inspection(seed=3)
    page, n = show(first, second, address=HEAD), cells_of(first)
    below = [(q, k) for q in range(n) for k in range(q)]
    cell = max(below, key=lambda c: abs(mass(first, 20, *c) - mass(second, 20, *c)))
    page.mouse.click(*point(page, (cell[0] + 0.5) / n, (cell[1] + 0.5) / n))
    page.keyboard.press("+")
    corner = places(hover(page, 0.01, 0.01))
    assert corner != (0, 0)
    found = [read_mass(page)]
    page.click('#map rect[data-head="L2H4"]')
    found.append(read_mass(page))
    page.select_option("#view", "second")
    found.append(read_mass(page))
    expected = [mass(first, 8, *cell), mass(first, 20, *cell), mass(second, 20, *cell)]
    assert found == pytest.approx(expected, abs=6e-4) and abs(expected[1] - expected[2]) > 0.1
    assert places(hover(page, 0.01, 0.01)) == corner


def pixel(page, down, across) -> list[int]:
    code = """(canvas, [left, right, bottom, down, across]) => {
        const ratio = canvas.width / canvas.getBoundingClientRect().width;
        const [width, height] = [canvas.width / ratio - left - right, canvas.height / ratio - bottom];
        const at = [(left + across * width) * ratio, down * height * ratio].map(Math.floor);
        return [...canvas.getContext("2d").getImageData(...at, 1, 1).data];
    }"""
    return page.eval_on_selector("#sequence", code, [LEFT, RIGHT, BOTTOM, down, across])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_masses(show, scheme):
    record = inspection()
    page, n = show(record, address="#L0H2", scheme=scheme), cells_of(record)  # a sink
    head = 2
    low, high = (min, max)
    below = [(q, k) for q in range(30, n) for k in range(q)]
    strong = high(below, key=lambda cell: mass(record, head, *cell))
    weak = low(below, key=lambda cell: mass(record, head, *cell))
    assert mass(record, head, *strong) > 0.5 > 0.01 > mass(record, head, *weak)
    bright, dull = (pixel(page, (q + 0.5) / n, (k + 0.5) / n) for q, k in (strong, weak))
    assert bright[1] > 150 and dull[1] < 40 and bright[3] == dull[3] == 255  # viridis: yellow-green, violet
    assert pixel(page, 0.3, 0.7)[3] == 0  # later keys: nothing is drawn
    page.mouse.move(*point(page, 0.5, 0.2))  # a part without the sink
    page.mouse.down()
    page.mouse.move(*point(page, 0.8, 0.5), steps=3)
    page.mouse.up()
    before = pixel(page, 0.5, 0.5)
    page.check("#sequence-stretch")
    assert pixel(page, 0.5, 0.5)[1] > before[1]
    assert "0.0" in page.inner_text("#sequence-legend")


def test_a_map_that_is_not_causal(show):
    record = copy.deepcopy(inspection())
    n = 4
    square = bytes(range(0, 160, 10))
    texts = ["a", "b", "c", "d"]
    weights = [base64.b64encode(square).decode()] * len(record["heads"])
    record["map"] = {"block": 1, "length": n, "texts": texts, "weights": weights}
    page = show(record)
    assert hover(page, 0.1, 0.9) == f"Query 0 “a” → key 3 “d”: {(30 / 255) ** 2:.3f}"
    assert page.is_disabled("#sequence-in")  # it cannot be larger


def test_a_character_of_several_tokens_is_shown_once(show):
    record = copy.deepcopy(inspection())
    for view in (record["window"], record["top_keys"]):
        view["parts"] = {"9": [1, 3], "10": [2, 3], "11": [3, 3]}
        for i in (9, 10, 11):
            view["tokens"][i if view is record["window"] else str(i)] = " 🐈"
    page = show(record)
    strip = page.locator("#strip")
    assert strip.inner_text().count("🐈") == 1 and strip.locator("button").count() == 48
    assert strip.locator(".joined button").count() == 3
    strip.locator("button").nth(10).click()
    assert page.inner_text("#window-readout").startswith("10 “␣🐈 (2 of 3)” reads")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#window-readout").startswith("11 “␣🐈 (3 of 3)” reads")
    assert "␣🐈 (3 of 3)" in page.eval_on_selector("#strip button[aria-pressed=true]", "node => node.title")
