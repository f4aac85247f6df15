"""`python -m regard.cli` is the command `regard`."""

from . import app

app(prog_name="regard")
