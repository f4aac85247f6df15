"""A report of the compiled GPU kernels: registers, shared memory, instructions per score, and what a model makes of it.

    python tests/gpu/kernel_report.py [--out build/gpu-report.md]

The kernels are compiled for sm_80 and sm_90 and read, not run. The model is a bound of two numbers per score: clocks of
the tensor units and clocks of the other instructions. If a device overlaps both perfectly, a kernel takes the larger
one, and if not at all, their sum. Waiting for memory, barriers and launches are not in the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ahead_of_time import build, variants
from machine_code import Loop, count, resources

DEVICES = {  # multiply-adds in bfloat16 and float32 lanes per clock and multiprocessor, from the makers' data sheets
    "sm_80": (1024, 128),
    "sm_90": (2048, 128),
}
PRODUCTS = {"forward": 2, "dQ": 3, "dK dV": 4}  # products of a tile with the heads
PEERS = """
Counted in the same way in kernels of others (they are not installed here):

| kernel | figure |
|---|---|
| Triton's tutorial 06, forward, D = 64 | 9.5 instructions per score on sm_80, 9.4 on sm_90 |
| Triton's tutorial 06, backward, D = 128, sm_80 | 8,256 bytes of stack |
| AdaSplash (two kernels, alpha = 1.5, causal), backward | 42 to 55 float32 operations per score |
| AdaSplash, D = 64 | 80 KiB of shared memory |
"""


def share(name: str, target: str, D: int, loop: Loop) -> str:
    """The share of the tensor units' speed that the model allows: without and with perfect overlap."""
    products = next((n for kind, n in PRODUCTS.items() if name.startswith(kind)), None)
    if products is None:
        return ""
    tensor, lanes = DEVICES[target]
    multiply, other = products * D / tensor, loop.without_tensor / lanes
    return f"{multiply / (multiply + other):.0%} to {multiply / max(multiply, other):.0%}"


def lines(every: bool) -> list[str]:
    found = [
        "| kernel | target | registers | stack | shared | instructions per score | share of tensor speed (model) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kernel, arguments, constants, _ in variants(every):
        if "D=" not in name:
            continue
        for target in DEVICES:
            launch = dict(constants)  # `build` adds the tile that it chose
            compiled = build(kernel, arguments, launch, target, half="float32" not in name)
            registers, stack = resources(compiled)
            loop, D = count(compiled, launch["BM"], launch["BN"], launch["D"]), launch["D"]
            row = (name, target, registers, stack, f"{compiled.metadata.shared // 1024} KiB", loop)
            found.append("| " + " | ".join(map(str, (*row, share(name, target, D, loop)))) + " |")
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-report.md"))
    parser.add_argument("--every", action="store_true", help="heads of 128 and 256, too")
    options = parser.parse_args()
    table = lines(options.every)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    heading = "# GPU kernels, from their machine code\n\nCompiled, never run on a GPU. " + " ".join(
        (__doc__ or "").split("\n\n")[-1].split()
    )
    options.out.write_text(f"{heading}\n\n" + "\n".join(table) + f"\n{PEERS}")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
