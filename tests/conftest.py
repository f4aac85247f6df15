"""Fixtures and options of all tests. REGARD_ENGINE=path tests another build of the native engine than the installed one
(`make sanitize`, `make clang`).

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


def _disable_broken_amx():
    """Disable AMX in PyTorch if the processor reports it but does not execute it.

    On some virtual machines PyTorch's own products in bfloat16 end the process with SIGILL. A new process tests this.
    oneDNN reads the variable when PyTorch first uses it, and test workers inherit it."""
    name, flags = "ONEDNN_MAX_CPU_ISA", Path("/proc/cpuinfo")
    if name in os.environ or not flags.exists() or "amx_bf16" not in flags.read_text():
        return
    code = "import torch; x = torch.ones(256, 256, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode < 0:
        os.environ[name] = "AVX512_CORE_BF16"
    else:
        os.environ[name] = "DEFAULT"  # tested already


_disable_broken_amx()

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
    """Seed the generator, so that a test does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Forget what torch.compile has compiled, before the test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=ISAS)
def isa(request):
    """Run the test on each instruction set of this machine. With "each", the test itself loops over them."""
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
    def selected(item):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        native = any(isinstance(value, str) and value == "native" for value in parameters.values())
        return native or not item.get_closest_marker("each_isa") or parameters.get("isa") in (None, *ISAS[:1])

    items[:] = [item for item in items if selected(item)]


@pytest.fixture
def poison(monkeypatch):
    """Fill new memory with NaN (integers: 255, whose bytes read as NaN)."""
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
    """Print how many tests of the report page were skipped because there is no browser."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "no browser: " in str(r.longrepr)]
    if skipped:
        reason = str(skipped[0].longrepr[2]).partition("no browser: ")[2]
        terminalreporter.write_line(f"{len(skipped)} tests of the report page skipped: {reason}", yellow=True)
