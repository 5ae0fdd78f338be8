# Everything runs in .venv, which the first target to need it makes. Needs Python 3.11 or newer, gcc, make.
# PYTHON=... names the Python of .venv, PYTHON_OLDEST=... that of .venv-oldest; otherwise the newest, and
# for .venv-oldest 3.11, is looked for (tools/find_python.sh).
PYTHON ?=
PYTHON_OLDEST ?=
WORKERS ?= 2
BIN := .venv/bin
NATIVE_SOURCES := CMakeLists.txt $(wildcard fewbit/native/*/*.cc fewbit/native/*/*.h)
# Warnings of the compiler are errors. Every environment compiles in a folder of its own: scikit-build
# starts over in one that another Python has used.
COMPILED_IN = --config-settings=cmake.define.FEWBIT_WERROR=ON --config-settings=build-dir=build/$(1)
SANITIZED := build/sanitized
# Test files that call compiled functions, and the programs that do so without JAX.
NATIVE_TESTS := $(wildcard tests/kernels/test_native*.py) \
  tests/kernels/test_codes_dot.py tests/kernels/test_cached_attention.py tests/kernels/test_layouts.py \
  tests/kernels/test_panel_product.py tests/kernels/test_fused_products.py tests/training/test_training_dot.py
NATIVE_PROGRAMS := $(patsubst %.cc,%,$(wildcard tests/native/*_test.cc))

export FEWBIT_REQUIRE_NATIVE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Many tests start processes of their own: what one has compiled of Python the next should find.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help FORCE .venv .venv-oldest .venv-py312 .venv-peers .venv-bench-peers .venv-bench-llama demo \
  .venv-foreign-tunix .venv-foreign-maxtext build/foreign test-foreign \
  test test-oldest test-py312 test-matrix test-next test-all soak test-native test-sanitized test-wheel \
  bench bench-peers bench-llama lint format docs house wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9.-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 20

.venv: .venv/.made  ## make or refresh the environment, native part included

# Runs always, but only makes something, and writes its target, if there is no environment yet or none
# that fits; says so.
.venv/.python: FORCE
	@PYTHON='$(PYTHON)' sh tools/make_env.sh .venv

# What fewbit and its tests need, then fewbit itself with the headers of the JAX that is there.
# Refreshed in place, so that a changed requirement does not cost a full reinstall. Start over with
# `rm -rf .venv`. $(1): the environment, $(2): more options for pip
define install
$(1)/bin/python tools/requirements.py dev flax keras > $(1)/requirements.txt
$(1)/bin/python -m pip install --quiet --no-compile $(2) -r $(1)/requirements.txt
$(1)/bin/python -m pip install --quiet --no-compile --no-deps --no-build-isolation \
  $(call COMPILED_IN,$(patsubst .%,%,$(1))) -e .
touch $(1)/.made
endef

.venv/.made: .venv/.python pyproject.toml tools/requirements.py $(NATIVE_SOURCES)
	$(call install,.venv)

.venv-oldest: .venv-oldest/.made  ## Python 3.11 with the oldest of everything (tests/oldest.txt)

.venv-oldest/.python: FORCE
	@PYTHON='$(PYTHON_OLDEST)' sh tools/make_env.sh .venv-oldest 3.11

.venv-oldest/.made: .venv-oldest/.python pyproject.toml tests/oldest.txt tools/requirements.py $(NATIVE_SOURCES)
	$(call install,.venv-oldest,-c tests/oldest.txt)

.venv-py312: .venv-py312/.made  ## Python 3.12 with the newest of everything

.venv-py312/.python: FORCE
	@sh tools/make_env.sh .venv-py312 3.12

.venv-py312/.made: .venv-py312/.python pyproject.toml tools/requirements.py $(NATIVE_SOURCES)
	$(call install,.venv-py312)

# The libraries that results are compared with must not choose the versions that we test with. They are
# those of a certain day, when Python 3.11 was what they all knew.
.venv-peers: .venv-peers/.made  ## the environment of the comparisons with other libraries

.venv-peers/.made: tests/peers/requirements.txt
	PYTHON='$(PYTHON_OLDEST)' sh tools/make_env.sh .venv-peers 3.11 3.12 3.13
	.venv-peers/bin/python -m pip install --quiet -r tests/peers/requirements.txt
	touch $@

.venv-bench-peers: .venv-bench-peers/.made  ## the environment of the speed comparisons

.venv-bench-peers/.made: bench/peers/requirements.txt
	PYTHON='$(PYTHON_OLDEST)' sh tools/make_env.sh .venv-bench-peers 3.11 3.12 3.13
	.venv-bench-peers/bin/python -m pip install --quiet -r bench/peers/requirements.txt
	touch $@

# Compiles llama.cpp for this CPU: some ten minutes.
.venv-bench-llama: .venv-bench-llama/.made  ## the environment of llama.cpp

.venv-bench-llama/.made: bench/peers/requirements-llama.txt
	PYTHON='$(PYTHON_OLDEST)' sh tools/make_env.sh .venv-bench-llama 3.11 3.12 3.13
	.venv-bench-llama/bin/python -m pip install --quiet -r bench/peers/requirements-llama.txt
	touch $@

# Programs of others, each with the versions that it was tried with. What requires hundreds of packages
# is installed alone, and beside it what it imports.
.venv-foreign-tunix: .venv-foreign-tunix/.made  ## the environment of Tunix

.venv-foreign-maxtext: .venv-foreign-maxtext/.made  ## the environment of MaxText: 1.4 GB

.venv-foreign-%/.made: tests/foreign/requirements-%.txt
	PYTHON= sh tools/make_env.sh .venv-foreign-$* 3.12 3.13
	test ! -f tests/foreign/alone-$*.txt || \
	  .venv-foreign-$*/bin/python -m pip install --quiet --no-deps -r tests/foreign/alone-$*.txt
	.venv-foreign-$*/bin/python -m pip install --quiet -r $<
	touch $@

# tpu-inference is read, not installed.
build/foreign: .venv tests/foreign/alone-tpu-inference.txt  ## the wheel of tpu-inference
	$(BIN)/python -m pip download --quiet --no-deps -d $@ -r tests/foreign/alone-tpu-inference.txt

demo: .venv  ## a small model, quantized
	$(BIN)/python demo/digits.py

# $(1): the environment. RECORD=<file> keeps what was run and found, SELECT= chooses by marks.
SELECT ?= not long
define quick-tests
XLA_FLAGS="$$($(1)/bin/python tools/quick_compiles.py) $(XLA_FLAGS)" \
  $(1)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --strict-skips \
  --hypothesis-profile=repeatable -m "$(SELECT)" $(if $(RECORD),--record=$(RECORD))
endef

test: .venv  ## the quick tests and the doctests
	$(call quick-tests,.venv)

test-oldest: .venv-oldest  ## the same with the oldest versions of everything
	$(call quick-tests,.venv-oldest)

test-py312: .venv-py312  ## the same on Python 3.12
	$(call quick-tests,.venv-py312)

# One after the other; each is run and written down whatever became of those before it. With long
# tests of what has to hold everywhere: every primitive with a body, all examples.
test-matrix: export SELECT := (not long or everywhere) and not soak
test-matrix:  ## the three above; writes tests/last-test-{oldest,py312,newest}.txt
	failed=; \
	$(MAKE) test-oldest RECORD=tests/last-test-oldest.txt || failed="$$failed test-oldest"; \
	$(MAKE) test-py312 RECORD=tests/last-test-py312.txt || failed="$$failed test-py312"; \
	$(MAKE) test RECORD=tests/last-test-newest.txt || failed="$$failed test"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# A failure here is news, not a fault: no part of what has to pass.
test-next: .venv  ## models and primitives on JAX's newest pre-release, if there is one
	PYTHON='$(PYTHON)' sh tools/test_next.sh -n $(WORKERS)

# The report page is opened in a real browser if there is one (Debian: chromium).
test-all: .venv .venv-peers  ## everything but `soak`; writes tests/last-test-all.txt
	$(BIN)/python tests/run_all.py --workers $(WORKERS)

# Programs that nobody here wrote, through `python -m fewbit.as_qwix`. One that cannot be installed here
# is skipped by name (tests/skips.txt).
test-foreign: .venv  ## MaxText, Tunix and vLLM's rules on fewbit; writes tests/last-test-foreign.txt
	-$(MAKE) .venv-foreign-tunix
	-$(MAKE) .venv-foreign-maxtext
	-$(MAKE) build/foreign
	$(BIN)/python -m pytest -q -n0 --strict-skips --longest 3600 tests/foreign/test_foreign.py \
	  --record=tests/last-test-foreign.txt

soak: .venv  ## the tests that take hours; writes tests/last-soak.txt
	$(BIN)/python -m pytest -q -n $(WORKERS) --strict-skips -m soak --record tests/last-soak.txt

# A compiled part that is missing fails here instead of being skipped.
test-native: .venv test-sanitized  ## the native part, plain and under sanitizers
	$(BIN)/python -m pytest -q -n $(WORKERS) --strict-skips $(NATIVE_TESTS)

# Every address and every undefined operation of the C++ is checked; jaxlib's own leaks are not our
# subject. The programs run the kernels of all instruction sets, AVX-512 through SIMDe if the CPU
# lacks it (Debian: libsimde-dev; without it they say what they could not test). Memory that nobody
# has written is full of NaN there, so that a result which depends on it is wrong. Left out are long
# sweeps whose calls others make too.
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
	  -m "not soak" --longest 3600 \
	  -k "not every_format and not every_split and not instruction_sets and not resident" \
	  $(if $(RECORD),--record=$(RECORD))

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

house: .venv  ## files and lines beside their budgets, what a call enters; draws docs/house.svg
	$(BIN)/python docs/house.py

# Built in pip's isolated environment, against the headers of the oldest JAX. auditwheel reads which
# symbols of the C libraries are needed and names the systems that have them.
wheel: .venv  ## dist/fewbit-*.whl, for every Python and JAX that is supported
	rm -rf build/wheel dist/*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps $(call COMPILED_IN,for-wheel) -w build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/fewbit-*.whl

test-wheel: wheel  ## the wheel on Python 3.11 to 3.13, where there is no compiler
	sh tools/check_wheel.sh dist/fewbit-*.whl

clean:  ## build products; the environments stay
	rm -rf build dist docs/_site .pytest_cache .mypy_cache .ruff_cache .hypothesis
