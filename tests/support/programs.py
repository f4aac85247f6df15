"""Code in a process of its own."""

import os
import subprocess
import sys


def fresh(code: str) -> str:
    """What a new interpreter prints (one that keeps compiled bytecode, as an installed package has it)."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
