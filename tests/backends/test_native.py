"""The native engine against the definition in float64: every statistic, every gradient, on every instruction set here.

The tolerance is a multiple of the reference backend's own error in the same dtype, plus a few float32 units.
Other subjects have files of their own: test_native_bf16, test_native_links, test_native_lists, test_native_rows.
"""

import math
import os
import random
import struct
import subprocess
import sys
import threading

import pytest
import torch

import regard
from regard import ALiBi, AuxRequest, Bias, Documents, FermiDirac, Rows, Transport
from regard.backends import BACKENDS
from regard.backends.native import backend
from support.native import END, PROBLEMS, SHAPES, Case, error, normal, qkv
from support.threads import with_threads

pytestmark = pytest.mark.usefixtures("isa", "poison")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_the_definition(name, shape):
    tensors, call = PROBLEMS[name](4, shape["Tq"], shape["Tk"])
    Case(qkv(1, **shape) | tensors, call).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["plain", "causal", "biases", "sink", "mask"])
def test_dtypes(name, dtype):
    tensors, call = PROBLEMS[name](4, 50, 60)
    Case(qkv(2, Tq=50, Tk=60, dtype=dtype) | tensors, call).check()


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (80, 24), (33, 50)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_half_types(dtype, D, Dv):
    """Calls with few rows read keys and values in place, in another order."""
    for Tq, Tk in ((1, 75), (2, 1500)):
        tensors, call = PROBLEMS["causal"](4, Tq, Tk)
        Case(qkv(2, Hkv=1, Tq=Tq, Tk=Tk, D=D, Dv=Dv, dtype=dtype) | tensors, call).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("Tq", [1, 40])
def test_scores_at_the_edge_of_float32(Tq, dtype):
    """A row whose scores over its temperature exceed the range has the plan of the definition, and other rows do not
    change. (test_range.py has more.)"""
    query = torch.ones(1, 1, Tq, 4).to(dtype)
    key = torch.zeros(1, 1, 5, 4)
    key[0, 0, :, 0] = torch.tensor([1.0, 0.5, 0.75, -1.0, 0.125])
    value = normal(1, 1, 1, 5, 3).to(dtype)
    request = AuxRequest(lse=True, entropy=True, max_scores=True)
    for size, temperature in ((2.2e38, None), (3.3e38, None), (1.0, 1e-37), (1.0, 5e-39), (1.0, 2e-39)):
        rows = torch.full((1, 1, Tq, 1), 1.0 if temperature else 1e3)

        def run(first, size=size, rows=rows):
            rows = torch.cat([torch.full((1, 1, 1, 1), first), rows[:, :, 1:]], 2)
            problem = Transport(temperature=rows)
            keys = (size * key).to(dtype)
            return regard.attention(
                query, keys, value, scale=1.0, return_aux=request, problem=problem, backend="native"
            )

        (out, aux), (others, _) = run(temperature or 1.0), run(1e4)
        assert torch.equal(out[0, 0, 0], value[0, 0, 0]) and aux.entropy[0, 0, 0] < 1e-30, (size, temperature)
        lse = float((size * key[0, 0, 0, 0]).to(dtype)) / (temperature or 1.0)
        assert aux.lse[0, 0, 0].isinf() if lse > torch.finfo(torch.float32).max else aux.lse[0, 0, 0].isfinite()
        assert torch.equal(out[0, 0, 1:], others[0, 0, 1:]) and aux.lse[0, 0, 1:].isfinite().all()


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(seed):
    r = random.Random(seed)
    Hkv = r.choice([1, 2, 3])
    H = Hkv * r.choice([1, 1, 2, 4])
    Tq = r.choice([1, 2, 7, 23, 25, 64, 150])
    Tk = r.choice([1, 5, 47, 97, 200, 1500])
    shape = {"H": H, "Hkv": Hkv, "Tq": Tq, "Tk": Tk, "D": r.choice([1, 3, 16, 48, 80]), "Dv": r.choice([1, 5, 16, 33])}
    name = r.choice([n for n in PROBLEMS if n != "is_causal"])
    tensors, call = PROBLEMS[name](H, Tq, Tk)
    Case(qkv(seed, layout=r.choice(["bhtd", "bthd", "bhdt", "cut"]), **shape) | tensors, call).check()


