#!/usr/bin/env bash
# Check the engine's source for systems that are not here, with clang and the headers of others: macOS on ARM (C++
# headers of libc++, C headers of Linux) and Windows (headers of MinGW). Only the syntax, types and warnings are checked.
# Nothing is linked or run, and what depends on Apple's or Microsoft's own headers is not seen.
set -euo pipefail
clang=${CLANG:-clang++}
flags="-std=c++17 -fsyntax-only -Icsrc -Wall -Wextra -Werror -Wno-psabi -Wno-ignored-attributes -Wno-unknown-pragmas
  -fno-math-errno -fno-trapping-math -ffp-contract=fast -DREGARD_STD_THREADS"
need() {
  [ -d "$1" ] || {
    echo "$1 was not found. On Debian: apt-get install $2" >&2
    exit 1
  }
}
syntax() { # NAME OPTIONS...: the engines of one system
  local name=$1 source
  shift
  while read -r source; do
    echo "$name: $source"
    # shellcheck disable=SC2086
    "$clang" $flags "$@" $source
  done
}

libcxx=$("$clang" -print-resource-dir)/../../../include/c++/v1
linux=/usr/aarch64-linux-gnu/include
need "$libcxx" libc++-14-dev
need "$linux" g++-aarch64-linux-gnu
# __nonnull is a keyword of Apple's, and a macro of Linux' headers
syntax macOS --target=arm64-apple-macos11 -U__nonnull -D_GNU_SOURCE -nostdinc++ -isystem tests/support/apple \
  -isystem "$libcxx" -isystem "$linux" <<'SOURCES'
csrc/kernel.cpp -DENGINE=baseline
csrc/kernel_bf16.cpp -DENGINE=aarch64_bf16 -DPLAIN_ENGINE=baseline -march=armv8.2-a+bf16
tests/cpp/main.cpp -DENGINE=baseline
SOURCES

mingw=$(ls -d /usr/lib/gcc/x86_64-w64-mingw32/*-posix/include/c++ 2>/dev/null || true)
need "${mingw:-/usr/x86_64-w64-mingw32}" g++-mingw-w64-x86-64-posix
syntax Windows --target=x86_64-w64-windows-gnu -nostdinc++ -isystem "$mingw" -isystem "$mingw/x86_64-w64-mingw32" \
  -isystem /usr/x86_64-w64-mingw32/include <<'SOURCES'
csrc/kernel.cpp -DENGINE=baseline
csrc/kernel.cpp -DENGINE=x86_64_v3 -march=x86-64-v3
csrc/kernel.cpp -DENGINE=x86_64_v4 -march=x86-64-v4
csrc/kernel_bf16.cpp -DENGINE=x86_64_v4_bf16 -DPLAIN_ENGINE=x86_64_v4 -march=x86-64-v4 -mavx512bf16
tests/cpp/case_table.cpp -DREGARD_X86
SOURCES
