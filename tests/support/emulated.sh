#!/usr/bin/env bash
# Build the kernels for another processor, and run their tests and the case table in an emulator.
#
#   tests/support/emulated.sh PROCESSOR CALLS CPU ...
#
# PROCESSOR is aarch64 or riscv64, CALLS the file that tests/support/engine_calls.py wrote, and each CPU one that the
# emulator knows: the newest, and for aarch64 one without bfloat16, where the engine must choose other kernels.
set -euo pipefail
processor=$1 calls=$2
shift 2
build=build/$processor
for tool in "$processor-linux-gnu-g++" "qemu-$processor"; do
  command -v "$tool" >/dev/null || {
    echo "$tool was not found. On Debian: apt-get install g++-${processor/_/-}-linux-gnu qemu-user" >&2
    exit 1
  }
done
.venv/bin/cmake -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" \
  -DPython_EXECUTABLE="$PWD/.venv/bin/python" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$processor" \
  -DCMAKE_CXX_COMPILER="$processor-linux-gnu-g++" -DREGARD_KERNEL_TESTS=ON -DREGARD_STRICT=ON >/dev/null
.venv/bin/cmake --build "$build" -j "${JOBS:-2}" --target kernel_tests case_table

if [ "$processor" = aarch64 ]; then  # the instructions that the kernels are written for
  has() {
    local found
    found=$("$processor-linux-gnu-objdump" -d --no-show-raw-insn "$1" | grep -cE "$2") || true
    echo "$1: $found times $3"
    [ "$found" -gt 0 ]
  }
  has "$build/CMakeFiles/engine_baseline.dir/csrc/kernel.cpp.o" '\sfmla\s+v[0-9]+\.4s' 'fmla on vectors of float32'
  has "$build/CMakeFiles/engine_aarch64_bf16.dir/csrc/kernel_bf16.cpp.o" '\sbfdot\s+v[0-9]+\.4s' 'bfdot'
fi
for cpu; do
  echo "--- qemu-$processor -cpu $cpu"
  emulate() { "qemu-$processor" -cpu "$cpu" -L "/usr/$processor-linux-gnu" "$@"; }
  for tests in "$build"/kernel_tests_*; do emulate "$tests"; done
  emulate "$build/case_table" "$calls"
done