@pytest.mark.parametrize("name", ["plain", "causal", "mask"])
def test_dropout_is_the_shared_mask(name):
    tensors, call = PROBLEMS[name](4, 40, 50)
    Case(qkv(3, Tq=40, Tk=50) | tensors, call, dropout_p=0.3).check()


def test_large_head_sizes():
    Case(qkv(4, H=2, Hkv=1, Tq=30, Tk=40, D=256, Dv=255), lambda: {"is_causal": False}).check()


def test_variances_survive_a_common_offset():
    tensors = qkv(5, Tq=40, Tk=60, D=16, Dv=8, dtype=torch.float32)
    tensors["q"] = torch.cat([tensors["q"], torch.ones(2, 4, 40, 1)], -1)
    tensors["k"] = torch.cat([tensors["k"], torch.full((2, 2, 60, 1), 2000.0)], -1)
    tensors["v"] = tensors["v"] + 1000
    for call in (dict, lambda: {"problem": Transport(prior=ALiBi(0.1, alignment=END))}):
        case = Case(tensors, call, ("score_variance", "entropy", "value_spread"))
        found, truth = case.run("native", gradients=False), case.run("torch", torch.float64, gradients=False)
        for name, bound in (("score_variance", 2e-3), ("entropy", 1e-3), ("value_spread", 5e-3)):
            assert error(found[name], truth[name]) < bound, name


@pytest.mark.parametrize("Tq", [1, 40])
@pytest.mark.parametrize("marginal", [Rows(), Rows(sink=20.0), Rows(relax=1.5)], ids=["rows", "sink", "relax"])
def test_scores_that_rise_along_the_keys(marginal, Tq):
    """Sums are rescaled only when scores have risen by more than a threshold. Here they rise by less, as much, and
    more."""
    tensors = qkv(8, H=2, Tq=Tq, Tk=600, D=8, Dv=8)
    rise = torch.tensor([0.0, 0.5, 2.0, 2.7, 2.8, 5.0])  # SLACK is 4 in base 2: 2.77
    tensors["q"][..., 0] = 8**0.5
    tensors["k"][..., 0] = rise.cumsum(0).repeat_interleave(100)
    Case(tensors, lambda: {"problem": Transport(marginal=marginal)}).check()


@pytest.mark.parametrize("kind", ["padding", "documents", "float", "causal"])
def test_invalid_values_in_masked_keys_have_no_effect(kind):
    T = 130
    tensors = qkv(6, Tq=T, Tk=T)
    unread = torch.zeros(T, dtype=torch.bool)
    unread[[3, 4, 50]] = True
    unread[97:] = True
    if kind == "padding":
        call = {"attn_mask": ~unread}
    elif kind == "documents":
        call = {"problem": Transport(prior=Documents(torch.zeros(T, dtype=torch.long), torch.where(unread, -1, 0)))}
    elif kind == "float":
        call = {"attn_mask": torch.where(unread, -math.inf, 0.5).expand(T, T)}
    else:
        unread[:] = False
        unread[60:] = True
        call = {"is_causal": True}
        tensors["q"] = tensors["q"][:, :, :60]
    case = Case(tensors, lambda: call)
    clean = case.run("native")
    for name in ("k", "v"):
        for invalid in (math.nan, math.inf, 1e4, -1e25):
            spoilt = dict(tensors)
            spoilt[name] = tensors[name].clone()
            spoilt[name][:, :, unread] = invalid
            found = Case(spoilt, lambda: call).run("native")
            for n, value in found.items():
                assert torch.equal(value, clean[n]), (n, invalid)


