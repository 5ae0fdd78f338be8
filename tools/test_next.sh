#!/bin/sh
# Runs what reads JAX's own structures (the models of tests/support/zoo.py, every primitive that is known,
# those with bodies above all) on its newest pre-release. What fails there will fail for users soon.
#
#   sh tools/test_next.sh [options for pytest]     after `make .venv`
set -eu

wanted=$(.venv/bin/python tools/next_jax.py)
[ -n "$wanted" ] || exit 0

sh tools/make_env.sh .venv-next
.venv-next/bin/python tools/requirements.py dev flax keras > .venv-next/requirements.txt
# shellcheck disable=SC2086  # two requirements, one word each
.venv-next/bin/python -m pip install --quiet --no-compile -r .venv-next/requirements.txt $wanted
.venv-next/bin/python -m pip install --quiet --no-compile --no-deps --no-build-isolation -e .

XLA_FLAGS="$(.venv-next/bin/python tools/quick_compiles.py) ${XLA_FLAGS:-}" \
  .venv-next/bin/python -m pytest -q "$@" tests/tracing/test_jaxprs.py tests/interpreter/test_identity.py \
  tests/interpreter/test_taps.py tests/calibration/test_static_bodies.py tests/models/test_function.py
