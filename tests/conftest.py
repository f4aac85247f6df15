"""REGARD_ENGINE=path tests another build of the native engine than the installed one (`make sanitize`, `make clang`).

Tests of the kernels use the fixture `isa`, which runs them on each instruction set of this machine, and `poison`, which
fills fresh memory with NaN. In a module that tests several backends, `pytestmark = pytest.mark.each_isa` runs the cases
with a parameter "native" on each instruction set, and all others once.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _tame_amx():
    """Keep PyTorch from AMX where the processor announces its instructions and then refuses them.

    Some virtual machines do: there, PyTorch's own products in bfloat16 end the process with SIGILL. A process of its
    own finds out; oneDNN reads the variable when PyTorch first uses it, and test workers inherit it."""
    name, flags = "ONEDNN_MAX_CPU_ISA", Path("/proc/cpuinfo")
    if name in os.environ or not flags.exists() or "amx_bf16" not in flags.read_text():
        return
    code = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0:
        os.environ[name] = "AVX512_CORE_BF16"
    else:
        os.environ[name] = "DEFAULT"  # looked at already


_tame_amx()

import torch  # noqa: E402 - before the engine: its OpenMP runtime is the one that the engine finds

if path := os.environ.get("REGARD_ENGINE"):
    spec = importlib.util.spec_from_file_location("regard._native", path)
    assert spec is not None and spec.loader is not None
    sys.modules["regard._native"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

try:
    from regard import _native as engine  # type: ignore[attr-defined]

    ISAS = engine.isas()
except ImportError:
    engine, ISAS = None, []


@pytest.fixture(autouse=True)
def _seeded():
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(params=ISAS)
def isa(request):
    """The test on each instruction set of this machine; "each": it goes through them by itself."""
    before = engine.isa()
    if request.param != "each":
        engine.use(request.param)
    yield request.param
    engine.use(before)


def pytest_configure(config):
    config.addinivalue_line("markers", 'each_isa: cases with a parameter "native" run on each instruction set')


def pytest_generate_tests(metafunc):
    if ISAS and metafunc.definition.get_closest_marker("each_isa") and "isa" not in metafunc.fixturenames:
        metafunc.fixturenames.append("isa")
        metafunc.parametrize("isa", ISAS, indirect=True)


def pytest_collection_modifyitems(items):
    def wanted(item):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        native = any(isinstance(value, str) and value == "native" for value in parameters.values())
        return native or not item.get_closest_marker("each_isa") or parameters.get("isa") in (None, ISAS[0])

    items[:] = [item for item in items if wanted(item)]


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN (integers: 255, whose bytes read as NaN)."""
    plain = torch.empty

    def empty(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 255) if not tensor.is_meta else tensor

    monkeypatch.setattr(torch, "empty", empty)
    if engine is not None:
        engine.poison(True)
    yield
    if engine is not None:
        engine.poison(False)


def pytest_terminal_summary(terminalreporter):
    """How many tests of the report page were not run for want of a browser."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "no browser: " in str(r.longrepr)]
    if skipped:
        reason = str(skipped[0].longrepr[2]).partition("no browser: ")[2]
        terminalreporter.write_line(f"{len(skipped)} tests of the report page skipped: {reason}", yellow=True)