def test_rows_without_keys():
    tensors = qkv(7, Tq=50, Tk=50)
    mask = torch.ones(50, 50, dtype=torch.bool)
    mask[[0, 30]] = False
    for problem in (Transport(), Transport(marginal=Rows(sink=0.3)), Transport(marginal=Rows(relax=2.0))):
        Case(tensors, lambda problem=problem: {"attn_mask": mask, "problem": problem}).check()
    assert Case(tensors, lambda: {"attn_mask": mask}).run("native")["out"][:, :, 30].abs().max() == 0


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_empty(sizes):
    Case(qkv(8, Tq=sizes[0], Tk=sizes[1]), dict, ("lse", "entropy")).check(gradients=False)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "shape", [{"Tq": 200, "Tk": 200}, {"Tq": 2, "Tk": 3000}, {"Tq": 1000, "Tk": 1100, "H": 1, "Hkv": 1}]
)
def test_threads_do_not_change_a_bit(name, shape):
    H = shape.get("H", 4)
    tensors, call = PROBLEMS[name](H, shape["Tq"], shape["Tk"])
    case = Case(
        qkv(9, B=1 if H == 1 else 2, **shape) | tensors if H > 1 or name != "mask" else qkv(9, **shape) | tensors, call
    )
    if H == 1 and name in ("padding", "biases", "mask"):
        case = Case(qkv(9, **shape) | tensors, call)
    one, *others = with_threads(lambda: case.run("native"))
    for other in others:
        for n, value in other.items():
            assert torch.equal(value, one[n]), n


def test_broadcast_parameters_are_not_expanded(monkeypatch):
    q, k, v = qkv(10, Tq=64, Tk=64).values()
    mask = torch.ones(1, 1, 1, 64, dtype=torch.bool)
    records = []
    make = backend.record_of
    monkeypatch.setattr(backend, "record_of", lambda form: records.append(make(form)) or records[-1])
    regard.attention(q, k, v, attn_mask=mask, enable_gqa=True, backend="native")
    (record,) = records
    for name, tensor in (("key", k), ("mask", mask)):
        (address,) = struct.unpack_from("=q", record.record, record.fields[name][1])
        assert address == tensor.data_ptr()


def test_from_several_python_threads():
    tensors = qkv(11, Tq=300, Tk=300)
    case = Case(tensors, lambda: {"is_causal": True})
    expected = case.run("native", gradients=False)["out"]
    failures = []

    def work():
        for _ in range(5):
            if not torch.equal(case.run("native", gradients=False)["out"], expected):
                failures.append(1)  # noqa: PERF401

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork():
    script = """
import os, torch, regard
q = torch.randn(2, 4, 200, 16)
torch.set_num_threads(2)
a = regard.attention(q, q, q, backend="native")
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(a, regard.attention(q, q, q, backend="native")) else 3)
import time
for _ in range(200):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
raise SystemExit("the child hangs")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_named_isa_is_used(isa):
    code = "import torch, regard._native as n; print(n.isa())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"REGARD_ISA": isa}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == isa


def test_an_unknown_isa_raises():
    code = "import torch, regard; q = torch.zeros(1, 1, 1, 8); regard.attention(q, q, q)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"REGARD_ISA": "z80"}, capture_output=True, text=True
    )
    assert found.returncode != 0
    assert "ValueError: REGARD_ISA: expected an instruction set of this machine (" in found.stderr, found.stderr
    assert found.stderr.rstrip().endswith("baseline), got z80")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Transport(temperature=0.0), "temperature 0"),
        (Transport(FermiDirac(), marginal=Rows(mass=2.0)), "free marginal only"),
        (Transport(prior=math.prod((Bias(torch.zeros(1)) for _ in range(4)), start=Bias(torch.zeros(1)))), "at most 4"),
    ],
)
def test_reasons(problem, reason):
    q, k, v = qkv(12).values()
    with pytest.raises(NotImplementedError, match=f"native.*{reason}"):
        regard.attention(q, k, v, enable_gqa=True, problem=problem, backend="native")


def test_the_check_detects_one_wrong_element(monkeypatch):
    case = Case(qkv(13), dict)
    case.check()
    plain = BACKENDS["native"].forward

    def wrong(form, names):
        results = plain(form, names)
        results["out"].view(-1)[17] += 1e-3
        return results

    monkeypatch.setattr(BACKENDS["native"], "forward", wrong)
    with pytest.raises(AssertionError):
        case.check()
