"""Instructions per score of a compiled kernel, counted in its machine code.

A kernel visits most keys in one loop, over tiles that no mask cuts. `count` finds that loop in the output of nvdisasm
and divides the instructions that all threads execute in one turn by the scores of a tile. Tensor instructions are
counted apart. Nothing runs: a GPU executes the same instructions, but how long they take is not known from this.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Classes of instructions by their names in the machine code, in the order in which they are tried.
CLASSES = {
    "tensor": r"HMMA|HGMMA|QGMMA|UTC\w*MMA|IMMA|QMMA",
    "special": r"MUFU",  # exponentials, logarithms, reciprocals
    "fp32": r"FFMA|FADD|FMUL",
    "select": r"FMNMX|FSEL|FSETP|FSET|FCHK",  # maxima, comparisons and choices of float32 numbers
    "convert": r"F2F|I2F|F2I|I2FP|HADD|HMUL|HFMA|PRMT|HMNMX",
    "shuffle": r"SHFL|REDUX|MOVM",
    "shared": r"LDS|STS|LDT|STT|LDSM|STSM|UTCCP",
    "global": r"LDG|STG|LDGSTS|UTMALDG|UBLKCP|LDGDEPBAR|DEPBAR",
    "stack": r"LDL|STL",
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")


class Loop(NamedTuple):
    """The loop over tiles that no mask cuts: instructions of one thread in one turn, by class, and per score."""

    instructions: Counter[str]
    per_score: dict[str, float]
    products: float  # multiply-adds over those of one product of a tile with the head; 0: not known (HGMMA)

    @property
    def without_tensor(self) -> float:
        return sum(n for name, n in self.per_score.items() if name != "tensor")

    def __str__(self) -> str:
        named = ", ".join(f"{name} {n:.1f}" for name, n in self.per_score.items() if n and name != "tensor")
        return f"{self.without_tensor:.1f} instructions per score ({named})"


def _tool(name: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(compiled: Any) -> tuple[int, int]:
    """Registers and bytes of stack of a kernel for an NVIDIA GPU."""
    text = _tool("cuobjdump", "--dump-resource-usage", cubin=compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def loops(text: str) -> list[list[str]]:
    """The names of the instructions of each innermost loop, from the output of `nvdisasm -c`."""
    names: list[str] = []
    labels: dict[str, int] = {}
    spans = []
    for line in text.splitlines():
        label, found = _LABEL.match(line.strip()), _INSTRUCTION.search(line)
        if label:
            labels[label[1]] = len(names)
        elif found:
            target = re.search(r"\.L_x?_?\w+", found[2]) if found[1].startswith("BRA") else None
            if target and target[0] in labels:  # the label was seen before: a jump back
                spans.append((labels[target[0]], len(names)))
            names.append(found[1])
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [names[first : last + 1] for first, last in inner]


def classified(names: list[str]) -> Counter[str]:
    """How many instructions of each class, "other" among them."""
    return Counter(next((c for c, pattern in CLASSES.items() if re.match(pattern, n)), "other") for n in names)


def _multiply_adds(names: list[str]) -> int:
    """Multiply-adds of the tensor instructions of one warp. (The names of sm_90's do not show their sizes.)"""
    total = 0
    for name in names:
        if name.startswith("HMMA.16816"):
            total += 16 * 8 * 16
        elif name.startswith("HMMA.1688"):
            total += 16 * 8 * 8
    return total


def count(compiled: Any, BM: int, BN: int, head: int) -> Loop:
    """The innermost loop with tensor instructions that has the fewest others: the one whose tiles no mask cuts."""
    text = _tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])
    with_products = [names for names in loops(text) if re.search(r"MMA", " ".join(names))]
    assert with_products, "no loop with tensor instructions"
    names = min(with_products, key=len)
    warps = compiled.metadata.num_warps
    threads, scores = 32 * warps, BM * BN
    found = classified(names)
    per_score = {name: found[name] * threads / scores for name in (*CLASSES, "other")}
    return Loop(found, per_score, _multiply_adds(names) * warps / (scores * head))
