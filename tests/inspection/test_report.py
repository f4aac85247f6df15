"""The report: one file that loads nothing, shows the record and executes nothing of it.

The page itself is tested in headless Chromium. Without it these tests are skipped and counted;
REGARD_REQUIRE_BROWSER=1 makes that a failure, REGARD_BROWSER names another Chromium, and REGARD_SCREENSHOTS a folder
for screenshots.
"""

import base64
import copy
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

from regard.inspection.findings import find, verdict
from regard.inspection.report import incomparable, labels, to_html
from support.browser import ATTACK, colour_of, contrast, fills, luminance, part
from support.inspections import TEXT, inspection, tiled

ROOT = Path(__file__).resolve().parents[2]


def hostile() -> dict:
    """A record with a script in every text."""
    record = copy.deepcopy(inspection())
    record["provenance"].update(model=ATTACK, text=ATTACK, problem=ATTACK)
    record["window"]["tokens"][5] = ATTACK
    record["map"]["texts"] = [ATTACK] * len(record["map"]["texts"])
    record["provenance"]["begins_with"] = ATTACK
    record["top_keys"]["tokens"] = dict.fromkeys(record["top_keys"]["tokens"], ATTACK)
    record["findings"] = [f.to_dict() for f in find(record)]
    for finding in record["findings"]:
        finding.update(rule=ATTACK, message=ATTACK, why=ATTACK, remedy=ATTACK, source=ATTACK)
    record["statistics"].append(ATTACK)
    record["heads"][0]["mean"][ATTACK] = 1.0
    record["positions"]["values"][ATTACK] = record["positions"]["values"]["entropy"]
    return record


def scripts() -> list:
    found = [file for file in resources.files("regard.inspection").iterdir() if file.name.endswith(".js")]
    assert len(found) == 6
    return found


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_contains_the_record():
    record = inspection()
    page = to_html(record)
    data = json.loads(part(page, r'<script type="application/json" id="data">(.*?)</script>'))
    found = find(record)
    assert data["record"] == {**record, "findings": [f.to_dict() for f in found]}
    assert html.escape(verdict(record, found)) in page
    assert page == to_html(record)


def test_findings_in_the_record_are_shown_as_they_are():
    record = copy.deepcopy(inspection())
    record["findings"] = [find(record)[0].to_dict()]
    data = json.loads(part(to_html(record), r'id="data">(.*?)</script>'))
    assert data["record"]["findings"] == record["findings"]


def test_the_policy_allows_the_page_s_own_script_and_style_only():
    page = to_html(inspection())
    policy = part(page, r'http-equiv="Content-Security-Policy" content="(.*?)"')
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        text = part(page, rf"<{tag}>(.*?)</{tag}>")
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert "{{" not in page


