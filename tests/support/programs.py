"""Run code in a new process."""

import os
import subprocess
import sys


def fresh(code: str) -> str:
    """The output of code in a new interpreter. It writes compiled bytecode, as an installed package has it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
