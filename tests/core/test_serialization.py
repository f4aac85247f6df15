"""Problems as JSON (`Transport.to_json`, `from_json`) and as expressions (`read_problem`)."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import regard
from regard import (
    KL,
    ALiBi,
    Bias,
    Causal,
    Documents,
    FDivergence,
    FermiDirac,
    Free,
    MatchEntropy,
    MatchKL,
    Rows,
    RowsAndColumns,
    Transport,
    Tsallis,
    Window,
)
from regard._compat import pytree
from regard._pytree import Part
from regard.expressions import read_problem
from regard.function_priors import FunctionPrior
from regard.priors import Product
from regard.serialization import LISTED
from support import functions
from support.cases import CASES, build

PROBLEMS = {
    "softmax": Transport(),
    "entmax": Transport(Tsallis(1.5), prior=Causal() * Window(63) * ALiBi(0.25), temperature=0.3),
    "open window": Transport(prior=Window(None, None, "bottom_right")),
    "sink": Transport(marginal=Rows(sink=torch.tensor([0.1, -0.0, math.inf, math.nan]))),
    "relaxed": Transport(marginal=Rows(relax=0.7)),
    "mass": Transport(FermiDirac(), marginal=Rows(mass=2)),
    "free": Transport(FermiDirac(), marginal=Free(-math.log(7))),
    "both": Transport(marginal=RowsAndColumns(column=torch.rand(3, 5, dtype=torch.float64), iterations=3, strict=True)),
    "budgets": Transport(prior=Causal(), temperature=MatchEntropy(torch.rand(2, 1, 1).half())),
    "kl budget": Transport(temperature=MatchKL(0.4)),
    "documents": Transport(prior=Documents(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, -1], dtype=torch.int32))),
    "bias": Transport(prior=Bias(torch.randn(2, 5, 5).bfloat16()) * Bias(torch.full((1, 1), -math.inf))),
    "long": Transport(prior=Bias(torch.randn(4, 40, 40)) * Documents(torch.arange(400))),
    "own": Transport(FDivergence(functions.half_square, functions.one_more, torch.ones_like, lower=-1.0)),
    "numpy": Transport(Tsallis(np.float32(1.5)), prior=Window(np.int64(3)), temperature=np.float64(2.0)),
    "own prior": Transport(prior=functions.Recent(3) * Causal()),
}


def same(one, other):
    """Equal parts, where tensors are equal by dtype, shape and bits."""
    if isinstance(one, torch.Tensor):
        exact = one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
        return exact and torch.equal(one.detach().nan_to_num(123.0), other.detach().nan_to_num(123.0))
    if isinstance(one, Part):
        values = ((getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
        return type(one) is type(other) and all(same(a, b) for a, b in values)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_survives(name):
    problem = PROBLEMS[name]
    text = problem.to_json()
    json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    found = Transport.from_json(text, allow_imports=True)
    assert same(found, problem)
    assert found.to_json() == text
    if not pytree.tree_leaves(problem) and name != "own":  # an FDivergence has a family of its own
        assert found == problem and hash(found) == hash(problem)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_survives(case):
    """The same problem gives the same attention; learned tensors stay learned."""
    built = build(case)
    problem = built.arguments.get("problem", Transport())
    if isinstance(problem.regularizer, FDivergence):
        pytest.skip("its functions are lambdas")
    if problem.prior is not None and any(isinstance(leaf, FunctionPrior) for leaf in problem.prior.leaves()):
        pytest.skip("its function is a local one")
    found = Transport.from_json(problem.to_json())
    assert same(found, problem)
    arguments = built.arguments | {"problem": found}
    out = regard.attention(built.query, built.key, built.value, **arguments)
    assert torch.equal(out, regard.attention(built.query, built.key, built.value, **built.arguments))
    learned = [t for t in pytree.tree_leaves(found) if t.requires_grad]
    assert all(isinstance(t, torch.nn.Parameter) for t in learned)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16],
    ids=str,
)
@pytest.mark.parametrize("size", [3, LISTED, LISTED + 1])
def test_floats_are_exact(dtype, size):
    info = torch.finfo(dtype)
    special = torch.tensor([info.max, info.min, info.tiny, info.eps, -0.0, math.inf, -math.inf, math.nan], dtype=dtype)
    random = torch.randn(size, dtype=torch.float64).to(dtype) * 1.1
    tensor = torch.cat([special, random]).view(1, -1, 1)[:, :size]
    text = Transport(prior=Bias(tensor)).to_json()
    assert ("base64" in text) == (size > LISTED)
    found = Transport.from_json(text).prior.log_prior
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert found.dtype == dtype and found.shape == tensor.shape
    assert torch.equal(found.isnan(), tensor.isnan())
    keep = ~tensor.isnan()
    assert torch.equal(found[keep].view(bits), tensor[keep].view(bits))  # bits: -0.0 is not 0.0


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (70,), (2, 0)], ids=str)
def test_shapes(shape):
    tensor = torch.rand(shape)
    found = Transport.from_json(Transport(prior=Bias(tensor)).to_json()).prior.log_prior
    assert torch.equal(found, tensor) and found.shape == tensor.shape


def test_a_view_and_a_transposed_tensor():
    tensor = torch.randn(20, 30).T[::2]
    assert torch.equal(Transport.from_json(Transport(prior=Bias(tensor)).to_json()).prior.log_prior, tensor)


def test_parameters_by_name():
    sink, slopes = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    problem = Transport(prior=ALiBi(slopes), marginal=Rows(sink=sink))
    text = problem.to_json({"layers.0.sink": sink, "other": torch.nn.Parameter(torch.zeros(4))})
    assert json.loads(text)["problem"]["Transport"]["marginal"]["Rows"]["sink"] == {"parameter": "layers.0.sink"}
    moved = torch.nn.Parameter(torch.ones(4))
    found = Transport.from_json(text, {"layers.0.sink": moved})
    assert found.marginal.sink is moved and torch.equal(found.prior.slopes, slopes)
    assert isinstance(found.prior.slopes, torch.nn.Parameter)
    with pytest.raises(ValueError, match=r"Rows\(sink\): expected a tensor named 'layers.0.sink' in `parameters`, got"):
        Transport.from_json(text)
    with pytest.raises(ValueError, match="got 'sink'"):
        Transport.from_json(text, {"sink": moved})


def test_functions_are_imported_only_when_asked():
    text = PROBLEMS["own"].to_json()
    assert '{"function": "support.functions:half_square"}' in text and '"torch:ones_like"' in text
    with pytest.raises(ValueError, match=r"FDivergence\(f\): expected no code to import, got .*allow_imports=True"):
        Transport.from_json(text)
    own = PROBLEMS["own prior"].to_json()
    assert "support.functions:Recent" in own
    assert same(Transport.from_json(own), PROBLEMS["own prior"])  # the class is defined already: nothing is imported


def test_nothing_is_imported_without_permission(tmp_path):
    """In a new process, where neither the functions' module nor the class is known."""
    (tmp_path / "theirs.py").write_text(
        "print('imported')\nfrom regard.priors import Prior\nclass Mine(Prior):\n    n: int\ndef f(x): return x\n"
    )
    program = """
import sys, regard
for text in sys.argv[1:]:
    try:
        print(regard.Transport.from_json(text))
    except ValueError as error:
        print("refused", error)
print(regard.Transport.from_json(sys.argv[1], allow_imports=True))
"""
    wrap = '{"format": "regard-problem", "version": 1, "problem": {"Transport": {"prior": {"theirs:Mine": {"n": 2}}}}}'
    own = wrap.replace(
        '"prior": {"theirs:Mine": {"n": 2}}',
        '"regularizer": {"FDivergence": {"f": {"function": "theirs:f"}, "link": 1}}',
    )
    command = [sys.executable, "-c", program, wrap, own]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["refused", "refused", "imported", "Transport(KL(),"], done


