"""Print requirements of pyproject.toml, one per line: `requirements.py EXTRA ...` prints those of regard and of extras.

`requirements.py --oldest` prints constraints.txt with the versions of constraints-oldest.txt where that file has one.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def requirements(*extras: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]


def pins(file: str) -> dict[str, str]:
    """The version of each package that a file of constraints names, by the package's normalised name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def main() -> None:
    if sys.argv[1:] == ["--oldest"]:
        together = pins("constraints.txt") | pins("constraints-oldest.txt")
        print(*(f"{name}=={version}" for name, version in together.items()), sep="\n")
    else:
        print(*requirements(*sys.argv[1:]), sep="\n")


if __name__ == "__main__":
    main()