def test_the_file_refers_to_nothing():
    page = to_html(inspection())
    assert set(re.findall(r"https?://[\w./-]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, not an address
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "@import" not in page and "url(" not in part(page, r"<style>(.*?)</style>")


def test_text_is_never_markup():
    script = "".join(file.read_text("utf-8") for file in scripts())
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in script
    page = to_html(hostile(), hostile())
    assert "<img" not in page
    assert page.count("<script") == page.count("</script") == 2
    assert html.escape(ATTACK) in page


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which checks the script's syntax, is not installed")
def test_the_script_parses():
    for file in scripts():
        with resources.as_file(file) as path:
            subprocess.run(["node", "--check", str(path)], check=True)


def test_a_wheel_contains_the_pages(tmp_path):
    code = (
        "import sys; from scikit_build_core.build import build_wheel; "
        "print(build_wheel(sys.argv[1], {'wheel.cmake': 'false', 'wheel.py-api': 'py3'}))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    parts = {"page.html", "page.css", "training.html"} | {file.name for file in scripts()}
    assert {f"regard/inspection/{part}" for part in parts} <= set(names)


def named(**about) -> dict:
    return {"provenance": {"model": "m"} | about}


def test_two_records_are_labelled_by_what_differs():
    long = "You are a helpful assistant who answers briefly and in one language. "
    for first, second, expected in (
        (named(model="a", begins_with="x"), named(model="b", begins_with="y"), ("a", "b")),
        (named(begins_with="Once upon a time"), named(begins_with="The cat"), ("“Once upon a time”", "“The cat”")),
        (named(begins_with="a " * 60), named(begins_with="b"), ("“" + "a " * 20 + "…”", "“b”")),
        (
            named(begins_with=long + "What is rain? Say it in words that I know."),
            named(begins_with=long + "What is snow?"),
            ("“… rain? Say it in words that I know.”", "“… snow?”"),
        ),
        (named(begins_with=long[:-1]), named(begins_with=long + "So?"), ("“… language.”", "“… language. So?”")),
        (named(begins_with="x", text="a.txt"), named(begins_with="x", text="b.txt"), ("a.txt", "b.txt")),
        (named(begins_with="x"), named(begins_with="x"), ("m (first)", "m (second)")),
        ({}, {}, ("model (first)", "model (second)")),
        (named(begins_with="x"), named(), ("m (first)", "m (second)")),
    ):
        assert labels(first, second) == expected


def test_records_of_other_shapes_are_not_compared():
    record = inspection()
    assert incomparable(record, inspection(seed=3)) is None
    reason = incomparable(record, tiled(record, 4, 8))
    assert reason is not None
    assert "6 layers with 48 heads in all (8 each), the second 4 layers with 32 heads in all (8 each)" in reason
    with pytest.raises(ValueError, match="other: expected format"):
        to_html(record, {})


# --- the page in a browser --------------------------------------------------------------------------------------------


def rows(page) -> list[str]:
    return page.eval_on_selector_all("#table tbody tr", "rows => rows.map(r => r.dataset.head)")


def test_the_map_shows_every_head(show):
    page = show(inspection())
    assert page.locator("#map rect.cell").count() == 48
    assert len(set(fills(page))) > 30
    assert "1 alarm" in page.inner_text("#verdict")
    assert "entropy / log n" in page.inner_text("#map-legend")


def test_the_metric_changes_the_map(show):
    record = inspection()
    page = show(record)
    before = fills(page)
    page.select_option("#metric", "first_key_mass")
    after = fills(page)
    assert after != before
    # Colours follow the values: the largest sink is at viridis' yellow end, the smallest at its violet one.
    masses = [h["mean"]["first_key_mass"] for h in record["heads"]]
    assert sorted(range(48), key=masses.__getitem__)[-1] == max(range(48), key=lambda i: green(after[i]))
    page.select_option("#metric", "relative_norm")
    before = fills(page)
    page.check("#stretch")
    assert fills(page) != before
    norms = [h["mean"]["relative_norm"] for h in record["heads"]]
    assert fills(page)[norms.index(min(norms))] == "rgb(68,1,84)"  # the lower end of the scale is the smallest value
    page.uncheck("#stretch")
    page.select_option("#metric", "first_key_mass")
    page.select_option("#kind", "max")
    assert fills(page) != after
    assert "weight on the first key, largest over queries" in page.inner_text("#map-legend")


def green(colour: str) -> int:
    return int(colour.split(",")[1])


def test_a_click_opens_a_head(show):
    record = inspection()
    page = show(record)
    page.click('#map rect[data-head="L0H2"]')
    assert page.inner_text("#panel-title") == "Layer 0, head 2"
    assert page.url.endswith("#L0H2")
    entropy = next(h["mean"]["entropy"] for h in record["heads"] if (h["layer"], h["head"]) == (0, 2))
    assert f"{entropy:.3f}" in page.inner_text("#numbers")
    assert "sink" in page.inner_text("#panel-findings")
    page.click('#scatter circle[data-head="L3H4"]')
    assert page.inner_text("#panel-title") == "Layer 3, head 4"


def test_the_keyboard_reaches_and_moves(show):
    page = show(inspection())
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.parentElement.id") == "map":
            break
    else:
        pytest.fail("Tab does not reach the map")
    # The page opens at the most severe finding, layer 2, head 0.
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#readout").startswith("Layer 1, head 1: entropy / log n")
    assert page.inner_text("#panel-title") == "Layer 2, head 0"
    page.keyboard.press("Enter")
    assert page.inner_text("#panel-title") == "Layer 1, head 1"
    page.focus("#scatter svg")
    page.keyboard.press("ArrowRight")
    assert not page.inner_text("#readout").startswith("Layer 1, head 1:")


def test_the_cursor_is_shared(show):
    page = show(inspection())
    page.hover('#map rect[data-head="L4H5"]')
    assert page.inner_text("#readout").startswith("Layer 4, head 5:")
    assert page.get_attribute("#table tr.cursor", "data-head") == "L4H5"
    mark, point = (page.get_attribute(s, "cx") for s in ("#scatter .mark.edge", '#scatter [data-head="L4H5"]'))
    assert mark == point
    page.hover('#table tr[data-head="L0H1"]')
    assert page.inner_text("#readout").startswith("Layer 0, head 1:")


def test_the_table_sorts_and_filters(show):
    record = inspection()
    page = show(record)
    names = [f"L{h['layer']}H{h['head']}" for h in record["heads"]]
    assert rows(page) == names
    by_entropy = sorted(range(48), key=lambda i: record["heads"][i]["mean"]["entropy"])
    page.click('#table button[data-column="entropy"]')
    assert rows(page) == [names[i] for i in reversed(by_entropy)]
    assert page.get_attribute("#table th:has(button[data-column=entropy])", "aria-sort") == "descending"
    page.keyboard.press("Enter")  # the button keeps the focus
    assert rows(page) == [names[i] for i in by_entropy]
    page.select_option("#rule", "diffuse")
    diffuse = {f"L{f.layer}H{f.head}" for f in find(record) if f.rule == "diffuse"}
    assert set(rows(page)) == diffuse


def test_findings_lead_to_their_heads(show):
    page = show(inspection())
    page.locator("#findings summary", has_text="induction").click()
    page.locator("#findings details[open] a", has_text="L1 H0").first.click()
    assert page.inner_text("#panel-title") == "Layer 1, head 0"
    assert "induction" in page.inner_text("#panel-findings")


def test_an_address_names_a_head(show):
    assert show(inspection(), address="#L5H7").inner_text("#panel-title") == "Layer 5, head 7"
    assert show(inspection(), address="#nowhere").inner_text("#panel-title") == "Layer 2, head 0"


def test_the_views_of_a_head(show):
    record = inspection()
    page = show(record, address="#L0H0")  # a previous-token head
    assert page.locator("#position path").count() == 2  # the head and equal weights
    assert page.locator("#path path").count() == 1
    assert "τ = 1:" in page.inner_text("#path .readout")
    page.focus("#path svg[tabindex]")
    page.keyboard.press("ArrowLeft")
    assert f"τ = 0.71: this head {record['paths']['entropy'][0][2]:.3f}" in page.inner_text("#path .readout")
    assert page.inner_text("#window-title") == "Weights between the first 48 tokens"
    page.locator("#strip button").nth(20).click()
    assert re.match(r"20 .* reads 19 .* most: (0\.9|1)", page.inner_text("#window-readout"))
    page.focus("#window")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#window-readout").startswith("21 ")
    box = page.locator("#window").bounding_box()
    page.mouse.move(box["x"] + box["height"] * 9.5 / 48, box["y"] + box["height"] * 10.5 / 48)
    assert re.match(r"10 .* reads 9 “␣lay”: (0\.9|1)", page.inner_text("#window-readout"))
    query = record["top_keys"]["queries"][12]
    page.select_option("#query", str(query))
    assert page.locator("#top .place").first.inner_text() == str(query - 1)
    page.click("#statistics-details summary")
    assert page.locator("#statistics tbody tr").count() == len(record["statistics"])


def test_a_short_sequence_has_one_map_of_all_its_tokens(show):
    record = copy.deepcopy(inspection())
    del record["map"]
    page = show(record)
    assert not page.is_visible("#sequence-figure")
    assert page.inner_text("#window-title") == "Weights between the 48 tokens"


def test_the_provenance_is_plain_text(show):
    record = copy.deepcopy(inspection())
    record["provenance"] |= {"problems": {"regard": "Transport(KL())", "other": None}, "declared": {"regard": "{}"}}
    shown = dict(line.split("\t", 1) for line in show(record).inner_text("#provenance").splitlines())
    assert shown["problems"] == "regard: Transport(KL()); other: –" and "declared" not in shown
    assert shown["tokens"] == f"{record['provenance']['tokens']:,}"


def test_a_record_without_views_hides_them(show):
    page = show(tiled(inspection(), 3, 4))
    for view in ("path", "sequence", "window", "strip", "top"):
        assert not page.is_visible(f"#{view}-figure")
    assert page.is_visible("#position-figure")
    bare = {name: inspection()[name] for name in ("format", "version", "statistics", "heads")}
    page = show(bare)
    assert not page.is_visible("#position-figure")
    assert page.inner_text("h1") == "model"


def test_missing_numbers_are_shown_as_missing(show):
    record = copy.deepcopy(inspection())
    for name in ("normalized_entropy", "induction"):
        record["heads"][3]["mean"][name] = None
    page = show(record)
    assert page.get_attribute('#map rect[data-head="L0H3"]', "class") == "cell missing"
    page.hover('#map rect[data-head="L0H3"]')
    assert "entropy / log n –" in page.inner_text("#readout")
    page.click('#table button[data-column="induction"]')
    assert rows(page)[-1] == "L0H3"
    page.click('#table button[data-column="induction"]')
    assert rows(page)[-1] == "L0H3"


def test_two_checkpoints_are_compared(show):
    first, second = inspection(), inspection(seed=3)
    page = show(first, second)
    assert "Compared with" in page.inner_text("#compared")
    own = fills(page)
    page.select_option("#view", "second")
    assert fills(page) != own
    page.select_option("#view", "difference")
    assert "minus" in page.inner_text("#map-legend")
    changes = [
        b["mean"]["normalized_entropy"] - a["mean"]["normalized_entropy"]
        for a, b in zip(first["heads"], second["heads"], strict=True)
    ]
    order = sorted(range(48), key=lambda i: -changes[i])
    page.click('#table button[data-column="difference"]')
    names = [f"L{h['layer']}H{h['head']}" for h in first["heads"]]
    assert rows(page) == [names[i] for i in order]
    page.hover(f'#map rect[data-head="{names[order[-1]]}"]')
    assert f"−{-changes[order[-1]]:.3f}" in page.inner_text("#readout")
    # Red is more, blue is less.
    red, _, blue = (int(c) for c in re.findall(r"\d+", fills(page)[order[0]]))
    assert red > blue
    red, _, blue = (int(c) for c in re.findall(r"\d+", fills(page)[order[-1]]))
    assert red < blue
    assert page.locator("#comparison-table tbody tr").count() == len(first["statistics"])
    assert page.locator("#path path").count() == 2


def test_texts_of_different_lengths_are_compared_as_far_as_both_go(show):
    long, short = inspection(), inspection(text=" ".join(TEXT.split(" ")[:40]))
    for first, second in ((long, short), (short, long)):
        page = show(first, second)
        assert page.locator("#position path").count() == 3  # both heads and equal weights
        assert (f"{labels(first, second)[1]} –" in page.inner_text("#position .readout")) == (first is long)


def test_two_prompts_are_labelled_by_their_texts(show):
    first, second = inspection(), inspection(text="Once upon a time there was a cat . " + TEXT)
    page = show(first, second)
    words = ["“The cat sat on the mat and the dog lay …”", "“Once upon a time there was a cat . The …”"]
    assert page.inner_text("#compared").startswith(f"Compared with {words[1]}.")
    assert page.eval_on_selector_all("#view option", "all => all.map(o => o.text)") == [*words, "difference"]
    assert words[0] in page.inner_text("#panel-title") and words[1] in page.inner_text("#comparison-table")


def test_long_labels_do_not_stack_in_the_header(show):
    first, second = (copy.deepcopy(inspection()) for _ in range(2))
    first["provenance"]["begins_with"] = "one long prompt of many short words that has no end"
    second["provenance"]["begins_with"] = "the other prompt is as long as it and has no end"
    page = show(first, second)
    heights = page.eval_on_selector_all("#table thead button", "nodes => nodes.map(n => n.offsetHeight)")
    line = page.eval_on_selector("#table thead button", "node => parseFloat(getComputedStyle(node).lineHeight)")
    assert max(heights) <= 5 * line


def test_the_most_informative_statistics_come_first(show):
    page = show(inspection())
    columns = page.eval_on_selector_all("#table thead button", "nodes => nodes.map(n => n.dataset.column)")
    telling = ["entropy", "normalized_entropy", "score_variance", "first_key_mass", "max_weight", "max_scores"]
    assert [c for c in columns if c in inspection()["statistics"]][:6] == telling
    assert set(inspection()["statistics"]) <= set(columns)


def test_records_of_different_shapes_show_a_message(show):
    page = show(inspection(), tiled(inspection(), 4, 8))
    assert "Not compared head by head: the first has 6 layers" in page.inner_text("#comparison-message")
    assert not page.is_visible("#view")
    assert page.locator("#map rect.cell").count() == 48


def test_a_script_in_the_text_is_shown_and_not_executed(show):
    page = show(hostile(), hostile())
    page.select_option("#metric", ATTACK)
    page.select_option("#position-statistic", ATTACK)
    page.locator("#strip button").nth(5).click()
    page.hover("#map rect.cell >> nth=0")
    page.hover("#sequence")
    assert ATTACK[:30] in page.inner_text("#sequence-readout")
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0
    assert page.inner_text("h1") == ATTACK
    assert ATTACK in page.inner_text("#strip")
    assert ATTACK in page.inner_text("#top")


def test_the_policy_blocks_requests(show):
    page = show(inspection())
    failures = []
    page.on("requestfailed", lambda request: failures.append((request.url, request.failure)))
    with page.expect_event("requestfailed"):
        page.evaluate("() => { new Image().src = 'https://example.invalid/x.png'; }")
    assert failures == [("https://example.invalid/x.png", "csp")]
    assert show.requests.pop() == "https://example.invalid/x.png"  # the request that the policy blocked
    assert "violates the following Content Security Policy" in show.errors.pop()


@pytest.mark.parametrize(("layers", "heads"), [(30, 9), (48, 64), (1, 1)])
def test_models_of_any_size(show, layers, heads):
    page = show(tiled(inspection(), layers, heads))
    assert page.locator("#map rect.cell").count() == layers * heads
    assert page.locator("#map svg").bounding_box()["width"] < 640
    shown = min(layers * heads, 200)
    assert page.locator("#table tbody tr").count() == shown
    if layers * heads == 270:
        page.click("#more")
        assert page.locator("#table tbody tr").count() == layers * heads
    corner = f"L{layers - 1}H{heads - 1}"
    page.click(f'#map rect[data-head="{corner}"]')
    assert page.inner_text("#panel-title") == f"Layer {layers - 1}, head {heads - 1}"


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280), ("dark", 360)])
def test_it_is_readable_on_any_screen(show, tmp_path, scheme, width):
    page = show(inspection(), inspection(seed=3), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector, ground in (("body", "body"), (".facts", "body"), (".tag", "#panel"), (".verdict", ".verdict")):
        assert contrast(page, selector, ground) > 4.5, selector
    assert (luminance(colour_of(page, "body", "backgroundColor")) < 0.1) == (scheme == "dark")
    folder = Path(os.environ.get("REGARD_SCREENSHOTS", tmp_path))
    shot = page.screenshot(path=str(folder / f"report-{scheme}-{width}.png"), full_page=True)
    assert len(shot) > 50_000
