"""The command `regard` in a process of its own, and its error if standard output is full."""

import subprocess
import sys

FULL = "error: stdout: expected a stream that can be written, got an error: No space left on device"


def command(*arguments, **streams):
    command = [sys.executable, "-m", "regard", *arguments]
    return subprocess.run(command, text=True, check=False, **{"stderr": subprocess.PIPE} | streams)
