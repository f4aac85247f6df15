"""Fixtures of the tests of the command line."""

import pytest
from typer.testing import CliRunner

from regard import cli


@pytest.fixture
def run(monkeypatch):
    def run(*arguments: str, width: int = 80):
        monkeypatch.setenv("COLUMNS", str(width))
        return CliRunner().invoke(cli.app, arguments)

    return run
