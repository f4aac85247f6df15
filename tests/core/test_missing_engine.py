"""Without the native engine: a warning at the first use on a CPU, once, with the remedy; and no error in a compiled
graph."""

import warnings

import pytest
import torch

import regard
from regard import Transport, Tsallis
from regard.backends.native import engine
from regard.features import LinearAttention
from support.programs import fresh

ABSENT = "the native engine was not built (no C++ compiler at installation?)"
q = torch.randn(1, 2, 8, 4)


@pytest.fixture
def without_engine(monkeypatch):
    monkeypatch.setattr(engine, "_loaded", (None, ABSENT))
    monkeypatch.setattr(engine, "_warned", False)


def _messages(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return found


@pytest.mark.parametrize(
    "use",
    [
        lambda: regard.attention(q, q, q),
        lambda: regard.attention(q, q, q, problem=Transport(Tsallis(1.5))),
        lambda: regard.topk(q, q, 2),
        lambda: LinearAttention()(q, q, q),
    ],
    ids=["softmax", "entmax", "topk", "features"],
)
def test_the_first_use_warns_once_with_the_remedy(without_engine, use):
    (warning,) = _messages(use)
    text = str(warning.message)
    assert text.startswith(f"regard uses its slower CPU backends: {ABSENT}. Install a C++17 compiler")
    assert "pip install -v" in text and warning.filename == __file__  # the line of the user, not one of ours
    assert _messages(use) == []


def test_it_can_be_silenced(without_engine):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="regard uses its slower CPU backends")
        regard.attention(q, q, q)
    assert found == []


def test_other_devices_and_named_backends_do_not_warn(without_engine):
    meta = q.to("meta")
    assert _messages(lambda: regard.attention(meta, meta, meta)) == []
    assert _messages(lambda: regard.attention(q, q, q, backend="torch")) == []
    assert len(_messages(lambda: regard.attention(q, q, q))) == 1


def test_with_the_engine_nothing_is_said(monkeypatch):
    pytest.importorskip("regard._native", reason="the native engine was not built")
    monkeypatch.setattr(engine, "_warned", False)
    assert _messages(lambda: regard.attention(q, q, q, problem=Transport(temperature=0.0))) == []  # native declines it


PROGRAM = """
import sys, warnings
sys.modules["regard._native"] = None  # an import of it raises
import torch, regard
q = torch.randn(1, 2, 8, 4)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    compiled = torch.compile(lambda q: regard.attention(q, q, q), backend="aot_eager", fullgraph=True)
    out = compiled(q)
    print(sum("regard" in str(w.message) for w in found), "while tracing")
    assert torch.allclose(out, regard.attention(q, q, q), atol=1e-5)
    regard.attention(q, q, q)
    print(sum("was not built" in str(w.message) for w in found), "in eager mode")
"""


def test_a_compiled_first_use_neither_warns_nor_breaks():
    assert fresh(PROGRAM).splitlines() == ["0 while tracing", "1 in eager mode"]
