"""CONTRIBUTING's recipes, carried out: each is applied to a copy of the source, and the new part is used there.

In CONTRIBUTING.md a recipe is a section "### ... name" with blocks fenced as ```py:

    # append to PATH       the block is added at the end of a file
    # new file PATH        the block is a file
    # in PATH              the line that follows `# -` is replaced by the lines that follow `# +`
    # then                 the block runs in a new process on the changed copy
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
# An editable installation finds regard before PYTHONPATH does. Python imports this file at its start.
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
"""
HEADER = re.compile(r"# (append to|new file|in|then) ?(\S*)")


class Block(NamedTuple):
    kind: str
    path: str
    code: str


def recipes() -> dict[str, list[Block]]:
    found = {}
    for section in re.split(r"(?m)^### \.\.\. ", PAGE)[1:]:
        blocks = []
        for code in re.findall(r"(?ms)^```py\n(.*?)^```$", re.split(r"(?m)^## ", section)[0]):
            header, _, rest = code.partition("\n")
            match = HEADER.fullmatch(header)
            assert match is not None, header
            blocks.append(Block(match[1], match[2], rest))
        if blocks:
            found[section.partition("\n")[0]] = blocks
    return found


RECIPES = recipes()
# What the project promises of each: files touched, and lines of the new part.
PROMISES = {
    "a regulariser": (1, 40),
    "a regulariser with a parameter": (1, 40),
    "a prior": (1, 40),
    "a statistic": (1, 15),
    "a backend": (2, 60),
    "an experiment": (2, 80),
    "a finding": (1, 40),
}


def apply(blocks: list[Block], root: Path) -> None:
    for block in blocks:
        path = root / block.path
        if block.kind == "append to":
            path.write_text(path.read_text("utf-8").rstrip() + "\n\n\n" + block.code, "utf-8")
        elif block.kind == "new file":
            assert not path.exists()
            path.write_text(block.code, "utf-8")
        elif block.kind == "in":
            old = "".join(line[4:] + "\n" for line in block.code.splitlines() if line.startswith("# - "))
            new = "".join(line[4:] + "\n" for line in block.code.splitlines() if line.startswith("# + "))
            text = path.read_text("utf-8")
            assert text.count(old) == 1 and old, f"{block.path} has no single line {old!r}"
            path.write_text(text.replace(old, new), "utf-8")


def use(blocks: list[Block], root: Path) -> subprocess.CompletedProcess:
    code = "\n".join(block.code for block in blocks if block.kind == "then")
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    (root / "src" / "sitecustomize.py").write_text(WITHOUT_EDITABLE, "utf-8")
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def copy(tmp_path):
    """The source, with the engine that is installed."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")  # the headers that compiled functions include
    engine = pytest.importorskip("regard._native", reason="the native engine was not built")
    shutil.copy(engine.__file__, tmp_path / "src" / "regard")
    return tmp_path


def test_every_promise_has_a_recipe():
    assert set(RECIPES) == set(PROMISES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_as_small_as_promised(name):
    files, lines = PROMISES[name]
    changes = [block for block in RECIPES[name] if block.kind != "then"]
    assert len({block.path for block in changes}) <= files
    for number, block in enumerate(changes):
        written = [line for line in block.code.splitlines() if line.strip() and not line.startswith("# - ")]
        assert len(written) <= (lines if number == 0 else 2), block.path  # the rest is an entry in a registry


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works(name, copy):
    apply(RECIPES[name], copy)
    done = use(RECIPES[name], copy)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_without_the_change_its_use_fails(name, copy):
    """Otherwise the recipe would show nothing."""
    assert use(RECIPES[name], copy).returncode != 0
