# Everything runs in .venv, which the first target to need it makes. Needs Python >= 3.11, gcc, make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
BIN := .venv/bin
NATIVE_SOURCES := CMakeLists.txt $(wildcard fewbit/native/*.cc fewbit/native/*.h)
# What pip would put into its isolated build environment; read from pyproject.toml, not repeated.
BUILD_REQUIRES = $(BIN)/python -c "import tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')"
SANITIZED := build/sanitized
# Test files that call compiled functions, and the programs that do so without JAX.
NATIVE_TESTS := $(wildcard tests/test_native*.py) tests/test_codes_dot.py tests/test_fused_products.py \
  tests/test_cached_attention.py tests/test_layouts.py tests/test_panel_product.py tests/test_training_dot.py
NATIVE_PROGRAMS := $(patsubst %.cc,%,$(wildcard tests/native/*_test.cc))

export FEWBIT_REQUIRE_NATIVE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Many tests start processes of their own: what one has compiled of Python the next should find.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help .venv .venv-peers .venv-bench-peers .venv-bench-llama demo test test-all test-native test-sanitized \
  bench bench-peers bench-llama lint format docs wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z.-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

.venv: .venv/.made  ## make or refresh the environment, native part included

# Refreshed in place, so that a changed requirement does not cost a full reinstall.
# Start over with `rm -rf .venv`.
.venv/.made: pyproject.toml $(NATIVE_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BUILD_REQUIRES) > .venv/build-requires.txt
	$(BIN)/python -m pip install --quiet --no-compile -r .venv/build-requires.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation \
	  --config-settings=cmake.define.FEWBIT_WERROR=ON -e '.[dev,flax,keras]'
	touch $@

# The libraries that results are compared with must not choose the versions that we test with.
.venv-peers: .venv-peers/.made  ## the environment of the comparisons with other libraries

.venv-peers/.made: pyproject.toml tests/peers/requirements.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -r tests/peers/requirements.txt
	touch $@

.venv-bench-peers: .venv-bench-peers/.made  ## the environment of the speed comparisons

.venv-bench-peers/.made: bench/peers/requirements.txt
	test -x .venv-bench-peers/bin/python || $(PYTHON) -m venv .venv-bench-peers
	.venv-bench-peers/bin/python -m pip install --quiet -r bench/peers/requirements.txt
	touch $@

# Compiles llama.cpp for this CPU: some ten minutes.
.venv-bench-llama: .venv-bench-llama/.made  ## the environment of llama.cpp

.venv-bench-llama/.made: bench/peers/requirements-llama.txt
	test -x .venv-bench-llama/bin/python || $(PYTHON) -m venv .venv-bench-llama
	.venv-bench-llama/bin/python -m pip install --quiet -r bench/peers/requirements-llama.txt
	touch $@

demo: .venv  ## a small model, quantized
	$(BIN)/python demo/digits.py

# Most of the time goes into compiling some ten thousand small programs that run once, so XLA and LLVM
# are told to emit plain code and not to optimize it: a fifth of the time. `make test-all` compiles as
# users do.
QUICK_COMPILES := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
  --xla_cpu_parallel_codegen_split_count=1
test: export XLA_FLAGS := $(QUICK_COMPILES) $(XLA_FLAGS)
test: .venv  ## the quick tests and the doctests
	$(BIN)/python -m pytest -q -n $(WORKERS) --strict-skips -m "not long"

# The report page is opened in a real browser if there is one (Debian: chromium).
test-all: .venv .venv-peers  ## everything; writes tests/last-test-all.txt
	$(BIN)/python tests/run_all.py --workers $(WORKERS)

# A compiled part that is missing fails here instead of being skipped.
test-native: .venv test-sanitized  ## the native part, plain and under sanitizers
	$(BIN)/python -m pytest -q -n $(WORKERS) --strict-skips $(NATIVE_TESTS)

# Every address and every undefined operation of the C++ is checked; jaxlib's own leaks are not our
# subject. The programs run the kernels of all instruction sets, AVX-512 through SIMDe if the CPU
# lacks it (Debian: libsimde-dev; without it they say what they could not test). Memory that nobody
# has written is full of NaN there, so that a result which depends on it is wrong.
test-sanitized: .venv  ## the native part under sanitizers; part of test-all
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DFEWBIT_WERROR=ON -DFEWBIT_NATIVE_TESTS=ON \
	  -DFEWBIT_SANITIZE=address,undefined,float-cast-overflow
	$(BIN)/cmake --build $(SANITIZED)
	set -e; for program in $(NATIVE_PROGRAMS); do \
	  ASAN_OPTIONS=detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1073741824 \
	  $(SANITIZED)/$$program; done
	FEWBIT_NATIVE_LIBRARY=$(CURDIR)/$(SANITIZED)/libfewbit_native.so \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest -q -n $(WORKERS) --strict-skips $(NATIVE_TESTS) \
	  -k "not every_format and not instruction_sets and not resident"

bench: .venv  ## every measurement in bench/, one after the other
	@set -e; for script in bench/[a-z]*.py; do \
	  echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script; done

bench-peers: .venv .venv-bench-peers  ## products beside OpenVINO, ONNX Runtime and torchao
	PYTHONPATH=. $(BIN)/python bench/products.py --peers .venv-bench-peers/bin/python

bench-llama: .venv .venv-bench-llama  ## a Gemma3 generating beside llama.cpp
	PYTHONPATH=. $(BIN)/python bench/keras_generate.py --peers .venv-bench-llama/bin/python
	.venv-bench-llama/bin/python bench/peers/llama_cpp_generate.py

lint: .venv  ## formatting, lint rules, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv  ## rewrite the sources as `lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: export KERAS_BACKEND := jax
docs: .venv  ## the pages in docs/ and the API from its docstrings, into docs/_site
	$(BIN)/python docs/build.py

wheel: .venv  ## dist/fewbit-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .

clean:  ## build products; the environments stay
	rm -rf build dist docs/_site .pytest_cache .mypy_cache .ruff_cache .hypothesis
