"""The fixture `browser` for the tests of the report pages."""

from support.browser import browser

__all__ = ["browser"]
