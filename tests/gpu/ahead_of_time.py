"""Compile the Triton kernels for GPUs that are not here, and read the result: registers, stack, shared memory, PTX.

    python tests/gpu/ahead_of_time.py [--every]

The default is a covering set; --every adds targets and variants. Exits with status 1 if a kernel does not compile, uses
stack where it must not, needs more shared memory than the device has, contains an atomic instruction, or executes more
instructions per score than `MOST` allows (machine_code.py counts them).
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import triton
from machine_code import count, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from regard.backends.triton.kernels import backward, forward_kl, forward_link, search
from regard.backends.triton.kernels.operands import Operand, Problem
from regard.backends.triton.launch import configuration

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
    "gfx950": 160,
}


# The most instructions per score without tensor instructions, or of float32 arithmetic and comparisons, in the loop
# over full tiles with heads of 64. Of softmax, the first is that of Triton's own tutorial kernel, and the others are
# 1.2 and 1.45 times that.
MOST = {
    "forward, KL, D=64, lse": ("all", 9.5),
    "forward, KL, D=64, entropy": ("all", 1.2 * 9.5),
    "forward, KL, D=64, entropy, variance": ("all", 1.45 * 9.5),
    **{
        f"{kernel}, {link}, D=64": ("fp32", 10.0)
        for kernel in ("dQ", "dK dV")
        for link in ("kl", "entmax", "sparsemax")
    },
    **{f"{kernel}, power, D=64": ("fp32", 19.0) for kernel in ("dQ", "dK dV")},
}


def operand(kind: str = "*bf16") -> Operand:
    return Operand(kind, "i64", "i64", "i64", "one")  # a contiguous last dimension


def problem(**parts: Any) -> Problem:
    """The types of a record. None is a part that is absent."""
    fields: dict[str, Any] = dict.fromkeys(Problem._fields)
    fields |= {name: operand() for name in ("query", "key", "value")}
    fields |= dict.fromkeys(("temperature_value", "level_value", "alpha_value", "scale", "mass", "kept_scale"), "fp32")
    fields |= dict.fromkeys(("H", "group", "Tq", "Tk", "left", "right", "offset", "selected_block"), "i32")
    return Problem(**fields | {"threshold": "i64", "log_priors": ()} | parts)


def types(value: Any, path: tuple[int, ...]) -> tuple[Any, dict[tuple[int, ...], Any]]:
    """The signature of an argument, and its constants by path."""
    if isinstance(value, tuple):
        parts = [types(part, (*path, n)) for n, part in enumerate(value)]
        made = [part[0] for part in parts]
        constants = {place: constant for part in parts for place, constant in part[1].items()}
        return (type(value)(*made) if hasattr(value, "_fields") else tuple(made)), constants
    if value is None or value == "one":
        return "constexpr", {path: None if value is None else 1}
    return value, {}


def aligned(value: Any, path: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    """What Triton learns at a launch with contiguous tensors: addresses and strides are multiples of 16."""
    if isinstance(value, tuple):
        return {k: a for n, part in enumerate(value) for k, a in aligned(part, (*path, n)).items()}
    return {path: [["tt.divisibility", 16]]} if value.startswith("*") or value == "i64" else {}


def build(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], target: str, half: bool = True) -> Any:
    """A kernel as it is launched with these arguments: the tile is chosen here (launch.configuration)."""
    chosen = configuration(
        kernel.fn.__name__,
        constants.pop("Tq", 4096),
        constants.get("D", 64),
        half,
        target.startswith("gfx"),
        constants.get("LINK", "kl"),
    )
    constants |= {n: chosen[n] for n in ("BM", "BN")}
    if "FAST" in constants:
        constants["FAST"] = half and not target.startswith("gfx")  # as launch.link_options
    signature, values = {}, {}
    for n, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[n,] = "constexpr", constants[name]
        else:
            signature[name], found = types(arguments[name], (n,))
            values |= found
    source = ASTSource(kernel, signature, values, aligned(tuple(signature.values()), ()))
    options = {n: x for n, x in chosen.items() if n not in ("BM", "BN")}
    return triton.compile(source, target=TARGETS[target], options=options)


ROWS = {"peaks": "*fp32", "rests": "*fp32", "row_a": "*fp32", "row_b": "*fp32"}
PLAIN = {"LEFT": False, "RIGHT": True, "WEIGHTED": False, "PRECISION": "ieee", "WIDEN": False, "PARTS": False}
FAST = {"FAST": True}
SUMS = dict.fromkeys(("MOMENTS", "SQUARES", "SCORES", "COUNTS", "PRIOR", "SPREAD"), False) | {"RISING": True}
LINK_SUMS = dict.fromkeys(("LOGS", "SCORES", "COUNTS", "VALUE", "SPREAD", "TOP"), False)
EVERY_PART = {
    **{
        name: operand("*fp32") for name in ("score_bias", "slopes", "relative", "query_factor", "key_factor", "density")
    },
    **{name: operand("*fp64") for name in ("decay_query", "decay_key")},
    **{name: operand("*i64") for name in ("selected", "tile_map", "query_ids", "key_ids", "dropout_key")},
    **dict.fromkeys(("reach", "rank", "selections"), "i32"),
    **{name: operand("*i32") for name in ("rows_order", "rows_counts", "columns_order", "columns_counts")},
    "mask": operand("*u8"),
    "readable": operand("*u8"),
    "tiles": "*i64",
    "softcap": "fp32",
    "log_priors": (operand("*fp32"), operand("*bf16")),
    "temperature": operand("*fp32"),
    "level": operand("*fp32"),
}


def variants(every: bool) -> list[tuple[str, Any, dict[str, Any], dict[str, Any], bool]]:
    """Name, kernel, types of the arguments, constants, and whether it must not use stack."""
    found = []
    for D in (64, 128, 256) if every else (64,):
        size = {"D": D, "DV": D, "PAD": D, "PADV": D}
        lean = D == 64  # these kernels must not use stack in half types
        forward = {"out": "*fp32", "peak": "*fp32", "rest": "*fp32", "lse": "*fp32", "squares": None}
        for name, more, sums in (
            ("lse", {}, None),
            ("entropy", {"MOMENTS": True}, "*fp32"),
            ("entropy, variance", {"MOMENTS": True, "SQUARES": True}, "*fp32"),
            ("every statistic", dict.fromkeys(SUMS, True), "*fp32"),
        ):
            constants = PLAIN | size | SUMS | more | {"MARGINAL": "rows"}
            given = forward | {"p": problem(), "sums": sums} | ({"squares": "*fp32"} if more.get("SPREAD") else {})
            found.append(
                (
                    f"forward, KL, D={D}, {name}",
                    forward_kl.forward_kl,
                    given,
                    constants,
                    lean and name != "every statistic",
                )
            )
        if D == 64:
            constants = PLAIN | size | SUMS | {"WEIGHTED": True, "LEFT": True, "MARGINAL": "sink", "PARTS": True}
            given = forward | {"p": problem(**EVERY_PART), "sums": None}
            found.append(("forward, KL, every part of a prior", forward_kl.forward_kl, given, constants, False))
        for link in ("entmax", "sparsemax", "power", "centred", "sigmoid") if every or D == 64 else ():
            constants = PLAIN | FAST | size | {"MARGINAL": "rows", "LINK": link}
            given = {"p": problem(), "peaks": "*fp32", "rests": "*fp32", "passes": None}
            found.append((f"search, {link}, D={D}", search.find_price, given, constants, lean))
            given = {
                "p": problem(), "peaks": "*fp32", "rests": "*fp32", "out": "*fp32", "baseline": "*fp32",
                "sums": "*fp32", "squares": None,
            }  # fmt: skip
            found.append((f"forward, {link}, D={D}", forward_link.forward_link, given, constants | LINK_SUMS, D == 64))
        for link in ("kl", "entmax", "sparsemax", "power"):
            constants = PLAIN | FAST | size | {"LINK": link, "ENTROPY": False}
            given = ROWS | {"p": problem(), "grad": operand("*bf16"), "duals": "*fp32", "sums": None, "dq": "*fp32"}
            found.append((f"dQ, {link}, D={D}", backward.by_rows, given, constants | {"SUMS": False}, lean))
            given |= {"sums": "*fp32"}
            found.append((f"dQ and sums, {link}, D={D}", backward.by_rows, given, constants | {"SUMS": True}, False))
            given = ROWS | {"p": problem(), "grad": operand("*bf16"), "dk": "*fp32", "dv": "*fp32"}
            given |= dict.fromkeys(("key_g", "key_mass"))
            found.append((f"dK dV, {link}, D={D}", backward.by_columns, given, constants, D == 64))
    return found + others()


def others() -> list[tuple[str, Any, dict[str, Any], dict[str, Any], bool]]:
    """Single pairs, keys that are read, one query and one key (Triton makes the number 1 a constant), and float32."""
    size = {"D": 64, "DV": 64, "PAD": 64, "PADV": 64}
    every, wide = problem(**EVERY_PART), {n: operand("*fp32") for n in ("query", "key", "value")}
    band = {"LEFT": True, "RIGHT": True}
    pairs = PLAIN | FAST | size | {"LINK": "power", "ENTROPY": True, "WEIGHTED": True}
    pairs |= {"AS_SCORE": True, "AS_PLAN": False}
    given = ROWS | {"p": every, "grad": operand("*fp32"), "pairs": "*fp32", "from_row": "i32", "n_rows": "i32"}
    single = problem(**dict.fromkeys(("H", "group", "Tq", "Tk", "left", "right", "offset"), "one"))
    out = {"out": "*fp32", "peak": "*fp32", "rest": "*fp32", "lse": None, "sums": None, "squares": None}
    rows = PLAIN | size | SUMS | {"MARGINAL": "rows", "LEFT": True}
    columns = ROWS | {"grad": operand("*fp32"), "dk": "*fp32", "dv": "*fp32", "key_g": None, "key_mass": None}
    backward_constants = PLAIN | FAST | size | {"LINK": "kl", "ENTROPY": True}
    return [
        ("keys that are read", backward.find_readable, {"p": every, "found": "*u8"}, band, False),
        ("single pairs", backward.by_pairs, given, pairs, False),
        ("forward, KL, one query and key", forward_kl.forward_kl, out | {"p": single}, rows, False),
        ("forward, KL, float32", forward_kl.forward_kl, out | {"p": problem(**wide)}, rows, False),
        ("dK dV, kl, one query and key", backward.by_columns, columns | {"p": single}, backward_constants, False),
        ("dK dV, kl, float32", backward.by_columns, columns | {"p": problem(**wide)}, backward_constants, False),
    ]


def main() -> None:
    every = "--every" in sys.argv
    targets = list(TARGETS) if every else ["sm_80", "sm_90", "gfx942"]
    wrong, built, began = [], 0, time.time()
    for target in targets:
        for name, kernel, arguments, constants, lean in variants(every):
            compiled = build(kernel, arguments, constants, target, half="float32" not in name)
            built += 1
            shared = compiled.metadata.shared / 1024
            text, line = compiled.asm.get("ptx", ""), f"{target:7} {name:40} shared {shared:5.0f} KiB"
            if shared > SHARED[target]:
                wrong.append(f"{line}: more than the device has ({SHARED[target]} KiB)")
            if re.search(r"\b(atom|red)\.", text):
                wrong.append(f"{line}: an atomic instruction")
            if text:
                registers, stack = resources(compiled)
                line += f", {registers} registers, {stack} bytes of stack"
                if stack and lean:
                    wrong.append(f"{line}: stack")
                loop = count(compiled, constants["BM"], constants["BN"], constants["D"]) if "D=" in name else None
                if loop is not None:
                    line += f", {loop}"
                if loop is not None and name in MOST and target in ("sm_80", "sm_90"):
                    kind, most = MOST[name]
                    found = loop.without_tensor if kind == "all" else loop.per_score["fp32"] + loop.per_score["select"]
                    if round(found, 1) > most:
                        wrong.append(f"{line}: {found:.1f} instructions of kind {kind}, more than {most:.1f}")
            print(line, flush=True)
    print(f"{built} kernels compiled in {time.time() - began:.0f} s, {len(wrong)} wrong")
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
