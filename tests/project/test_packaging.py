"""`import regard` is fast and loads no heavy packages, and the package's metadata is consistent."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import regard
from support.programs import fresh

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ("transformers", "triton", "matplotlib", "plotly", "pandas", "IPython", "torch._dynamo", "torch._inductor")


def test_import_adds_under_100_ms_to_torch():
    # Processor time, so that other work on the machine does not matter. Without the garbage collector: whether it
    # starts during an import depends on what was allocated before, and it walks through all of PyTorch's objects.
    code = "import gc, time, torch; gc.disable(); began = time.process_time(); import regard"
    code += "; print(time.process_time() - began)"
    seconds = []
    for _ in range(5):  # the first run may have to compile bytecode
        seconds.append(float(fresh(code)))
        if seconds[-1] < 0.1:
            return
    pytest.fail(f"import regard took {seconds} s")


def test_import_loads_no_heavy_packages():
    code = "import sys, torch; before = set(sys.modules); import regard; print(*(set(sys.modules) - before))"
    loaded = fresh(code).split()
    assert "regard.operator" in loaded
    assert [m for m in loaded if m.startswith(HEAVY)] == []
    foreign = {m.partition(".")[0] for m in loaded} - {"regard", "torch"} - sys.stdlib_module_names
    assert foreign == set()  # only the command `regard` imports typer and rich


def test_packages_load_when_first_used():
    code = "import regard; print(*(getattr(regard, name).__name__ for name in {names}))"
    names = ("auditing", "estimation", "features", "geometry", "hf", "inspection", "lab", "nn", "testing")
    assert fresh(code.format(names=names)).split() == [f"regard.{name}" for name in names]


def test_public_names_exist_once():
    assert len(set(regard.__all__)) == len(regard.__all__)
    assert all(hasattr(regard, name) for name in regard.__all__)
    modules = {path.stem for path in (ROOT / "src" / "regard").iterdir()}
    assert not modules & set(regard.__all__)  # a module would hide a function of the same name


def test_the_lock_pins_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(r for e in extras for r in e),
    ]
    lock = (ROOT / "constraints.txt").read_text()
    pinned = {name.lower().replace("_", "-") for name in re.findall(r"^([\w.-]+)==[\w.]+$", lock, re.MULTILINE)}
    for requirement in requirements:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert name[0].lower() in pinned, requirement
    assert "+" not in lock  # a local version (such as +cpu of torch) is not on every index