@pytest.mark.parametrize(
    "function",
    [lambda x: x, test_parameters_by_name.__class__, torch.nn.ReLU(), torch.Tensor.exp],
    ids=["lambda", "builtin", "module", "method"],
)
def test_functions_that_no_import_finds_raise(function):
    own = FDivergence(functions.half_square, functions.one_more, torch.ones_like, lower=-1.0)
    object.__setattr__(own, "user_slope", function)
    with pytest.raises(
        ValueError, match=r"FDivergence\(slope\): expected a function that `from module import name` finds"
    ):
        Transport(own).to_json()


def test_local_functions_raise():
    def local(x):
        return x

    own = FDivergence(functions.half_square, functions.one_more, torch.ones_like, lower=-1.0)
    object.__setattr__(own, "user_f", local)
    with pytest.raises(ValueError, match=r"FDivergence\(f\).*define it at the top level of a module"):
        Transport(own).to_json()


def test_tensors_without_values_raise():
    for tensor, match in (
        (
            torch.zeros(3, device="meta"),
            r"Bias\(log_prior\): expected a plain tensor that has values, got a Tensor on meta",
        ),
        (torch.zeros(3).to(torch.float8_e4m3fn), r"Bias\(log_prior\): expected a tensor of float64"),
    ):
        with pytest.raises(TypeError, match=match):
            Transport(prior=Bias(tensor)).to_json()


