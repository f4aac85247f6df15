"""The report pages in headless Chromium: a fixture, and functions that read a page."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from regard.inspection.report import to_html

ATTACK = "</script><img src=x onerror='window.harmed=1'><script>window.harmed=1</script><!--"


def part(page: str, pattern: str) -> str:
    found = re.search(pattern, page, re.DOTALL)
    assert found is not None
    return found[1]


def browser_path() -> str | None:
    named = os.environ.get("REGARD_BROWSER")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    problem = None if browser_path() else "no browser: Chromium is not installed"
    if importlib.util.find_spec("playwright") is None:
        problem = "no browser: the package playwright is not installed"
    if problem:
        if os.environ.get("REGARD_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{problem}, and REGARD_REQUIRE_BROWSER=1")
        pytest.skip(problem)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser_path())
        yield started
        started.close()


class Show:
    """show(record, other, ...) opens the page; errors and requests are kept."""

    def __init__(self, browser, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.opened, self.requests, self.errors = [], [], []

    def __call__(self, record, other=None, width=1280, scheme="light", address=""):
        path = self.folder / f"report{len(self.opened)}.html"
        path.write_text(to_html(record, other), "utf-8")
        context = self.browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.opened.append((context, path.as_uri()))
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: self.requests.append(request.url.partition("#")[0]))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(path.as_uri() + address)
        page.wait_for_selector("#map rect.cell")
        return page


@pytest.fixture
def show(browser, tmp_path):
    """Afterwards: there was no error and no request except for the file."""
    show = Show(browser, tmp_path)
    yield show
    assert show.errors == []
    assert show.requests == [address for _, address in show.opened]
    for context, _ in show.opened:
        context.close()


def fills(page) -> list[str]:
    return page.eval_on_selector_all("#map rect.cell", "cells => cells.map(c => c.getAttribute('fill'))")


def colour_of(page, selector: str, name: str) -> list[int]:
    text = page.eval_on_selector(selector, "(node, name) => getComputedStyle(node)[name]", name)
    return [int(c) for c in re.findall(r"\d+", text)[:3]]


def luminance(colour: list[int]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page, selector: str, ground: str) -> float:
    """The contrast ratio of WCAG, which requires 4.5 for text."""
    a, b = luminance(colour_of(page, selector, "color")), luminance(colour_of(page, ground, "backgroundColor"))
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)
