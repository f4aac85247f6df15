"""The calls of the case table as a file, for engines on machines without Python: `make test-arm`.

    python tests/support/engine_calls.py FILE

Each case runs here on the native engine, in its dtype and in float64. The file holds every call of the engine: its
record (csrc/engine/problem.h), the memory that the record points to, and what each result is in float64.
tests/cpp/case_table.cpp makes the same calls and compares. What an engine computed in one call it reads in the next,
unless Python changed it in between. Cases whose functions are compiled for this machine are left out.

How much a result may be off is the rule of tolerance.py, or four times the error of this machine's engine if that is
more.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))

import regard
from regard import AuxRequest, Causal, Transport, Tsallis
from regard.backends.native import backend, engine
from regard.lowering import lower
from support.cases import CASES, Built, build
from support.maker import Case
from support.tolerance import ALLOWED, pytorch_loss

OPERATIONS = ("forward", "backward", "reading")
# Fields that hold an address, but no result.
_INPUTS = ("tiles", "scratch", "function", "captured", "link", "link_divergence", "link_derivatives")
_ADDED_TO = ("dense_g", "dense_ds")  # results in the form of a tensor
_ORDERED = "picked_keys"  # a result whose order depends on rounding

_LARGE: dict[str, Any] = {"B": 1, "H": 4, "Hkv": 2}
_GQA = {"enable_gqa": True}
LARGE = [  # shapes at which the engine takes other paths than at those of the table
    Case("large", None, lambda m: _GQA | {"is_causal": True}, **_LARGE, Tq=130, Tk=130, D=64, Dv=64),
    Case("decode", None, lambda m: _GQA, **_LARGE, Tq=1, Tk=1100, D=64, Dv=64),
    Case("few rows", None, lambda m: _GQA, **_LARGE, Tq=5, Tk=700, D=40, Dv=33),
    Case("few keys have weight", lambda m: Transport(Tsallis(1.5), temperature=0.2), H=1, Hkv=1, Tq=60, Tk=1300, D=32),
    Case(
        "sparsemax, few keys",
        lambda m: Transport(Tsallis(2.0), prior=Causal(), temperature=0.3),
        B=1,
        H=1,
        Hkv=1,
        Tq=700,
        Tk=700,
        D=32,
        Dv=24,
        sensitivity=2,
    ),
]
HALF = (
    "softmax",
    "causal",
    "odd sizes",
    "one query",
    "float mask",
    "gqa",
    "large",
    "decode",
    "few rows",
)  # float16, too


@dataclass
class Call:
    operation: int
    record: bytes
    places: list[tuple[int, int, int]] = field(default_factory=list)  # of addresses: in the record, buffer, offset
    loads: list[tuple[int, bytes]] = field(default_factory=list)  # buffers that Python wrote
    results: dict[str, tuple[int, int, Tensor]] = field(default_factory=dict)  # buffer, offset, what came out


class Recorder:
    """The engine's module, with a note of every call."""

    def __init__(self) -> None:
        self.module = engine.extension()[0]
        self.fields = engine._layout().fields
        self.results = {name for name, kind in self.module.fields() if kind == "int"} - {*_INPUTS, _ORDERED} | {
            *_ADDED_TO
        }
        self.calls: list[Call] = []
        self.seen: dict[int, Tensor] = {}  # by address; kept, so that no memory is used twice
        self.buffers: dict[int, int] = {}  # the number of a storage, by address
        self.sizes: list[int] = []
        self.written: dict[int, bytes] = {}  # what each buffer held after the last call

    def __getattr__(self, name: str):
        return getattr(self.module, name)

    def __enter__(self) -> Recorder:
        plain, self.restore = Tensor.data_ptr, (Tensor.data_ptr, backend.extension)

        def logged(tensor: Tensor) -> int:
            at = plain(tensor)
            if at and (at not in self.seen or tensor.numel() > self.seen[at].numel()):
                self.seen[at] = tensor.detach()
            return at

        Tensor.data_ptr = logged  # type: ignore[method-assign]
        backend.extension = lambda: (self, "")
        return self

    def __exit__(self, *_) -> None:
        Tensor.data_ptr, backend.extension = self.restore  # type: ignore[method-assign]

    def forward(self, record: bytearray) -> None:
        self._call(0, record)

    def backward(self, record: bytearray) -> None:
        self._call(1, record)

    def reading(self, record: bytearray) -> None:
        self._call(2, record)

    def _call(self, operation: int, record: bytearray) -> None:
        call, used, results = Call(operation, bytes(record)), {}, {}
        for name, (_, at) in self.fields.items():
            address = struct.unpack_from("=q", record, at)[0]
            if address not in self.seen or name == "scratch":
                continue
            tensor = self.seen[address]
            base = tensor.untyped_storage().data_ptr()
            if base not in self.buffers:
                self.buffers[base] = len(self.buffers)
                self.sizes.append(tensor.untyped_storage().nbytes())
            number = self.buffers[base]
            used[number] = base
            call.places.append((at, number, address - base))
            if name in self.results:
                results[name] = number, address - base, tensor
        for number, base in used.items():
            content = ctypes.string_at(base, self.sizes[number])
            if self.written.get(number) != content:
                call.loads.append((number, content))
        getattr(self.module, OPERATIONS[operation])(record)
        self.written |= {number: ctypes.string_at(base, self.sizes[number]) for number, base in used.items()}
        call.results = {n: (number, offset, t.clone().contiguous()) for n, (number, offset, t) in results.items()}
        self.calls.append(call)