# --- invalid JSON -----------------------------------------------------------------------------------------------------


def wrapped(problem, **more):
    return json.dumps({"format": "regard-problem", "version": 1, "problem": problem} | more)


def transport(**fields):
    return wrapped({"Transport": fields})


def tensor(**fields):
    return transport(prior={"Bias": {"log_prior": {"tensor": {"dtype": "float32", "shape": [1]} | fields}}})


INVALID = {
    "no JSON": ("Transport()", "text: expected JSON, got 'Transport"),
    "no object": ("[1]", r'text: expected an object whose "format" is "regard-problem"'),
    "another format": ('{"format": "regard-inspection"}', 'text: expected an object whose "format"'),
    "version": (wrapped({"Transport": {}}, version=2), "version: expected 1, got 2"),
    "no version": (wrapped({"Transport": {}}, version=None), "version: expected 1, got None"),
    "version as bool": (wrapped({"Transport": {}}, version=True), "version: expected 1, got True"),
    "other entries": (wrapped({"Transport": {}}, more=1), "text: expected format, version and problem, got 'more'"),
    "no problem": (wrapped(None), "problem: expected a part, got 'None'"),
    "another part": (wrapped({"Causal": {}}), r"problem: expected a Transport, got Causal\(\)"),
    "unknown class": (wrapped({"Transprt": {}}), "problem: expected one of .*Transport.*, got 'Transprt'"),
    "unknown part": (transport(prior={"Triangular": {}}), r"Transport\(prior\): expected one of .*got 'Triangular'"),
    "abstract part": (transport(prior={"Prior": {}}), r"Transport\(prior\): expected one of .*got 'Prior'"),
    "unknown field": (transport(piror={}), "piror"),
    "wrong field": (transport(prior={"Window": {"lft": 3}}), "Window: expected left, right, alignment, got 'lft'"),
    "missing field": (transport(prior={"Window": {}}), "Window: expected left, right, alignment, got missing"),
    "two entries": (transport(prior={"Causal": {}, "Window": {}}), "expected an object with one entry, got 'Causal'"),
    "no arguments": (transport(prior={"Causal": 3}), "expected the arguments of Causal as an object, got '3'"),
    "wrong type": (transport(prior={"Window": {"left": "3"}}), r"Window\(left\): expected int | None, got '3'"),
    "wrong part": (transport(prior={"KL": {}}), r"Transport\(prior\): expected Prior | None, got KL\(\)"),
    "wrong factor": (
        transport(prior={"Product": {"parts": [{"Causal": {}}, 3]}}),
        r"Product\(parts\): expected tuple\[Prior, ...\], got",
    ),
    "bool": (
        transport(temperature=True),
        r"Transport\(temperature\): expected float . Tensor . TemperatureRule, got True",
    ),
    "invalid value": (
        transport(temperature=-1.0),
        r"Transport\(temperature\): expected a finite number >= 0, got -1.0",
    ),
    "invalid text": (transport(prior={"Causal": {"alignment": "up"}}), r"Causal\(alignment\): expected .*got 'up'"),
    "number": (
        transport(temperature={"number": "one"}),
        r"Transport\(temperature\): expected inf, -inf or nan, got 'one'",
    ),
    "dtype": (
        tensor(dtype="float3", values=[1.0]),
        r"Bias\(log_prior\): expected one of float64.* as dtype, got 'float3'",
    ),
    "shape": (tensor(shape=[-1], values=[]), "expected sizes of a tensor as shape"),
    "count": (tensor(shape=[2], values=[1.0]), r"expected 2 numbers for the shape \[2\], got 1"),
    "values": (tensor(values=["x"]), r"expected numbers of torch.float32, got"),
    "values as text": (tensor(values="1"), "expected a list of numbers, got '1'"),
    "bool values": (tensor(values=[True]), "expected numbers of torch.float32, got"),
    "integers": (tensor(dtype="int64", values=[1.5]), "expected numbers of torch.int64, got"),
    "large integers": (tensor(dtype="uint8", values=[300]), "expected numbers of torch.uint8|overflow"),
    "base64": (tensor(base64="%%"), "expected base64, got '%%'"),
    "bytes": (tensor(base64="AAAA"), "expected 4 bytes for each number, got 3 in all"),
    "neither": (tensor(), "expected base64, got 'None'"),
    "more entries": (tensor(values=[1.0], device="cuda"), "expected dtype, shape, values or base64 of a tensor, got"),
    "function": (
        transport(regularizer={"FDivergence": {"f": {"function": "os"}, "link": 1}}),
        r"FDivergence\(f\): expected a function as module:name, got 'os'",
    ),
    "deep": ('{"format": "regard-problem", "version": 1, "problem": ' + "[" * 5000 + "]" * 5000 + "}", "expected"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_texts_raise(name):
    text, message = INVALID[name]
    with pytest.raises(ValueError, match=message):
        Transport.from_json(text)


def test_invalid_imports_raise():
    for path, message in (
        ("support.functions:missing", "expected module:name that can be imported"),
        ("no.such.module:f", "expected module:name that can be imported"),
        ("support.functions:NUMBER", r"expected a function at support.functions:NUMBER, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Transport.from_json(
                transport(regularizer={"FDivergence": {"f": {"function": path}, "link": 1}}), allow_imports=True
            )
    with pytest.raises(ValueError, match="expected one of"):  # a class that is no part
        Transport.from_json(transport(prior={"pathlib:Path": {}}), allow_imports=True)
    with pytest.raises(TypeError, match="text: expected a str, got None"):
        Transport.from_json(None)


def test_a_part_that_is_defined_later_needs_no_change():
    class Later(regard.priors.Prior):
        step: int
        slopes: torch.Tensor

    problem = Transport(prior=Later(2, torch.ones(3)) * Causal())
    text = problem.to_json()
    assert same(Transport.from_json(text), problem)
    assert Later.__qualname__ in text


def test_a_class_cannot_take_the_name_of_another():
    """A user's class of the name of one of regard's has a name of its own in JSON."""

    class Window(regard.priors.Prior):
        left: int

    assert type(Transport.from_json(Transport(prior=regard.Window(3)).to_json()).prior) is regard.Window
    assert type(Transport.from_json(Transport(prior=Window(3)).to_json()).prior) is Window
    assert type(read_problem("Transport(prior=Window(3))").prior) is regard.Window


# --- expressions ------------------------------------------------------------------------------------------------------

EXPRESSIONS = {
    "Transport()": Transport(),
    "Transport(Tsallis(1.5), prior=Causal() * Window(63))": Transport(Tsallis(1.5), prior=Causal() * Window(63)),
    " regard.Transport(regard.KL(), temperature=2) ": Transport(KL(), temperature=2),
    "Transport(FermiDirac(), marginal=Free(-2.5))": Transport(FermiDirac(), marginal=Free(-2.5)),
    "Transport(prior=Window(None, -1, 'bottom_right'))": Transport(prior=Window(None, -1, "bottom_right")),
    "Transport(prior=Window(left=+3) * (Causal() * Window(2)))": Transport(prior=Window(3) * Causal() * Window(2)),
    "Transport(prior=ALiBi([1, 0.5]))": Transport(prior=ALiBi(torch.tensor([1, 0.5]))),
    "Transport(prior=ALiBi([1, 2]))": Transport(prior=ALiBi(torch.tensor([1.0, 2.0]))),
    "Transport(prior=Bias([[0, -inf], [nan, 1e3]]))": Transport(
        prior=Bias(torch.tensor([[0, -math.inf], [math.nan, 1e3]]))
    ),
    "Transport(prior=Documents([0, 0, -1], key_ids=(0, 1)))": Transport(
        prior=Documents(torch.tensor([0, 0, -1]), torch.tensor([0, 1]))
    ),
    "Transport(marginal=Rows(sink=[0, 1]), temperature=[[[1]], [[2]]])": Transport(
        marginal=Rows(sink=torch.tensor([0.0, 1.0])), temperature=torch.tensor([1.0, 2.0]).view(2, 1, 1)
    ),
    "Transport(temperature=MatchEntropy(2.0))": Transport(temperature=MatchEntropy(2.0)),
    "Transport(marginal=RowsAndColumns(strict=True, iterations=3))": Transport(
        marginal=RowsAndColumns(strict=True, iterations=3)
    ),
    "Transport(prior=Product([Causal(), Window(2)]))": Transport(prior=Product((Causal(), Window(2)))),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions(text):
    assert same(read_problem(text), EXPRESSIONS[text])
    assert same(read_problem(EXPRESSIONS[text].to_json()), EXPRESSIONS[text])


@pytest.mark.parametrize(
    "name", [n for n, p in PROBLEMS.items() if not pytree.tree_leaves(p) and n not in ("own", "own prior", "numpy")]
)
def test_the_repr_of_a_problem_is_an_expression(name):
    assert read_problem(repr(PROBLEMS[name])) == PROBLEMS[name]


REFUSED = {
    "Causal()": r"problem: expected Transport\(...\) or JSON, got 'Causal\(\)'",
    "3": r"problem: expected Transport\(...\) or JSON, got '3'",
    "": r"problem: expected Transport\(...\) or JSON, got ''",
    "Transport(Tsallis(1.5)": r"problem: expected Transport.*was never closed",
    "Transport(); 1": "problem: expected Transport.*invalid syntax",
    "Transport(Tsalis(1.5))": r"problem: expected a call of .*Tsallis.*, got 'Tsalis\(1.5\)'",
    "Transport(Tsallis(beta=1.5))": "Tsallis: expected alpha, got 'beta'",
    "Transport(prior=Window())": "Window: expected left, right, alignment, got missing",
    "Transport(prior=Window(1, 2, 'top_left', 4))": "Window: expected left, right, alignment, got too many",
    "Transport(prior=Window('x'))": r"Window\(left\): expected int | None, got 'x'",
    "Transport(Tsallis(0.5))": r"Tsallis\(alpha\): expected alpha > 1, got 0.5",
    "Transport(prior=Causal() * 2)": r"problem: expected parts such as .*got 'Causal\(\) \* 2'",
    "Transport(prior=Causal() + Window(2))": r"got 'Causal\(\) \+ Window\(2\)'",
    "Transport(temperature=1 + 1)": "problem: expected parts such as .*got '1 . 1'",
    "Transport(temperature=-True)": "problem: expected parts such as .*got '-True'",
    "Transport(temperature=~1)": "problem: expected parts such as",
    "Transport(temperature=x)": "problem: expected parts such as .*got 'x'",
    "Transport(temperature=[x for x in (1,)])": "problem: expected parts such as",
    "Transport(temperature=b'1')": "problem: expected parts such as",
    "Transport(temperature=f'{1}')": "problem: expected parts such as",
    "Transport(*[Tsallis(1.5)])": "problem: expected arguments one by one",
    "Transport(**{})": "problem: expected arguments one by one",
    "Transport(lambda: 1)": "problem: expected parts such as",
    "Transport(prior=Bias([[1], [1, 2]]))": "log_prior: expected lists of numbers, of equal lengths",
    "Transport(prior=Bias(['a']))": "log_prior: expected lists of numbers",
    "Transport(prior=Product([Causal(), 1]))": r"Product\(parts\): expected tuple\[Prior, ...\]",
    "__import__('os').system('true')": "problem: expected a call of",
    "Transport.from_json('x')": "problem: expected a call of",
    "Transport(prior=Causal().__class__())": "problem: expected a call of",
    "Transport(prior=torch.ones(3))": "problem: expected a call of",
    "regard.nn.Transport()": "problem: expected a call of",
    "(" * 50 + ")" * 50: "problem: expected",
    "Transport(temperature=" + "-" * 3000 + "1)": "problem: expected",
    "Transport()\0": "problem: expected Transport",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40].replace("\0", "0"))
def test_other_expressions_raise(text):
    with pytest.raises(ValueError, match=REFUSED[text]):
        read_problem(text)


def test_a_function_cannot_be_written_in_an_expression():
    with pytest.raises(ValueError, match="problem: expected parts such as"):
        read_problem("Transport(FDivergence(torch.exp, torch.log))")
    with pytest.raises(TypeError, match=r"FDivergence\(f\): expected a callable, got 'torch:exp'"):
        read_problem("Transport(FDivergence('torch:exp', 'torch:log'))")
