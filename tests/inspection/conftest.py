"""The fixtures `browser` and `show` for the tests of the report pages."""

from support.browser import browser, show

__all__ = ["browser", "show"]
