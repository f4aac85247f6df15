"""`python -m regard` is the command `regard`, for launchers that start a module: `torchrun -m regard lab run ...`."""

from .cli import app

app(prog_name="regard")