def calls_of(built: Built) -> Recorder:
    """Everything that the engine does for a case: statistics, gradients, and parts of the plan."""
    problem = built.arguments.get("problem")
    leaves = [t for t in built.leaves.values() if t.requires_grad]
    given = (built.query, built.key, built.value)
    generator = torch.Generator().manual_seed(5)
    with Recorder() as recorder:
        request = AuxRequest.all(problem or Transport())
        out, aux = regard.attention(*given, **built.arguments, return_aux=request, backend="native")
        loss = (out * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)).sum()
        for name in ("lse", "entropy") if problem is None or isinstance(problem.regularizer, regard.KL) else ():
            statistic = getattr(aux, name)
            if statistic is not None:
                statistic = statistic.masked_fill(statistic.isinf(), 0.0)
                loss = loss + (statistic * torch.randn(statistic.shape, generator=generator)).sum()
        torch.autograd.grad(loss, leaves, allow_unused=True)
        with torch.no_grad():
            regard.topk(*given[:2], 2 if built.key.shape[2] > 1 else 1, **built.arguments)
            regard.block_mass(*given[:2], 3 if built.key.shape[2] < 100 else 64, **built.arguments)
    return recorder


def exact(built: Built) -> Built:
    """The same numbers in float64."""
    raised: dict[int, Tensor] = {}

    def raise_(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if id(leaf) not in raised:
            raised[id(leaf)] = leaf.detach().double().requires_grad_(leaf.requires_grad)
        return raised[id(leaf)]

    tensors = (built.query, built.key, built.value, built.arguments)
    query, key, value, arguments = pytree.tree_map(raise_, tensors)
    leaves = {n: raised[id(t)] for n, t in built.leaves.items() if id(t) in raised}
    leaves |= {"query": query, "key": key, "value": value}  # of a view, the view
    return Built(query, key, value, arguments, leaves)


def leafless(built: Built) -> Built:
    """The case with its views of leaves (other memory layouts) as the leaves."""
    for name in ("query", "key", "value"):
        tensor = getattr(built, name).detach()
        setattr(built, name, tensor.requires_grad_())
        built.leaves[name] = tensor
    return built


def allowed(name: str, dtype: torch.dtype, case: Case, found: Tensor, truth: Tensor, operation: int) -> float:
    """See the head of this file."""
    half = dtype in (torch.bfloat16, torch.float16)
    rounded = operation == 1 or name == "out"  # results that dot products of bfloat16 numbers may round
    unit = 1e-11 if dtype == torch.float64 else pytorch_loss(dtype if half and rounded else torch.float32)
    unit = max(unit, torch.finfo(dtype if half and rounded else torch.float32).eps) if unit != 1e-11 else unit
    finite = truth.isfinite() & found.isfinite()
    largest, error = truth[finite].abs().max(), (found - truth)[finite].abs().max() if finite.any() else torch.zeros(())
    statistic = 1 if rounded else 8  # as in test_statistics.py
    rule = statistic * case.sensitivity * ALLOWED * unit * max(1.0, float(largest)) if finite.any() else 0.0
    return max(rule, 4 * float(error))


class Writer:
    """Numbers and text, little-endian."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def integers(self, *values: int) -> None:
        self.parts.append(struct.pack(f"<{len(values)}q", *values))

    def blob(self, content: bytes) -> None:
        self.integers(len(content))
        self.parts.append(content)


def write_case(to: Writer, case: Case, dtype: torch.dtype) -> int:
    """Returns the number of results."""
    built = leafless(build(case, dtype))
    mine, truth = calls_of(built), calls_of(exact(built))
    assert [c.operation for c in mine.calls] == [c.operation for c in truth.calls], case.name
    to.blob(f"{case.name}, {str(dtype).removeprefix('torch.')}".encode())
    to.integers(len(mine.sizes), *mine.sizes)
    to.integers(len(mine.calls))
    total = 0
    for call, other in zip(mine.calls, truth.calls, strict=True):
        to.integers(call.operation)
        to.blob(call.record)
        to.integers(len(call.places), *(n for place in call.places for n in place))
        to.integers(len(call.loads))
        for number, content in call.loads:
            to.integers(number)
            to.blob(content)
        assert call.results.keys() == other.results.keys(), (case.name, call.results.keys() ^ other.results.keys())
        to.integers(len(call.results))
        for name, (number, offset, found) in call.results.items():
            expected = other.results[name][2].double()
            assert expected.shape == found.shape, (case.name, name)
            to.blob(name.encode())
            to.integers(number, offset, found.numel(), engine.TYPES[found.dtype])
            limit = allowed(name, dtype, case, found.double(), expected, call.operation)
            to.parts.append(struct.pack("<d", limit) + expected.contiguous().numpy().astype("<f8").tobytes())
            total += found.numel()
    return total


def served(case: Case) -> bool:
    """Whether the engine needs no function that is compiled for this machine."""
    built = build(case, torch.float64)
    form = lower(built.query, built.key, built.value, **built.arguments)
    kernels = form.function is None and form.family in ("kl", "tsallis", "fermi_dirac")
    return kernels and backend.Native().unsupported(form, ("out",)) is None


def main(path: str) -> int:
    torch.set_num_threads(1)
    engine.extension()[0].use("baseline")
    cases = [case for case in [*CASES, *LARGE] if served(case)]
    to, results = Writer(), 0
    pairs = [(case, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16) for case in cases]
    pairs += [(case, torch.float16) for case in cases if case.name in HALF]
    to.parts.append(b"REGARD01")
    to.integers(len(pairs))
    for case, dtype in pairs:
        results += write_case(to, case, dtype)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(b"".join(to.parts))
    left = len(CASES) + len(LARGE) - len(cases)
    print(f"{path}: {len(cases)} cases ({left} left out), {len(pairs)} with their dtypes, {results} results")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
